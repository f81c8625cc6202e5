"""Exclusive phases of a training step, whose seconds sum to the step's wall time.

Not here: what is done with the seconds (`records.py`, `sinks.py`) and memory (`memory.py`).

At every moment of a step exactly one phase runs: entering an inner phase pauses the outer one, and time in none of them
is `other`. The clock is read in whole nanoseconds once per border, so nothing is counted twice or lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from monitor.records import EXCHANGE_KINDS, PHASES, ExchangeRecord, PeerRecord

_EVALUATE = "evaluate"  # whatever runs inside belongs to it: an evaluation is not part of what a step costs


class _Phase:
    """The context of one phase. One object a name, reused, even inside itself: the stack is the timer's."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._name = name
        self._timer = timer

    def __enter__(self) -> None:
        """Charge the time since the last border to the phase on top, and put this one above it."""
        timer = self._timer
        if timer._synchronize is not None:
            timer._synchronize()
        timer._charge(timer._stack[-1], timer._clock())
        timer._stack.append(_EVALUATE if timer._stack[-1] == _EVALUATE else self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Charge the time since the last border to this phase, and take it off."""
        timer = self._timer
        if timer._synchronize is not None:
            timer._synchronize()
        timer._charge(timer._stack.pop(), timer._clock())


class _Tally:
    """What one kind of exchange has passed in the running step."""

    __slots__ = ("messages", "received_bytes", "sent_bytes", "wait_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self.messages = 0
        self.wait_s = 0.0


class PhaseTimer:
    """Times the phases of a step and counts what its exchanges pass.

    ```
    timer.start_step()
    with timer.phase("rowwise"):
        ...
        with timer.phase("exchange.kv"):  # pauses "rowwise"
            ...
            timer.add_exchange("kv", sent_bytes=4096, received_bytes=0, wait_s=0.0, messages=1)
    seconds = timer.finish_step()  # {"rowwise": ..., "exchange.kv": ..., "other": ...}
    timer.wall_s, timer.exchanges  # of the step that just finished
    ```

    The phase `evaluate` is charged with all that runs inside it, and exchanges there are not counted.

    Outside a step phases may be entered all the same; their time belongs to no step and is dropped. One timer serves
    one line of control at a time: autograd's thread may enter phases while the main thread waits for it inside
    `backward`, a thread that works beside the step may not.

    synchronize: called before the clock is read at every border, such as `torch.cuda.synchronize`; None where work is
        done when a call returns. It makes phases of an asynchronous device honest and the step slower.
    clock: nanoseconds that never go back.
    """

    __slots__ = (
        "_clock",
        "_exchanges",
        "_mark_ns",
        "_ns",
        "_peer_tallies",
        "_peers",
        "_phases",
        "_running",
        "_spans",
        "_stack",
        "_synchronize",
        "_tallies",
        "_wall_s",
    )

    def __init__(
        self, *, synchronize: Callable[[], None] | None = None, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._clock = clock
        self._synchronize = synchronize
        self._ns: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._tallies = {kind: _Tally() for kind in EXCHANGE_KINDS}
        self._stack = ["other"]
        self._phases = {name: _Phase(self, name) for name in PHASES}
        self._mark_ns = clock()
        self._running = False
        self._wall_s = 0.0
        self._exchanges: tuple[ExchangeRecord, ...] = ()
        self._peer_tallies: dict[int, list[float]] = {}
        self._peers: tuple[PeerRecord, ...] = ()
        self._spans: list[tuple[str, int, int]] | None = None

    def phase(self, name: str) -> _Phase:
        """The context to run a phase in. Raises ValueError for a name outside `PHASES`."""
        try:
            return self._phases[name]
        except KeyError:
            raise ValueError(f"there is no phase {name!r}; use one of {', '.join(PHASES)}") from None

    def add_exchange(self, kind: str, *, sent_bytes: int, received_bytes: int, wait_s: float, messages: int) -> None:
        """Count one exchange; its seconds are those of the phase `exchange.<kind>`, of which `wait_s` went by waiting.

        Inside the phase `evaluate` nothing is counted.
        Raises ValueError for a kind outside `EXCHANGE_KINDS`.
        """
        try:
            tally = self._tallies[kind]
        except KeyError:
            raise ValueError(f"there is no exchange {kind!r}; use one of {', '.join(EXCHANGE_KINDS)}") from None
        if self._stack[-1] == _EVALUATE:
            return
        tally.sent_bytes += sent_bytes
        tally.received_bytes += received_bytes
        tally.messages += messages
        tally.wait_s += wait_s

    def add_peer(self, peer: int, *, sent_bytes: int = 0, received_bytes: int = 0, wait_s: float = 0.0) -> None:
        """Count what went to or came from one rank. Inside the phase `evaluate` nothing is counted."""
        if self._stack[-1] == _EVALUATE:
            return
        tally = self._peer_tallies.setdefault(peer, [0, 0, 0.0])
        tally[0] += sent_bytes
        tally[1] += received_bytes
        tally[2] += wait_s

    def start_step(self, *, trace: bool = False) -> None:
        """Begin a step at zero. Raises RuntimeError inside a phase; a step left unfinished by an error is dropped.

        trace: keep every span of a phase, for `spans`.
        """
        self._require_no_phase("start_step")
        self._peer_tallies.clear()
        self._spans = [] if trace else None
        for name in PHASES:
            self._ns[name] = 0
        for tally in self._tallies.values():
            tally.clear()
        self._running = True
        self._mark_ns = self._read()

    def finish_step(self) -> dict[str, float]:
        """Seconds of each phase that took any, and of `other`, in the order of `PHASES`; they sum to `wall_s`.

        Raises RuntimeError inside a phase, or where no step was started.
        """
        self._require_no_phase("finish_step")
        if not self._running:
            raise RuntimeError("finish_step without a start_step")
        self._charge("other", self._read())
        self._running = False
        self._wall_s = sum(self._ns.values()) / 1e9
        self._peers = tuple(
            PeerRecord(peer, int(tally[0]), int(tally[1]), tally[2])
            for peer, tally in sorted(self._peer_tallies.items())
        )
        self._exchanges = tuple(
            ExchangeRecord(
                kind=kind,
                sent_bytes=tally.sent_bytes,
                received_bytes=tally.received_bytes,
                seconds=self._ns["exchange." + kind] / 1e9,
                wait_s=tally.wait_s,
                messages=tally.messages,
            )
            for kind, tally in self._tallies.items()
            if tally.messages or tally.sent_bytes or tally.received_bytes or self._ns["exchange." + kind]
        )
        return {name: ns / 1e9 for name, ns in self._ns.items() if ns or name == "other"}

    @property
    def wall_s(self) -> float:
        """Wall time of the step that finished last."""
        return self._wall_s

    @property
    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """What each kind of exchange passed in the step that finished last; kinds that did not run are left out."""
        return self._exchanges

    @property
    def peers(self) -> tuple[PeerRecord, ...]:
        """What went to and came from each rank in the step that finished last."""
        return self._peers

    @property
    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, begin, end) in seconds since the traced step began, in order; empty where it was not traced."""
        if not self._spans:
            return []
        first = self._spans[0][1]
        return [(name, (begin - first) / 1e9, (end - first) / 1e9) for name, begin, end in self._spans]

    def _charge(self, name: str, now_ns: int) -> None:
        """Time since the last border belongs to a phase."""
        self._ns[name] += now_ns - self._mark_ns
        if self._spans is not None and now_ns > self._mark_ns:
            self._spans.append((name, self._mark_ns, now_ns))
        self._mark_ns = now_ns

    def _read(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def _require_no_phase(self, what: str) -> None:
        if len(self._stack) > 1:
            raise RuntimeError(f"{what} inside the phase {' > '.join(self._stack[1:])}; leave it first")
