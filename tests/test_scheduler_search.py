"""The search finds what an exhaustive one finds where that is possible, keeps to what is allowed, and says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost import Engine, estimate
from scheduler.dealing import balance, layer_split
from scheduler.plan import MODES, Mode, Placement, Plan
from scheduler.remedies import explain_nothing_fits, remedies
from scheduler.search import Limits, family_of, greedy_family, search
from scheduler.topology import Device, Link, Topology
from scheduler.workload import ModelShape, Workload, uniform_workload

MODEL = ModelShape("GT", 32, 64, 4, 3, 16, 4, 20_000)
DEVICE = Device(2e9, 1e9, 1e-4, 1e9, row_bytes_per_s=1e9, packed_bytes_per_s=1e9, message_s=1e-5)


LINK = Link(1e-4, 1e8)


def machine(size: int, link: Link = LINK, **device: float) -> Topology:
    return Topology((replace(DEVICE, **device),) * size, link, link, 1e10, 0.0)


def made_up(
    seed: int, parts: int = 3, micro_batches: int = 1, halo: float = 0.5, model: ModelShape = MODEL
) -> Workload:
    """Partitions of uneven rows and edges."""
    generator = np.random.default_rng(seed)
    rows = generator.lognormal(6, 0.5, parts).tolist()
    edges = generator.lognormal(9, 1.0, parts).tolist()
    return uniform_workload(model, rows, edges, halo, micro_batches)


def every_plan(workload: Workload, world_size: int) -> Iterator[Plan]:
    """All placements of every partition over all ordered groups, with all sizes of waves that are powers of two."""
    layers, count = workload.model.layers, workload.num_micro_batches
    options: list[Placement] = [Placement("graph", (rank,)) for rank in range(world_size)]
    for size in range(2, world_size + 1):
        for ranks in itertools.permutations(range(world_size), size):
            if ranks == tuple(sorted(ranks)):
                options.append(Placement("model", ranks))
            if count > 1:
                options.append(Placement("data", ranks))
            for cuts in itertools.combinations(range(1, layers), size - 1):
                bounds = (0, *cuts, layers)
                options.append(Placement("pipeline", ranks, tuple(b - a for a, b in itertools.pairwise(bounds))))
    for chosen in itertools.product(options, repeat=workload.num_partitions):
        for wave in sorted({0, *(s for s in (1, 2, 4) if s < count)}):
            yield Plan(world_size, layers, chosen, wave)


CASES = {
    "even": (made_up(0), machine(2)),
    "a slow rank": (made_up(1), machine(2).with_speeds([1.0, 3.0])),
    "a slow link": (made_up(2, halo=1.5), machine(2, Link(1e-3, 1e6))),
    "a hub": (uniform_workload(MODEL, [300.0, 300.0, 300.0], [2e3, 2e3, 6e4], 0.5), machine(2, Link(1e-5, 1e9))),
    "two micro-batches": (made_up(3, micro_batches=2), machine(2, Link(1e-3, 1e7))),
    "four micro-batches": (made_up(4, micro_batches=4, halo=2.0), machine(2, Link(1e-4, 3e7))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_the_optimum_of_all_plans(name: str) -> None:
    workload, topology = CASES[name]
    fastest = min(estimate(plan, workload, topology).step_s for plan in every_plan(workload, topology.world_size))
    found = search(workload, topology)
    assert found.chosen is not None and found.chosen.estimate is not None
    assert found.chosen.estimate.step_s == pytest.approx(fastest, rel=1e-9)


def test_the_cases_differ_in_what_is_best() -> None:
    chosen = {name: search(*case).plan for name, case in CASES.items()}
    assert len({family_of(plan) for plan in chosen.values()}) >= 3, {n: family_of(p) for n, p in chosen.items()}


@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 4),
    micro_batches=st.integers(1, 4),
    memory=st.floats(2e5, 5e7),
)
@settings(max_examples=40, deadline=None)
def test_a_plan_over_memory_is_never_chosen(seed: int, size: int, micro_batches: int, memory: float) -> None:
    workload, limits = made_up(seed, 6, micro_batches), Limits(memory_bytes=memory)
    found = search(workload, machine(size), Engine(), limits, budget=20)
    if found.chosen is None:
        for candidate in found.candidates:
            assert candidate.verdict in ("too large", "no plan")
    else:
        assert max(estimate(found.plan, workload, machine(size)).memory_bytes) <= memory * (1 - limits.margin)


def test_less_memory_costs_time_and_is_bought_with_rounds_and_checkpointing() -> None:
    workload, topology = made_up(5, 8, 4), machine(2)
    free = search(workload, topology).chosen
    assert free is not None and free.estimate is not None
    tight = search(workload, topology, limits=Limits(memory_bytes=0.4 * max(free.estimate.memory_bytes))).chosen
    assert tight is not None and tight.estimate is not None and tight.plan is not None
    assert tight.estimate.step_s >= free.estimate.step_s
    assert tight.plan.waves_per_round > 0 or tight.plan.checkpointing != "none"


def test_the_same_problem_has_the_same_answer() -> None:
    workload, topology = made_up(6, 12, 3), machine(4)
    assert search(workload, topology) == search(made_up(6, 12, 3), machine(4))
    assert workload.work == made_up(6, 12, 3).work


@pytest.mark.parametrize("mode", MODES)
def test_only_allowed_modes_are_used_and_the_others_say_so(mode: Mode) -> None:
    found = search(made_up(7, 6, 3), machine(2), limits=Limits(allow=(mode,)))
    assert family_of(found.plan) == mode
    for candidate in found.candidates:
        if candidate.family in MODES and candidate.family != mode:
            assert (candidate.verdict, candidate.plan) == ("not allowed", None)
            assert candidate.reason == f"plan.allow does not name it ({mode})"
    assert found.candidates[-1].verdict == "no plan"


def test_pinned_partitions_stay_pinned() -> None:
    pin: dict[int, Mode] = {0: "model", 4: "pipeline"}
    found = search(made_up(8, 6, 2), machine(2), limits=Limits(pin=pin))
    assert [found.plan.partitions[part].mode for part in pin] == ["model", "pipeline"]
    reasons = {c.family: c.reason for c in found.candidates}
    assert reasons["graph"] == "plan.pin asks for other modes too"


@pytest.mark.parametrize(
    ("limits", "size", "line"),
    [
        (Limits(pin={9: "graph"}), 2, "plan.pin names partition 9, there are 6 (0 to 5)"),
        (
            Limits(pin={1: "model"}),
            1,
            "plan.pin puts partition 1 into mode 'model', of which there is no plan: one rank",
        ),
        (Limits(groups=(3,)), 4, "plan.groups [3] has no size that divides 4 ranks"),
    ],
)
def test_limits_that_cannot_be_are_one_line(limits: Limits, size: int, line: str) -> None:
    with pytest.raises(ValueError) as error:
        search(made_up(9, 6), machine(size), limits=limits)
    assert str(error.value).startswith(line)


def test_every_family_has_a_verdict_and_a_reason() -> None:
    found = search(made_up(10, 8, 2), machine(4))
    assert [c.family for c in found.candidates] == [*MODES, "mixed"]
    assert [c.verdict for c in found.candidates].count("chosen") == 1
    for candidate in found.candidates:
        assert candidate.reason
        if candidate.verdict == "slower":
            assert candidate.estimate is not None and found.chosen is not None and found.chosen.estimate is not None
            assert candidate.estimate.step_s >= found.chosen.estimate.step_s


def test_where_nothing_fits_remedies_are_tried_and_true() -> None:
    workload, topology = made_up(11, 8), machine(2)
    peaks = [max(c.estimate.memory_bytes) for c in search(workload, topology).candidates if c.estimate is not None]
    limits = Limits(memory_bytes=0.2 * min(peaks))
    found = search(workload, topology, limits=limits)
    assert found.chosen is None
    with pytest.raises(ValueError, match="none of the"):
        _ = found.plan
    helps = remedies(workload, topology, Engine(), limits, found)
    assert helps
    line = explain_nothing_fits(found, helps)
    assert "\n" not in line and f"none of the {found.tried} plans" in line and "1. " in line and "may be used" in line
    for text in helps:
        if text.endswith("ranks instead of 2"):
            larger = topology.resized(int(text.split()[0]))
            assert search(workload, larger, limits=limits).chosen is not None
    tiny = Limits(memory_bytes=100.0)
    (least, _) = remedies(workload, topology, Engine(), tiny, search(workload, topology, limits=tiny))
    assert least.startswith("a memory limit of")


def test_leaving_a_term_out_changes_the_choice_where_it_matters() -> None:
    """Rows that all partitions need of each other, over a slow link: only a search without exchange cuts the graph."""
    workload, topology = made_up(12, 8, 2, halo=6.0), machine(2, Link(1e-2, 1e6))
    free = search(workload, topology, without=["exchange"])
    assert family_of(free.plan) in ("graph", "model", "data")
    assert estimate(search(workload, topology).plan, workload, topology).step_s < 0.9 * max(
        estimate(free.plan, workload, topology).step_s, estimate(_graph(8), workload, topology).step_s
    )


def _graph(parts: int) -> Plan:
    return Plan(2, MODEL.layers, tuple(Placement("graph", (p * 2 // parts,)) for p in range(parts)))


def test_greedy_follows_the_crossover() -> None:
    few, many = made_up(13, 8, halo=0.1), made_up(13, 8, halo=6.0)
    assert greedy_family(few, machine(4), Limits()) == "graph"
    assert greedy_family(many, machine(4), Limits()) == "model"
    assert greedy_family(made_up(13, 8, 4), machine(4), Limits()) == "data"
    assert greedy_family(many, machine(4), Limits(allow=("pipeline",))) == "pipeline"


def test_balance_moves_work_to_the_faster_group() -> None:
    class Nothing:
        """No traffic: partitions are free to move."""

        def start(self, homes: list[int]) -> None:
            self.homes = np.array(homes)

        def seconds(self, group: int) -> float:
            return 0.0

        def after(self, part: int, group: int, joins: bool) -> float:
            return 0.0

        def move(self, part: int, group: int) -> None:
            self.homes[part] = group

    own = np.ones((12, 2)) * np.array([1.0, 3.0])
    homes = balance(own, [0] * 6 + [1] * 6, Nothing())  # type: ignore[arg-type]
    assert [homes.count(0), homes.count(1)] == [9, 3]


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7), st.integers(1, 4), st.lists(st.floats(0.5, 2.0), min_size=4)
)
@settings(max_examples=60, deadline=None)
def test_layers_are_split_so_that_the_slowest_stage_is_fastest(
    work: list[float], stages: int, speeds: list[float]
) -> None:
    seconds = np.outer(work, speeds[:stages])

    def slowest(split: tuple[int, ...]) -> float:
        ends = np.cumsum((0, *split))
        return max(float(seconds[a:b, s].sum()) for s, (a, b) in enumerate(itertools.pairwise(ends)))

    every = [c for c in itertools.product(range(len(work) + 1), repeat=stages) if sum(c) == len(work)]
    assert slowest(layer_split(seconds)) == pytest.approx(min(map(slowest, every)))


@lru_cache
def large() -> Workload:
    return made_up(14, 1024, model=replace(MODEL, layers=4))


def test_a_large_problem_is_priced_with_few_estimates() -> None:
    """1,024 partitions on 128 devices: seconds are measured in benchmarks/search_speed.py, counts here."""
    found = search(large(), machine(128))
    assert found.chosen is not None and found.tried <= 120
