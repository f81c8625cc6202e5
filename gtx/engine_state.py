"""How the state of an engine is counted, checked and filled in, for checkpoints, whatever the engine.

Not here: the file (`checkpoint.py`), and how DeepSpeed's partitions are reached (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gtx.checkpoint import EngineState
from gtx.config import EngineConfig


def moment_kinds(config: EngineConfig) -> tuple[str, ...]:
    """The tensors that the optimizer keeps for each parameter, as torch calls them."""
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def counted_steps(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LambdaLR) -> int:
    """Updates so far: Adam counts them itself; a step that overflowed is none."""
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=int(schedule.last_epoch))


def count_from(
    optimizer: torch.optim.Optimizer,
    masters: Iterable[Tensor],
    schedule: torch.optim.lr_scheduler.LambdaLR,
    kinds: tuple[str, ...],
    steps: int,
) -> None:
    """An optimizer and learning rate as after `steps` updates, its moments 0 and there to be written to.

    masters: the tensors that it steps.
    """
    counts_in_tensor = isinstance(optimizer, torch.optim.Adam)  # and AdamW, which is one; DeepSpeed counts in an int
    for p in masters:
        optimizer.state[p].update({kind: torch.zeros_like(p.data) for kind in kinds})
        if "exp_avg" in kinds:
            optimizer.state[p]["step"] = torch.tensor(float(steps)) if counts_in_tensor else steps
    schedule.last_epoch = steps
    factors = [factor(steps) for factor in schedule.lr_lambdas]
    schedule._last_lr = [base * factor for base, factor in zip(schedule.base_lrs, factors, strict=True)]
    for group, lr in zip(optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = lr


def check_names(model: nn.Module, state: EngineState) -> None:
    """Raises ValueError with one line if the state is not of this model's parameters and shapes."""
    for what, mine, theirs in (
        ("parameter", dict(model.named_parameters()), state.weights),
        ("buffer", dict(model.named_buffers()), state.buffers),
    ):
        for name in sorted(mine.keys() | theirs.keys()):
            want = tuple(mine[name].shape) if name in mine else None
            have = tuple(theirs[name].shape) if name in theirs else None
            if want != have:
                raise ValueError(
                    f"--resume: the {what} {name} is {have or 'not there'} in the checkpoint and {want or 'not there'} "
                    "in this model; give the config of the run that wrote it"
                )


def fill(model: nn.Module, state: EngineState) -> None:
    """Copy weights and running statistics into a model, rounded to its dtype."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state.weights[name])
        fill_buffers(model, state)


def fill_buffers(model: nn.Module, state: EngineState) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(state.buffers[name])


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().cpu().clone() for name, buffer in model.named_buffers()}
