"""Records: JSON both ways, contradictions refused, gathered in rank order."""

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.records import (
    EXCHANGE_KINDS,
    PHASES,
    ExchangeRecord,
    StepRecord,
    gather_steps,
    gathering_s,
    json_number,
    slowest_rank,
)


def record(rank=0, step=3, wait_s=0.25, **changes):
    fields = {
        "step": step,
        "rank": rank,
        "wall_s": 2.0,
        "phases": {"rowwise": 1.0, "exchange.kv": 0.5, "other": 0.5},
        "exchanges": (ExchangeRecord("kv", 4096, 2048, 0.5, wait_s, 2),),
        "peak_memory_bytes": 1 << 20,
        "rows_computed": 100,
        "edges_computed": 900,
        "loss": 0.75,
        "plan_fingerprint": "0123456789abcdef",
        "memory_source": "a test",
    }
    return StepRecord(**{**fields, **changes})


seconds = st.floats(min_value=0, max_value=1e4)
counts = st.integers(min_value=0, max_value=2**60)


@st.composite
def step_records(draw):
    phases = draw(st.dictionaries(st.sampled_from(PHASES), seconds))
    exchanges = []
    for kind in draw(st.lists(st.sampled_from(EXCHANGE_KINDS), unique=True)):
        took_s = phases.setdefault(f"exchange.{kind}", 1.0)
        wait_s = took_s * draw(st.floats(min_value=0, max_value=1))
        exchanges.append(ExchangeRecord(kind, draw(counts), draw(counts), took_s, wait_s, draw(counts)))
    numbers = [draw(counts) for _ in range(3)]
    return StepRecord(
        draw(counts),
        draw(counts),
        math.fsum(phases.values()),
        phases,
        tuple(exchanges),
        *numbers,
        draw(st.floats(allow_nan=False)),
        draw(st.text()),
        draw(st.text()),
    )


@given(step_records())
def test_json_both_ways(original):
    text = json.dumps(original.as_dict(), allow_nan=False)
    assert StepRecord.from_dict(json.loads(text)) == original
    assert pickle.loads(pickle.dumps(original)) == original
    assert hash(original) == hash(StepRecord.from_dict(json.loads(text)))


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_finite_number_survives_strict_json(loss):
    text = json.dumps(record(loss=loss).as_dict(), allow_nan=False)
    assert repr(StepRecord.from_dict(json.loads(text)).loss) == repr(loss)
    assert json_number(1.5) == 1.5


def test_busy_time_leaves_waiting_out():
    assert record().wait_s == 0.25
    assert record().busy_s == 1.75


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wall_s": 2.1}, r"step 3, rank 0: phases sum to 2.0 s, the step took 2.1 s"),
        ({"phases": {"forward": 2.0}}, "no phase 'forward'; use one of sampling"),
        ({"phases": {"rowwise": 2.5, "other": -0.5}, "exchanges": ()}, "phase other is -0.5"),
        ({"phases": {"other": 2.0}}, r"exchange kv took 0.5 s, its phase 0.0 s"),
        ({"exchanges": (ExchangeRecord("kv", 1, 1, 0.5, 0, 1),) * 2}, "exchanges are kv, kv; sum"),
        ({"step": -1}, "step is -1; it must be a finite number, at least 0"),
        ({"wall_s": math.nan}, "wall_s is nan"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        record(**changes)


def test_exchange_contradictions_are_refused():
    with pytest.raises(ValueError, match="waited 2 s of its 1 s; wait inside the phase exchange.kv"):
        ExchangeRecord("kv", 0, 0, 1, 2, 0)
    with pytest.raises(ValueError, match="no exchange 'halo'"):
        ExchangeRecord("halo", 0, 0, 1, 0, 0)
    with pytest.raises(ValueError, match="exchange q: sent_bytes is -1"):
        ExchangeRecord("q", -1, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("loss"), "step record lacks 'loss'"),
        (lambda d: d.update(colour=1), "unknown key 'colour'"),
        (lambda d: d.update(step="3"), "step is '3'; it must be a whole number"),
        (lambda d: d.update(rank=True), "rank is True"),
        (lambda d: d.update(loss="low"), "loss is 'low'; it must be a number"),
        (lambda d: d.update(phases=[1]), "phases must be an object"),
        (lambda d: d["exchanges"][0].pop("kind"), "exchange record lacks 'kind'"),
    ],
)
def test_foreign_json_is_one_clear_line(change, message):
    data = record().as_dict()
    change(data)
    with pytest.raises(ValueError, match=message) as caught:
        StepRecord.from_dict(data)
    assert "\n" not in str(caught.value)


def test_gather_gives_every_rank_the_same_records():
    sent = [record(rank=r, wait_s=0.1 * r) for r in range(3)]
    wire = [json.loads(json.dumps(other.as_dict())) for other in sent]
    assert gather_steps(sent[1], lambda data: wire) == tuple(sent)
    assert slowest_rank(sent) == 0  # it waited least
    assert slowest_rank([record(rank=r) for r in range(3)]) == 0  # the lowest of equals
    with pytest.raises(ValueError, match=r"rank 1 is at step 3, the ranks sent steps \[3, 4\]"):
        gather_steps(sent[1], lambda data: [sent[0].as_dict(), record(rank=1, step=4).as_dict()])
    with pytest.raises(ValueError, match=r"gather returned the ranks \[1, 0\]"):
        gather_steps(sent[1], lambda data: [sent[1].as_dict(), sent[0].as_dict()])


def test_records_do_not_change():
    given_phases = {"other": 2.0}
    made = record(phases=given_phases, exchanges=())
    given_phases["other"] = 3.0
    assert made.phases == {"other": 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.loss = 0.0


def test_gathering_costs_what_the_last_rank_to_come_spends() -> None:
    assert gathering_s([[0.5, 0.001], [0.001, 0.25]]) == 0.002
    assert gathering_s([[0.5, 0.001]]) == 0.501, "one rank waits for nobody"
    assert gathering_s([[], []]) == 0.0
