"""The plan: what it refuses, how it is kept as JSON, and what its tables say.

Not here: that a plan does not change a result (`test_gtx_parallel_equal.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan import (
    CHECKPOINTING,
    FORMAT,
    MODES,
    Placement,
    Plan,
    deal,
    fixed_plan,
    from_dict,
    from_json,
    head_ranges,
    head_slices,
    moves_between,
    owner_table,
    split_evenly,
    stage_of,
)

GRAPH = Placement("graph", (2,))
MODEL = Placement("model", (2, 0, 1))
PIPELINE = Placement("pipeline", (1, 0, 2), (2, 0, 3))
DATA = Placement("data", (0, 2))
PLAN = Plan(3, 5, (GRAPH, MODEL, PIPELINE, DATA), 2, 1, "layer")

examples = settings(deadline=None, max_examples=60)  # machines may be busy


# As JSON --------------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that does not contradict itself."""
    world_size, num_layers = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    groups = st.permutations(range(world_size)).flatmap(
        lambda ranks: st.integers(1, world_size).map(lambda count: tuple(ranks[:count]))
    )

    def placement() -> Placement:
        mode, ranks = draw(st.sampled_from(MODES)), draw(groups)
        if mode == "graph":
            return Placement(mode, ranks[:1])
        if mode != "pipeline":
            return Placement(mode, ranks)
        cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
        bounds = [0, *cuts, num_layers]
        return Placement(mode, ranks, tuple(b - a for a, b in zip(bounds[:-1], bounds[1:], strict=True)))

    return Plan(
        world_size,
        num_layers,
        tuple(placement() for _ in range(draw(st.integers(1, 6)))),
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(CHECKPOINTING)),
    )


@examples
@given(plans())
def test_a_plan_survives_json(plan: Plan) -> None:
    again = from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert from_dict(plan.as_dict()) == plan


def test_plans_that_differ_have_other_fingerprints() -> None:
    others = [
        replace(PLAN, world_size=4),
        replace(PLAN, partitions=PLAN.partitions[:3]),
        replace(PLAN, partitions=(MODEL, GRAPH, PIPELINE, DATA)),
        replace(PLAN, partitions=(GRAPH, Placement("model", (0, 2, 1)), PIPELINE, DATA)),
        replace(PLAN, partitions=(GRAPH, MODEL, Placement("pipeline", (1, 0, 2), (3, 0, 2)), DATA)),
        replace(PLAN, partitions=(GRAPH, MODEL, PIPELINE, Placement("model", (0, 2)))),
        replace(PLAN, micro_batches_per_wave=0),
        replace(PLAN, waves_per_round=0),
        replace(PLAN, checkpointing="none"),
    ]
    prints = [plan.fingerprint for plan in (PLAN, *others)]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in prints)


def test_what_a_plan_file_may_leave_out() -> None:
    text = {"format": FORMAT, "world_size": 1, "num_layers": 2, "partitions": [{"mode": "graph", "ranks": [0]}]}
    assert from_dict(text) == Plan(1, 2, (Placement("graph", (0,)),))


# What is refused, and in which words ----------------------------------------------------------------------------------

REFUSED_PLANS: list[tuple[Callable[[], object], str]] = [
    (lambda: replace(PLAN, world_size=0), "plan.world_size is 0; a plan needs at least one rank"),
    (lambda: replace(PLAN, num_layers=0), "plan.num_layers is 0; a plan needs at least one layer"),
    (lambda: replace(PLAN, partitions=()), "plan.partitions is empty; name a placement for every partition"),
    (
        lambda: replace(PLAN, checkpointing="some"),  # type: ignore[arg-type]
        "plan.checkpointing is 'some'; use one of none, edges, layer",
    ),
    (
        lambda: replace(PLAN, micro_batches_per_wave=-1),
        "plan.micro_batches_per_wave is -1; use 0 (all of the step) or a positive number",
    ),
    (
        lambda: replace(PLAN, waves_per_round=-2),
        "plan.waves_per_round is -2; use 0 (all of the step) or a positive number",
    ),
]

REFUSED_PLACEMENTS: list[tuple[Placement, str]] = [
    (
        Placement("tensor", (0,)),  # type: ignore[arg-type]
        "plan.partitions[1].mode is 'tensor'; use one of graph, model, pipeline, data",
    ),
    (Placement("data", ()), "plan.partitions[1].ranks is empty; name at least one rank"),
    (
        Placement("graph", (5,)),
        "plan.partitions[1] names rank 5, the plan has 3 ranks (0 to 2); launch more ranks or edit the plan",
    ),
    (
        Placement("data", (0, -1)),
        "plan.partitions[1] names rank -1, the plan has 3 ranks (0 to 2); launch more ranks or edit the plan",
    ),
    (Placement("model", (1, 0, 1)), "plan.partitions[1].ranks [1, 0, 1] names a rank twice; name each once"),
    (
        Placement("graph", (0, 1)),
        "plan.partitions[1].ranks [0, 1]: graph mode runs a partition on exactly one rank",
    ),
    (
        Placement("pipeline", (0, 1), (5,)),
        "plan.partitions[1].layer_split [5] has 1 stages for 2 ranks; give one number of layers a rank",
    ),
    (
        Placement("pipeline", (0, 1)),
        "plan.partitions[1].layer_split [] has 0 stages for 2 ranks; give one number of layers a rank",
    ),
    (
        Placement("pipeline", (0, 1), (2, 2)),
        "plan.partitions[1].layer_split [2, 2] must be non-negative and sum to the model's 5 layers",
    ),
    (
        Placement("pipeline", (0, 1), (-1, 6)),
        "plan.partitions[1].layer_split [-1, 6] must be non-negative and sum to the model's 5 layers",
    ),
    (Placement("data", (0, 1), (2, 3)), "plan.partitions[1].layer_split has no effect in mode 'data'; remove it"),
    (Placement("model", (0, 1), (2, 3)), "plan.partitions[1].layer_split has no effect in mode 'model'; remove it"),
    (Placement("graph", (0,), (5,)), "plan.partitions[1].layer_split has no effect in mode 'graph'; remove it"),
]


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(("make", "line"), REFUSED_PLANS, ids=[line for _, line in REFUSED_PLANS])
def test_a_plan_that_contradicts_itself_cannot_be_made(make: Callable[[], object], line: str) -> None:
    assert refusal(make) == line


@pytest.mark.parametrize(("placement", "line"), REFUSED_PLACEMENTS, ids=[line for _, line in REFUSED_PLACEMENTS])
def test_a_placement_that_contradicts_the_plan_is_refused(placement: Placement, line: str) -> None:
    assert refusal(lambda: replace(PLAN, partitions=(GRAPH, placement))) == line


def edited(**changes: Any) -> dict[str, Any]:
    """`PLAN` as a dict with keys changed, or removed where the value is `...`."""
    merged = {**json.loads(PLAN.to_json()), **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def with_partition(**changes: Any) -> dict[str, Any]:
    place = {**json.loads(PLAN.to_json())["partitions"][0], **changes}
    return edited(partitions=[{key: value for key, value in place.items() if value is not ...}])


ENTRY = "it must hold mode, ranks and, for pipeline, layer_split"
REFUSED_DICTS: list[tuple[dict[str, Any], str]] = [
    (edited(world=3), "the plan has the unknown key 'world'; known keys are checkpointing, format, "),
    (edited(format="gtx-plan/0"), "the plan's format is 'gtx-plan/0', this version reads 'gtx-plan/1'"),
    (edited(format=...), "the plan's format is None, this version reads 'gtx-plan/1'"),
    (edited(partitions={}), "plan.partitions is dict; it must be a list, one entry a partition"),
    (edited(partitions=...), "plan.partitions is NoneType; it must be a list, one entry a partition"),
    (edited(partitions=[[0]]), f"plan.partitions[0] is [0]; {ENTRY}"),
    (with_partition(mode=...), f"plan.partitions[0] is {{'ranks': [2], 'layer_split': []}}; {ENTRY}"),
    (with_partition(rank=3), "plan.partitions[0] is {'mode': 'graph', 'ranks': [2], 'layer_split': [], 'rank': 3}; "),
    (with_partition(mode=["graph"]), "plan.partitions[0].mode is ['graph']; use one of graph, model, pipeline, data"),
    (with_partition(ranks=...), "plan.partitions[0].ranks is None; it must be a list of whole numbers"),
    (with_partition(ranks=2), "plan.partitions[0].ranks is 2; it must be a list of whole numbers"),
    (with_partition(ranks=[1.0]), "plan.partitions[0].ranks is [1.0]; it must be a list of whole numbers"),
    (with_partition(ranks=[True]), "plan.partitions[0].ranks is [True]; it must be a list of whole numbers"),
    (with_partition(layer_split="5"), "plan.partitions[0].layer_split is '5'; it must be a list of whole numbers"),
    (edited(world_size="3"), "plan.world_size is '3'; it must be a whole number"),
    (edited(world_size=...), "plan.world_size is None; it must be a whole number"),
    (edited(num_layers=True), "plan.num_layers is True; it must be a whole number"),
    (edited(waves_per_round=1.5), "plan.waves_per_round is 1.5; it must be a whole number"),
    (edited(micro_batches_per_wave=None), "plan.micro_batches_per_wave is None; it must be a whole number"),
    (edited(checkpointing=["none"]), "plan.checkpointing is ['none']; use one of none, edges, layer"),
    (edited(world_size=2), "plan.partitions[0] names rank 2, the plan has 2 ranks (0 to 1); launch more ranks or "),
]


@pytest.mark.parametrize(("data", "start"), REFUSED_DICTS, ids=[line for _, line in REFUSED_DICTS])
def test_a_wrong_plan_file_is_one_line(data: dict[str, Any], start: str) -> None:
    line = refusal(lambda: from_dict(data))
    assert line.startswith(start)
    assert "\n" not in line
    assert refusal(lambda: from_json(json.dumps(data))) == line


def test_text_that_is_no_plan_is_one_line() -> None:
    assert re.fullmatch(
        r"the plan is not JSON: .*line 1 column 2.*; mend it there, or .* anew", refusal(lambda: from_json("{"))
    )
    assert refusal(lambda: from_json("[]")) == "the plan is a JSON list; it must be an object"


# What it means --------------------------------------------------------------------------------------------------------


@examples
@given(st.integers(0, 200), st.integers(1, 20))
def test_an_even_split_covers_everything_once(size: int, group: int) -> None:
    bounds = split_evenly(size, group)
    lengths = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, size, group + 1)
    assert lengths.min() >= 0
    assert lengths.max() - lengths.min() <= 1


@examples
@given(st.integers(1, 40), st.integers(1, 12))
def test_heads_are_attended_once(num_heads: int, group: int) -> None:
    slices = head_slices(num_heads, group)
    assert len(slices) == group
    assert [head for start, end in slices for head in range(start, end)] == list(range(num_heads))
    lengths = [end - start for start, end in slices]
    assert max(lengths) - min(lengths) <= 1


def test_slices_of_few_heads() -> None:
    assert head_slices(3, 2) == [(0, 1), (1, 3)]
    assert sum(end > start for start, end in head_slices(1, 4)) == 1


@examples
@given(plans(), st.integers(1, 8))
def test_head_ranges_are_what_somebody_attends_with(plan: Plan, num_heads: int) -> None:
    ranges = head_ranges(plan, num_heads)
    assert ranges == sorted(set(ranges))
    assert all(0 <= start < end <= num_heads for start, end in ranges)
    attended = {
        part
        for place in plan.partitions
        for part in (head_slices(num_heads, len(place.ranks)) if place.mode == "model" else [(0, num_heads)])
        if part[0] < part[1]
    }
    assert set(ranges) == attended


def test_the_stage_of_a_layer() -> None:
    assert [stage_of(PIPELINE, layer) for layer in range(5)] == [0, 0, 2, 2, 2]
    assert stage_of(Placement("pipeline", (0, 1, 2), (0, 1, 0)), 0) == 1  # stages without layers hold none
    assert refusal(lambda: stage_of(PIPELINE, 5)) == "layer 5 lies outside layer_split [2, 0, 3]"
    assert refusal(lambda: stage_of(PIPELINE, -1)) == "layer -1 lies outside layer_split [2, 0, 3]"


@examples
@given(plans())
def test_every_layer_has_one_stage_and_stages_follow_the_split(plan: Plan) -> None:
    for place in plan.partitions:
        if place.mode == "pipeline":
            stages = [stage_of(place, layer) for layer in range(plan.num_layers)]
            assert stages == sorted(stages)
            assert tuple(stages.count(stage) for stage in range(len(place.ranks))) == place.layer_split


def test_owners_by_mode() -> None:
    """Graph: its rank. Model: split, -1. Pipeline: the rank of the layer's stage. Data: by micro-batch in turn."""
    assert owner_table(PLAN, 0, 0).tolist() == [2, -1, 1, 0]
    assert owner_table(PLAN, 1, 1).tolist() == [2, -1, 1, 2]
    assert owner_table(PLAN, 2, 2).tolist() == [2, -1, 2, 0]
    assert owner_table(PLAN, 3, 4).tolist() == [2, -1, 2, 2]


@examples
@given(plans())
def test_rows_move_exactly_where_an_owner_changes(plan: Plan) -> None:
    for layer in range(1, plan.num_layers):
        before, after = owner_table(plan, 0, layer - 1), owner_table(plan, 0, layer)
        assert moves_between(plan, layer) == bool((before != after).any())


@examples
@given(plans(), st.integers(0, 13))
def test_every_micro_batch_runs_once_in_order(plan: Plan, count: int) -> None:
    waves = plan.waves(count)
    assert [m for wave in waves for m in wave] == list(range(count))
    assert all(0 < len(wave) <= (plan.micro_batches_per_wave or count) for wave in waves)
    rounds = plan.rounds(len(waves))
    assert [wave for part in rounds for wave in part] == list(range(len(waves)))
    assert all(0 < len(part) <= (plan.waves_per_round or len(waves)) for part in rounds)


def test_zero_means_all_of_the_step() -> None:
    plan = replace(PLAN, micro_batches_per_wave=0, waves_per_round=0)
    assert plan.waves(7) == [range(7)]
    assert plan.rounds(3) == [range(3)]
    assert replace(PLAN, micro_batches_per_wave=3).waves(7) == [range(3), range(3, 6), range(6, 7)]


# Plans of one family --------------------------------------------------------------------------------------------------


@examples
@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40), st.integers(1, 9))
def test_dealing_keeps_neighbours_together(work: list[float], world_size: int) -> None:
    """Contiguous runs in rank order; no rank has more than its share by more than the largest partition."""
    ranks = deal(work, world_size)
    assert len(ranks) == len(work)
    assert ranks == sorted(ranks)
    assert set(ranks) <= set(range(world_size))
    loads = np.bincount(ranks, weights=work, minlength=world_size)
    assert loads.max() <= (sum(work) / world_size + max(work)) * (1 + 1e-9)


def test_dealing_examples() -> None:
    assert deal([1, 1, 1, 1], 2) == [0, 0, 1, 1]
    assert deal([3, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert deal([0, 0, 0, 0], 2) == [0, 0, 1, 1]  # no work at all: by number
    assert len(set(deal([1, 1], 4))) == 2  # more ranks than partitions: two have none
    assert deal([1, 0, 0, 1], 2) in ([0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("mode", [*MODES, "mixed"])
def test_fixed_plans(mode: Any, world_size: int) -> None:
    """Every partition in the mode asked for, over all ranks; `mixed` takes the four in turn."""
    work = [1.0, 2.0, 3.0, 1.0, 1.0, 2.0]
    plan = fixed_plan(mode, work, world_size, 3, waves_per_round=2, checkpointing="edges")
    assert (plan.world_size, plan.num_layers, plan.num_partitions) == (world_size, 3, 6)
    assert (plan.waves_per_round, plan.checkpointing) == (2, "edges")
    wanted = [MODES[p % 4] if mode == "mixed" else mode for p in range(6)]
    assert [place.mode for place in plan.partitions] == wanted
    homes = deal(work, world_size)
    for place, home in zip(plan.partitions, homes, strict=True):
        assert place.ranks == ((home,) if place.mode == "graph" else tuple(range(world_size)))
        if place.mode == "pipeline":
            assert sum(place.layer_split) == 3
            assert max(place.layer_split) - min(place.layer_split) <= 1


def test_waves_of_fixed_plans() -> None:
    """Stages overlap one micro-batch a wave; data ranks have one each; otherwise the step is one wave."""
    waves = {m: fixed_plan(m, [1.0] * 4, 3, 3).micro_batches_per_wave for m in (*MODES, "mixed")}  # type: ignore[arg-type]
    assert waves == {"graph": 0, "model": 0, "pipeline": 1, "data": 3, "mixed": 0}
    assert fixed_plan("pipeline", [1.0], 3, 3, micro_batches_per_wave=0).micro_batches_per_wave == 0
    assert fixed_plan("data", [1.0], 3, 3, micro_batches_per_wave=2).micro_batches_per_wave == 2


def test_an_unknown_mode_is_refused() -> None:
    line = refusal(lambda: fixed_plan("tensor", [1.0], 2, 3))  # type: ignore[arg-type]
    assert line == "plan.mode is 'tensor'; use one of graph, model, pipeline, data, mixed"
