"""PhaseTimer: phases are exclusive and sum to wall time; exchanges are counted by kind."""

import time

import pytest

from monitor.records import EXCHANGE_KINDS, PHASES, StepRecord
from monitor.timers import PhaseTimer


class Clock:
    """Nanoseconds that pass only when told."""

    def __init__(self) -> None:
        self.now_ns = 17
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return self.now_ns

    def sleep(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_inner_phase_pauses_the_outer_one(clock):
    timer = PhaseTimer(clock=clock)
    timer.start_step()
    clock.sleep(1)
    with timer.phase("rowwise"):
        clock.sleep(10)
        with timer.phase("exchange.kv"):
            clock.sleep(100)
        clock.sleep(1000)
        with timer.phase("rowwise"):  # a phase inside itself is counted once
            clock.sleep(10_000)
    clock.sleep(100_000)
    seconds = timer.finish_step()
    assert seconds == {"rowwise": 11_010 / 1e9, "exchange.kv": 100 / 1e9, "other": 100_001 / 1e9}
    assert timer.wall_s == 111_111 / 1e9


def test_phases_of_real_work_sum_to_wall_time():
    timer = PhaseTimer()
    before = time.perf_counter()
    timer.start_step()
    for name in PHASES:
        with timer.phase(name), timer.phase("backward"):
            sum(range(1000))
    seconds = timer.finish_step()
    outside_s = time.perf_counter() - before
    assert sum(seconds.values()) == pytest.approx(timer.wall_s, rel=1e-12)
    assert 0 < timer.wall_s <= outside_s
    assert list(seconds) == [name for name in PHASES if name in seconds]  # in the order of PHASES


def test_a_phase_that_raises_is_left(clock):
    timer = PhaseTimer(clock=clock)
    timer.start_step()
    with pytest.raises(KeyError), timer.phase("sampling"), timer.phase("compiling"):
        clock.sleep(5)
        raise KeyError
    clock.sleep(2)
    assert timer.finish_step() == {"compiling": 5e-9, "other": 2e-9}


def test_steps_do_not_leak_into_each_other(clock):
    timer = PhaseTimer(clock=clock)
    with timer.phase("sampling"):
        clock.sleep(1000)  # before any step
    for ns in (3, 4):
        timer.start_step()
        with timer.phase("exchange.q"):
            clock.sleep(ns)
            timer.add_exchange("q", sent_bytes=ns, received_bytes=1, wait_s=1e-9, messages=2)
        assert timer.finish_step() == {"exchange.q": ns / 1e9, "other": 0.0}
        (exchange,) = timer.exchanges
        assert (exchange.sent_bytes, exchange.received_bytes, exchange.messages) == (ns, 1, 2)
        clock.sleep(1000)
    timer.start_step()
    assert timer.finish_step() == {"other": 0.0}
    assert timer.exchanges == ()


def test_exchanges_accumulate_by_kind_and_take_the_seconds_of_their_phase(clock):
    timer = PhaseTimer(clock=clock)
    timer.start_step()
    for kind, sent in (("kv", 100), ("o", 7), ("kv", 23)):
        with timer.phase(f"exchange.{kind}"):
            clock.sleep(sent)
            timer.add_exchange(kind, sent_bytes=sent, received_bytes=2 * sent, wait_s=sent * 0.5e-9, messages=1)
    phases = timer.finish_step()
    kv, o = timer.exchanges
    assert (kv.kind, kv.sent_bytes, kv.received_bytes, kv.messages) == ("kv", 123, 246, 2)
    assert kv.seconds == phases["exchange.kv"] == pytest.approx(123e-9)
    assert kv.wait_s == pytest.approx(61.5e-9)
    assert (o.kind, o.sent_bytes, o.messages) == ("o", 7, 1)
    StepRecord(0, 0, timer.wall_s, phases, timer.exchanges, 0, 0, 0, 0.0, "")  # they make a valid record


def test_one_clock_reading_a_border_and_contexts_are_reused(clock):
    timer = PhaseTimer(clock=clock)
    timer.start_step()
    reads = clock.reads
    for _ in range(1000):
        with timer.phase("edgewise"):
            pass
    assert clock.reads - reads == 2000
    assert timer.phase("edgewise") is timer.phase("edgewise")


def test_synchronize_runs_before_every_reading(clock):
    timer = PhaseTimer(synchronize=lambda: clock.sleep(1), clock=clock)
    timer.start_step()
    with timer.phase("rowwise"):
        clock.sleep(10)
    assert timer.finish_step() == {"rowwise": 11e-9, "other": 2e-9}  # work that was still running belongs to its phase


def test_misuse_is_told(clock):
    timer = PhaseTimer(clock=clock)
    with pytest.raises(RuntimeError, match="without a start_step"):
        timer.finish_step()
    with pytest.raises(ValueError, match="no phase 'rowise'; use one of sampling"):
        timer.phase("rowise")
    with pytest.raises(ValueError, match="no exchange 'v'; use one of fetch"):
        timer.add_exchange("v", sent_bytes=0, received_bytes=0, wait_s=0.0, messages=0)
    timer.start_step()
    with (
        pytest.raises(RuntimeError, match="inside the phase rowwise > exchange.o"),
        timer.phase("rowwise"),
        timer.phase("exchange.o"),
    ):
        timer.finish_step()
    assert {f"exchange.{kind}" for kind in EXCHANGE_KINDS} <= set(PHASES)


def test_an_evaluation_is_charged_with_all_that_runs_inside_it() -> None:
    """Its layers and exchanges are not those of the step."""
    clock = iter(range(0, 10**12, 10**9))
    timer = PhaseTimer(clock=lambda: next(clock))
    timer.start_step()
    with timer.phase("rowwise"):
        pass
    with timer.phase("evaluate"), timer.phase("rowwise"), timer.phase("exchange.kv"):
        timer.add_exchange("kv", sent_bytes=8, received_bytes=8, wait_s=0.5, messages=1)
    seconds = timer.finish_step()
    assert seconds["rowwise"] == 1.0
    assert seconds["evaluate"] == 5.0
    assert "exchange.kv" not in seconds
    assert timer.exchanges == ()
