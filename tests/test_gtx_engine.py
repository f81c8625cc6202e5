"""The engines agree: DeepSpeed at every ZeRO stage takes the steps of plain torch, whatever the plan of each step.

On two ranks the mode, the waves and the rounds change from step to step on one engine. All DeepSpeed engines run in one
world, since DeepSpeed keeps its first world's groups for good. Not here: that plans equal one rank in float64
(`test_gtx_parallel_equal.py`), and the command line (`test_launch.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import awkward_graph, even_homes, partitioned, plan_of
from ranks import end_ranks, run_ranks

from gtx.batches import BatchPlanner
from gtx.config import EngineConfig, parse_config
from gtx.engine import clear_left_lock, deepspeed_dict, import_deepspeed, lr_factor, make_engine
from gtx.models import GraphModel
from gtx.parallel.compiler import Compiler
from gtx.parallel.executor import Executor
from gtx.parallel.world import World, solo
from monitor import PhaseTimer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

STEPS = 10
MODES = ("graph", "model", "pipeline", "data", "mixed")
NO_PERSISTENCE = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # else tiny weights stay whole


@dataclass(frozen=True)
class Case:
    """settings: the engine's. plain: those of the torch engine it must equal, where they are more than lr.

    has_compiler, has_fp16: whether the machine seems to have them; some CPUs have fp16, and others must be refused.
    """

    settings: dict[str, Any]
    plain: dict[str, Any] = field(default_factory=dict)
    model: str = "GT"
    checkpointing: str = "none"
    has_compiler: bool = True
    has_fp16: bool = True
    steps: int = STEPS


def zero(stage: int, offload: bool = False, **more: Any) -> dict[str, Any]:
    passed = {"deepspeed": NO_PERSISTENCE} if stage == 3 else {}
    return {"zero_stage": stage, "offload_optimizer": "cpu" if offload else "none", **passed, **more}


COSINE = {"lr_schedule": "cosine", "warmup_steps": 3}
LINEAR = {"lr_schedule": "linear", "warmup_steps": 2}
CLIPPED = {"gradient_clipping": 0.1}
SGD = {"optimizer": "sgd", "momentum": 0.9}

EXACT = {
    "ZeRO 0": Case(zero(0)),
    "ZeRO 0, SGD": Case(zero(0, **SGD), SGD, steps=5),
    "ZeRO 1, cosine": Case(zero(1, **COSINE), COSINE),
    "ZeRO 2, clipped": Case(zero(2, **CLIPPED), CLIPPED),
    "ZeRO 3": Case(zero(3)),
    "ZeRO 3, layers recomputed": Case(zero(3), checkpointing="layer", steps=5),
    "ZeRO 3, edges recomputed, GPS, clipped": Case(zero(3, **CLIPPED), CLIPPED, "GPS", "edges", steps=5),
    "ZeRO 2, offloaded, linear": Case(zero(2, True, **LINEAR), LINEAR),
    "ZeRO 3, offloaded": Case(zero(3, True)),
    "ZeRO 2, offloaded, no compiler": Case(zero(2, True), has_compiler=False, steps=5),
}
ROUNDED = {
    "bf16": Case(zero(0, precision="bf16"), steps=5),
    "bf16, ZeRO 2": Case(zero(2, precision="bf16"), steps=5),
    "bf16, ZeRO 3": Case(zero(3, precision="bf16"), steps=5),
}
REFUSED = {
    "fp16": (
        Case(zero(0, precision="fp16"), has_fp16=False),
        "engine.precision fp16 is not supported by this device; use bf16 or float32",
    ),
    "a value DeepSpeed refuses": (
        Case(zero(1, deepspeed={"zero_optimization": {"reduce_bucket_size": "many"}})),
        "engine.deepspeed: ",
    ),
    "a ZeRO key that is not there": (
        Case(zero(1, deepspeed={"zero_optimization": {"no_such_key": 1}})),
        "engine.deepspeed: ",
    ),
}


@dataclass(frozen=True)
class Result:
    """losses, lrs: by step. parameters: whole, by name, afterwards. said: lines for the user. error: why not.

    sharded: between steps this rank holds no parameter whole.
    """

    losses: list[float]
    lrs: list[float]
    parameters: dict[str, np.ndarray]
    said: list[str]
    error: str | None = None
    sharded: bool = False


def run(world: World, case: Case, engine_settings: dict[str, Any]) -> Result:
    """Some steps, each under another plan."""
    graph = partitioned(awkward_graph())
    config = parse_config(
        {
            "model": {"name": case.model, "width": 6, "heads": 3, "layers": 3, "dropout": 0.3},
            "sampling": {"fanout": 4},
            "batch": {"kind": "cluster", "parts": 2, "micro_batches": 3},
            "engine": {"lr": 1e-2, **engine_settings},
        }
    )
    torch.manual_seed(0)
    model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
    said: list[str] = []
    try:
        engine = make_engine(model, config.engine, world, STEPS, said.append)
    except ValueError as error:
        return Result([], [], {}, said, str(error))
    timer = PhaseTimer()
    executor = Executor(engine, graph, world, timer, seed=0, num_heads=3, backend="torch")
    batches = BatchPlanner(graph, config.batch, config.sampling, 3, 0)
    homes = even_homes(graph, world.size)
    losses, lrs = [], []
    for step in range(case.steps):
        plan = plan_of(
            MODES[step % 5],
            graph,
            world.size,
            3,
            micro_batches_per_wave=(None, 2, 1)[step % 3],
            waves_per_round=step % 2,
            checkpointing=case.checkpointing,
        )
        lrs.append(engine.lr)
        compiled = Compiler(graph, plan, world, 3, homes).compile(batches.step(step))
        losses.append(executor.train_step(compiled, plan, step, fixed=False).loss)
    sharded = all(p.numel() == 0 for p in model.parameters())
    return Result(losses, lrs, whole_parameters(model), said, sharded=sharded)


def whole_parameters(model: GraphModel) -> dict[str, np.ndarray]:
    """Copies of all parameters; under ZeRO 3 gathered from the ranks."""
    named = dict(model.named_parameters())
    if not any(hasattr(p, "ds_id") for p in named.values()):
        return {name: p.detach().float().numpy().copy() for name, p in named.items()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: p.detach().float().numpy().copy() for name, p in named.items()}


def run_all(world: World, cases: dict[str, Case], empty_folder: str) -> dict[str, Result]:
    results = {}
    for name, case in cases.items():
        hidden = {} if case.has_compiler else {"PATH": empty_folder}
        accelerator = import_deepspeed(world).accelerator.get_accelerator()
        without_fp16 = nullcontext() if case.has_fp16 else mock.patch.object(accelerator, "is_fp16_supported", bool)
        try:
            with mock.patch.dict(os.environ, hidden), without_fp16:
                results[name] = run(world, case, case.settings)
        except Exception as error:
            raise RuntimeError(f"in the case {name}") from error
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Result]]]:
    """What each of two ranks found. DeepSpeed's CPU Adam is compiled at its first use on a machine."""
    cases = {**EXACT, **ROUNDED, **{name: case for name, (case, _) in REFUSED.items()}}
    folder = tmp_path_factory.mktemp("empty")
    end_ranks()
    yield run_ranks(run_all, 2, cases, str(folder), hang_s=500, timeout_s=550)
    end_ranks()


@pytest.fixture(scope="module")
def plain(one_thread: None) -> dict[str, Result]:
    """What plain torch does on one rank, for each case."""
    known: dict[str, Result] = {}
    for case in (*EXACT.values(), *ROUNDED.values()):
        key = repr((case.plain, case.model, case.steps))
        if key not in known:
            known[key] = run(solo(), case, {"name": "torch", **case.plain})
    return known


def plain_of(plain: dict[str, Result], case: Case) -> Result:
    return plain[repr((case.plain, case.model, case.steps))]


def without_zero_gradients(name: str, parameter: np.ndarray) -> np.ndarray:
    """The parameter without those entries whose gradient is zero on paper.

    A key's bias adds the same to all logits of a row, which softmax ignores. Its gradient is rounding noise, which Adam
    turns into steps as long as any other's.
    """
    if name.endswith("key_value.bias") and "attention" not in name:
        return parameter[len(parameter) // 2 :]  # values; keys are the first half
    return parameter


@pytest.mark.parametrize("name", EXACT)
def test_deepspeed_takes_the_steps_of_plain_torch(
    name: str, found: list[dict[str, Result]], plain: dict[str, Result]
) -> None:
    """Losses to 1e-5, over 10 steps for each stage, offloaded or not; learning rates; final parameters to 1e-4."""
    want = plain_of(plain, EXACT[name])
    assert want.losses[-1] != want.losses[0]
    for own in found:
        have = own[name]
        assert have.error is None, have.error
        np.testing.assert_allclose(have.losses, want.losses, rtol=1e-5)
        np.testing.assert_allclose(have.lrs, want.lrs, rtol=1e-12)
        assert have.parameters.keys() == want.parameters.keys()
        for key, parameter in want.parameters.items():
            one, other = without_zero_gradients(key, parameter), without_zero_gradients(key, have.parameters[key])
            assert one.shape == other.shape, key
            assert np.linalg.norm(other - one) <= 1e-4 * np.linalg.norm(one), key


def test_clipping_and_schedules_do_something(plain: dict[str, Result]) -> None:
    """The equalities above are not between runs that ignore these settings."""
    last = [round(result.losses[-1], 5) for result in plain.values()]
    assert len(set(last)) == len(last)


@pytest.mark.parametrize("name", ROUNDED)
def test_bf16_is_plain_torch_within_its_rounding(
    name: str, found: list[dict[str, Result]], plain: dict[str, Result]
) -> None:
    want = plain_of(plain, ROUNDED[name])
    for own in found:
        assert own[name].error is None
        np.testing.assert_allclose(own[name].losses, want.losses, rtol=0.05)
        assert own[name].losses != want.losses


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_cannot_do_is_one_line_on_every_rank(name: str, found: list[dict[str, Result]]) -> None:
    for own in found:
        error = own[name].error
        assert error is not None
        assert error.startswith(REFUSED[name][1])
        assert "\n" not in error


def test_without_a_compiler_an_offloaded_optimizer_is_torchs_and_the_user_is_told(
    found: list[dict[str, Result]],
) -> None:
    for own in found:
        (line,) = own["ZeRO 2, offloaded, no compiler"].said
        assert line.startswith("no C++ compiler on the PATH: the offloaded optimizer is torch's Adam")
        (line,) = own["ZeRO 2, offloaded, linear"].said
        assert line.startswith("loading DeepSpeed's CPU Adam")
        assert own["ZeRO 2, clipped"].said == []


def test_weights_are_sharded_at_stage_3_only(found: list[dict[str, Result]]) -> None:
    """The stage asked for is the one that ran."""
    for own in found:
        for name in (*EXACT, *ROUNDED):
            assert own[name].sharded == ("ZeRO 3" in name), name


# The one config -------------------------------------------------------------------------------------------------------


def test_deepspeed_does_not_clip_unless_asked() -> None:
    """Its own default is 1.0."""
    assert deepspeed_dict(EngineConfig())["gradient_clipping"] == 0.0
    assert deepspeed_dict(EngineConfig(gradient_clipping=2.5))["gradient_clipping"] == 2.5


def test_further_keys_reach_deepspeed_beside_ours() -> None:
    passed = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    settings = deepspeed_dict(EngineConfig(zero_stage=2, offload_optimizer="cpu", deepspeed=passed))
    assert settings["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": 1000,
    }
    assert settings["wall_clock_breakdown"] is True
    assert settings["gradient_clipping"] == 0.0
    assert deepspeed_dict(EngineConfig(deepspeed={"gradient_clipping": 3.0}))["gradient_clipping"] == 3.0


def test_precisions_in_deepspeeds_words() -> None:
    switched = {
        precision: {key: deepspeed_dict(EngineConfig(precision=precision))[key]["enabled"] for key in ("bf16", "fp16")}
        for precision in ("float32", "bf16", "fp16")
    }
    assert switched["float32"] == {"bf16": False, "fp16": False}
    assert switched["bf16"] == {"bf16": True, "fp16": False}
    assert switched["fp16"] == {"bf16": False, "fp16": True}
    assert deepspeed_dict(EngineConfig(precision="fp16", loss_scale=128.0))["fp16"]["loss_scale"] == 128.0


def factors(steps: Sequence[int], **settings: Any) -> list[float]:
    factor = lr_factor(EngineConfig(**settings), 12)
    return [factor(step) for step in steps]


def test_learning_rate_schedules() -> None:
    """Warm-up is linear and ends at 1; then constant, linear to 0 or half a cosine to 0, at the last step and after."""
    assert factors(range(3), warmup_steps=3) == [0.25, 0.5, 0.75]
    assert factors([0, 5, 20]) == [1.0, 1.0, 1.0]
    assert factors([2, 7, 12, 20], warmup_steps=2, lr_schedule="linear") == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert factors([2, 7, 12, 20], warmup_steps=2, lr_schedule="cosine") == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert factors([2], warmup_steps=20, lr_schedule="cosine") == pytest.approx([3 / 21])


def test_a_lock_left_by_a_killed_compilation_is_removed_and_a_held_one_is_not(tmp_path: Path) -> None:
    lock, said = tmp_path / "lock", list[str]()
    clear_left_lock(lock, said.append)
    assert not said

    with lock.open("w"):  # a process has it open: this one
        os.utime(lock, (0, 0))
        clear_left_lock(lock, said.append)
        assert lock.exists() and not said

    os.utime(lock)
    clear_left_lock(lock, said.append)
    assert lock.exists() and said == [
        f"waiting for the compilation that holds {lock}; delete that file if none is running"
    ]

    os.utime(lock, (0, 0))
    clear_left_lock(lock, said.append)
    assert not lock.exists() and said[1:] == [f"removing {lock}, left by a compilation that was killed"]
