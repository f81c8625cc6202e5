"""The engines: DeepSpeed behind one border, and plain torch as the reference. Only this file imports DeepSpeed.

An engine owns weights, gradients and the optimizer. It knows nothing of plans: each rank hands it its share of the loss
and gradients are summed over ranks. Not here: the forward itself (`models.py`) and row exchanges (`parallel/`).
"""

from __future__ import annotations

import fcntl
import glob
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils.cpp_extension
from pydantic import ValidationError
from torch import Tensor, nn

from gtx.checkpoint import EngineState
from gtx.config import EngineConfig
from gtx.engine_state import buffers_of, check_names, count_from, counted_steps, fill, fill_buffers, moment_kinds
from gtx.models import GraphModel
from gtx.parallel.context import WaveContext
from gtx.parallel.world import World

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPILES_S = 600.0  # no compilation of DeepSpeed's takes longer


def lr_factor(config: EngineConfig, total_steps: int) -> Callable[[int], float]:
    """The factor on `lr` at each optimizer step: linear warm-up, then constant, linear to 0, or cosine to 0."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        done = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
        match config.lr_schedule:
            case "linear":
                return max(1.0 - done, 0.0)
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
            case _:
                return 1.0

    return factor


def make_optimizer(config: EngineConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer the config names, as torch has it."""
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        case "adam":
            return torch.optim.Adam(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
        case "sgd":
            return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


class TorchEngine:
    """Plain torch: replicated weights, gradients added up by one all-reduce."""

    def __init__(self, model: GraphModel, config: EngineConfig, world: World, total_steps: int):
        self.dtype = DTYPES[config.precision]
        self.model = model.to(world.device, self.dtype)
        self.config, self.world = config, world
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(config, self.parameters)
        self.lr_schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_factor(config, total_steps))

    def forward(self, x: Tensor, token: Tensor, wave: WaveContext) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.model(x, token, wave)
        return out

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def reduce(self) -> None:
        """Sum gradients over ranks."""
        if self.world.size == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        for p, piece in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = piece.view_as(p)

    def step(self) -> None:
        self.reduce()
        if self.config.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.gradient_clipping)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.lr_schedule.step()

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> EngineState:
        """Weights, statistics and moments. The same on every rank."""
        kinds, kept = moment_kinds(self.config), self.optimizer.state
        named = dict(self.model.named_parameters())
        moments = {
            kind: {name: kept[p].get(kind, torch.zeros_like(p)).detach().cpu().clone() for name, p in named.items()}
            for kind in kinds
        }
        weights = {name: p.detach().cpu().clone() for name, p in named.items()}
        return EngineState(weights, buffers_of(self.model), moments, counted_steps(self.optimizer, self.lr_schedule))

    @torch.no_grad()
    def load(self, state: EngineState) -> None:
        """Go on from `state`, whatever engine, ZeRO stage and world size it is of."""
        kinds = moment_kinds(self.config)
        count_from(self.optimizer, self.parameters, self.lr_schedule, kinds, state.optimizer_steps)
        fill(self.model, state)
        for name, p in self.model.named_parameters():
            for kind in kinds:
                self.optimizer.state[p][kind].copy_(state.moments[kind][name])


def deepspeed_dict(config: EngineConfig) -> dict[str, Any]:
    """The JSON that DeepSpeed reads, from the one config; `engine.deepspeed` adds keys and wins where both speak.

    Clipping is named even when off, since DeepSpeed's own default clips at 1.0.
    """
    zero: dict[str, Any] = {"stage": config.zero_stage}
    if config.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": config.precision == "fp16", "loss_scale": config.loss_scale},
    }
    return _merged(settings, config.deepspeed)


def _merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


class DeepSpeedEngine:
    """DeepSpeed: ZeRO 0 to 3, optimizer offload, bf16 and fp16. It averages over ranks, so losses are multiplied."""

    def __init__(
        self,
        model: GraphModel,
        config: EngineConfig,
        world: World,
        total_steps: int,
        say: Callable[[str], None] = lambda line: None,
    ):
        """say: tells the user what is being waited for, such as a compilation.

        Raises ValueError with one line for a precision that the device lacks or a key that DeepSpeed refuses.
        """
        deepspeed = import_deepspeed(world)
        accelerator = deepspeed.accelerator.get_accelerator()
        if config.precision == "fp16" and not accelerator.is_fp16_supported():
            raise ValueError("engine.precision fp16 is not supported by this device; use bf16 or float32")
        if config.precision == "bf16" and not accelerator.is_bf16_supported():
            raise ValueError("engine.precision bf16 is not supported by this device; use float32")
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
        self.model, self.config, self.world = model.to(world.device), config, world
        self.dtype = DTYPES[config.precision]
        optimizer = self._optimizer(list(model.parameters()), say)
        try:
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                lr_scheduler=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lr_factor(config, total_steps)),
                config=deepspeed_dict(config),
                dist_init_required=False,
            )
        except (ValidationError, deepspeed.DeepSpeedConfigError) as error:
            raise ValueError(f"engine.deepspeed: {' '.join(str(error).split())}") from None

        for norm in self.model.norms:  # running statistics move in small steps, which bf16 would round away
            norm.running_mean, norm.running_var = norm.running_mean.float(), norm.running_var.float()

        with torch.no_grad():
            for p, master in self._masters().items():
                if master is not p:  # DeepSpeed makes their moments by an update without gradients: undone, not counted
                    master.copy_(p)
                    count_from(self._inner, [master], self.engine.lr_scheduler, moment_kinds(config), 0)

    def _optimizer(self, parameters: list[nn.Parameter], say: Callable[[str], None]) -> torch.optim.Optimizer:
        """torch's optimizer, or DeepSpeed's CPU Adam where the optimizer is offloaded and a compiler is there."""
        config = self.config
        if config.offload_optimizer == "none" or config.optimizer == "sgd":
            return make_optimizer(config, parameters)
        if shutil.which("c++") is None and shutil.which("g++") is None:
            say("no C++ compiler on the PATH: the offloaded optimizer is torch's Adam instead of DeepSpeed's CPU Adam")
            return make_optimizer(config, parameters)
        say("loading DeepSpeed's CPU Adam; its first use compiles it, a minute or two, once")
        clear_left_lock(Path(torch.utils.cpp_extension._get_build_directory("cpu_adam", verbose=False)) / "lock", say)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made: torch.optim.Optimizer = DeepSpeedCPUAdam(
            parameters,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            adamw_mode=config.optimizer == "adamw",
        )
        return made

    def forward(self, x: Tensor, token: Tensor, wave: WaveContext) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.engine(x, token, wave)
        return out

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
        if not last:
            self.engine.step()

    def step(self) -> None:
        self.engine.step()

    @property
    def lr(self) -> float:
        return float(self.engine.get_lr()[0])

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The optimizer below DeepSpeed's wrapper, if there is one."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return inner

    def state(self) -> EngineState:
        """Weights, statistics and moments in full. A collective; the same on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        kinds, kept, masters = moment_kinds(self.config), self._inner.state, self._masters()
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        for name, p in self.model.named_parameters():
            master = masters.get(p)
            weight = safe_get_full_fp32_param(p) if master is None else master
            weights[name] = weight.detach().cpu().clone()
            for kind in kinds:
                moment = safe_get_full_optimizer_state(p, kind) if master is None else kept[master][kind]
                moments[kind][name] = moment.detach().cpu().clone()
        return EngineState(
            weights, buffers_of(self.model), moments, counted_steps(self._inner, self.engine.lr_scheduler)
        )

    @torch.no_grad()
    def load(self, state: EngineState) -> None:
        """Go on from `state`, whatever engine, ZeRO stage and world size it is of.

        The model was filled with it before DeepSpeed took it: here are the full precision copies and the moments.
        """
        kinds = moment_kinds(self.config)
        masters = [p for group in self._inner.param_groups for p in group["params"]]
        masters = getattr(self.optimizer, "fp32_partitioned_groups_flat", masters)  # ZeRO 3 keeps them itself
        count_from(self._inner, masters, self.engine.lr_scheduler, kinds, state.optimizer_steps)
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.optimizer._lazy_init_hp_params_optimizer_state()  # what a first step would do
        whole = self._masters()
        for name, p in self.model.named_parameters():
            if p in whole:
                whole[p].copy_(state.weights[name])
            else:
                self._set_full(p, state.weights[name])
            for kind in kinds:
                if p in whole:
                    self._inner.state[whole[p]][kind].copy_(state.moments[kind][name])
                else:
                    self._set_full(p, state.moments[kind][name], kind)
        fill_buffers(self.model, state)

    def _masters(self) -> dict[nn.Parameter, Tensor]:
        """What the optimizer steps for each parameter that ZeRO leaves whole: itself, or its float32 copy."""
        parameters = list(self.model.parameters())
        if any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in parameters):
            return {}
        copied = [p for group in getattr(self.optimizer, "fp16_groups", [parameters]) for p in group]
        masters = [p for group in getattr(self.optimizer, "fp32_groups", [parameters]) for p in group]
        return dict(zip(copied, masters, strict=True))

    def _set_full(self, p: nn.Parameter, value: Tensor, kind: str | None = None) -> None:
        """The full precision weight of `p`, or its moment `kind`."""
        from deepspeed import utils

        value = value.to(self.world.device, torch.float32)
        if hasattr(p, "ds_id"):
            # ZeRO 3 pads a parameter to equal parts, and DeepSpeed's setter of a full one reads beyond its end.
            part = cast(Any, p).ds_tensor.numel()
            value = nn.functional.pad(value.flatten(), (0, part * self.world.size - value.numel()))
            value = value[part * self.world.rank :][:part]
            weight, moment = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
        else:
            weight, moment = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        weight(p, value) if kind is None else moment(p, value, kind)


def clear_left_lock(lock: Path, say: Callable[[str], None]) -> None:
    """Removes the lock of a compilation that was killed; torch's `FileBaton` would wait for it for ever.

    A lock that no process here has open may be that of another host with the same home directory, so one younger than
    `COMPILES_S` is left, and the user is told.
    """
    if not lock.exists():
        return
    with open(lock.with_name("gtx.lock"), "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)  # one rank looks and removes; the next sees the lock of who compiles then
        held = False
        for link in glob.iglob("/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # a process that ended, or another user's
                held = held or os.readlink(link) == str(lock)
        if held or not lock.exists():
            return
        if time.time() - lock.stat().st_mtime < COMPILES_S:
            say(f"waiting for the compilation that holds {lock}; delete that file if none is running")
            return
        say(f"removing {lock}, left by a compilation that was killed")
        lock.unlink()


def import_deepspeed(world: World) -> Any:
    """DeepSpeed, quiet, and without the shared-memory op that only its inference needs (minutes of compilation)."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    os.environ.setdefault("LOCAL_RANK", str(world.device.index or 0))  # it insists, also under plain python
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        import deepspeed.accelerator
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19.8 calls collectives that torch 2.13 renamed; nothing a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def make_engine(
    model: GraphModel,
    config: EngineConfig,
    world: World,
    total_steps: int,
    say: Callable[[str], None],
    state: EngineState | None = None,
) -> TorchEngine | DeepSpeedEngine:
    """The engine the config names. state: what it goes on from.

    Raises ValueError with one line if the state is of another model.
    """
    if state is not None:
        check_names(model, state)
        fill(model, state)
    engine: TorchEngine | DeepSpeedEngine
    if config.name == "torch":
        engine = TorchEngine(model, config, world, total_steps)
    else:
        engine = DeepSpeedEngine(model, config, world, total_steps, say)
    if state is not None:
        engine.load(state)
    return engine
