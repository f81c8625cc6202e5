"""The row exchange: the one communication primitive, with a start and a finish, as autograd functions.

A `Route` says which of this rank's rows go to whom and what arrives. `gather` takes rows to the ranks that need them;
`scatter` is its transpose and adds what comes back. Each is the other's backward. Not here: how routes are found
(`compiler.py`) and what is sent when (`context.py`).

Legend: `N` rows of this rank, `T` tensors packed side by side (2 for K and V), `H` heads, `d` width of a head,
`n` rows of one block. A row tensor without heads is `[N, 1, 1, C]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gtx.parallel.world import World
from scheduler.plan import HeadRange


class Timer(Protocol):
    """What the exchange needs of `monitor.PhaseTimer`."""

    def phase(self, name: str) -> Any: ...

    def add_exchange(
        self, kind: str, *, sent_bytes: int, received_bytes: int, wait_s: float, messages: int
    ) -> None: ...

    def add_peer(self, peer: int, *, sent_bytes: int = 0, received_bytes: int = 0, wait_s: float = 0.0) -> None: ...


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that this rank owns and passes to `peer` (perhaps itself), for a head range of the peer's.

    rows: `[n]` int64 positions among this rank's rows, distinct; None means all of them in order.
    heads: `[h0, h1)`, or None for whole rows.
    """

    peer: int
    num_rows: int
    rows: Tensor | None
    heads: HeadRange | None


@dataclass(frozen=True, eq=False)
class Slot:
    """What this rank receives for one head range: its own block first, then those of its peers in rank order.

    blocks: (peer, number of rows), none of them empty.
    order: `[n]` int64, position in arrival order of each row of the slot; None when rows are used as they arrive.
    """

    heads: HeadRange | None
    blocks: tuple[tuple[int, int], ...]
    order: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return sum(n for _, n in self.blocks)


@dataclass(frozen=True, eq=False)
class Route:
    """A compiled exchange of one rank.

    kind: `fetch`, `q`, `kv`, `o`, `move` or `reduce`.
    num_rows: `N`, rows on the owner's side. sends: blocks to pass on. slots: what arrives.
    """

    kind: str
    rank: int
    num_rows: int
    sends: tuple[Block, ...]
    slots: tuple[Slot, ...]

    @property
    def rows_sent(self) -> int:
        return sum(b.num_rows for b in self.sends if b.peer != self.rank)

    @property
    def rows_received(self) -> int:
        return sum(n for s in self.slots for peer, n in s.blocks if peer != self.rank)

    @property
    def is_identity(self) -> bool:
        """Nothing moves: one slot that holds all own rows in order."""
        return (
            len(self.sends) == 1
            and self.sends[0].peer == self.rank
            and self.sends[0].rows is None
            and len(self.slots) == 1
            and self.slots[0].order is None
            and len(self.slots[0].blocks) == 1
        )

    def to(self, device: torch.device) -> Route:
        if device.type == "cpu":
            return self
        sends = tuple(replace(b, rows=None if b.rows is None else b.rows.to(device)) for b in self.sends)
        slots = tuple(replace(s, order=None if s.order is None else s.order.to(device)) for s in self.slots)
        return replace(self, sends=sends, slots=slots)


class _Sent(NamedTuple):
    """A message on its way: its tensor must live until the peer has taken it."""

    number: int
    work: Any
    tensor: Tensor
    peer: int
    label: str


class Channel:
    """This rank's end of all exchanges: posts messages, waits for them, counts bytes and seconds.

    Sends are not waited for where they are posted, so that a pipeline stage can go on. They are let go once a later
    message of the peer shows that it was past them, at the latest by `drain`.
    """

    def __init__(self, world: World, timer: Timer):
        self.world, self.timer = world, timer
        self._number = 0  # exchanges so far, the same on every rank
        self._outbox: list[_Sent] = []

    def post(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], label: str
    ) -> list[tuple[int, int, Any]]:
        """Post all messages of one exchange; returns the pending receives as (number of the exchange, peer, work)."""
        group, self._number = self.world.rows_group, self._number + 1
        for peer, t in sends:
            self.timer.add_peer(peer, sent_bytes=_size(t))
        for peer, t in recvs:
            self.timer.add_peer(peer, received_bytes=_size(t))
        if self.world.device.type == "cuda":
            ops = [dist.P2POp(dist.irecv, t, peer, group) for peer, t in recvs]
            ops += [dist.P2POp(dist.isend, t, peer, group) for peer, t in sends]
            works = dist.batch_isend_irecv(ops) if ops else []
            return [(self._number, peer, work) for peer, _ in recvs[:1] for work in works]
        pending = [(self._number, peer, self._post_one(dist.irecv, t, peer, label)) for peer, t in recvs]
        for peer, t in sends:
            self._outbox.append(_Sent(self._number, self._post_one(dist.isend, t, peer, label), t, peer, label))
        return pending

    def _post_one(self, message: Callable[..., Any], tensor: Tensor, peer: int, label: str) -> Any:
        try:
            return message(tensor, peer, self.world.rows_group)
        except RuntimeError as error:  # the peer is gone, and that is known already
            raise self.world.lost(f"exchange {label}", [peer], error) from error

    def wait(self, pending: Sequence[tuple[int, int, Any]], label: str) -> None:
        """Wait for receives. Raises ExchangeError naming the exchange and the ranks that did not arrive."""
        for i, (number, peer, work) in enumerate(pending):
            start = time.perf_counter()
            try:
                work.wait(self.world.timeout)
            except RuntimeError as error:
                missing = sorted({p for _, p, w in pending[i:] if w is work or not w.is_completed()})
                raise self.world.lost(f"exchange {label}", missing, error) from error
            self.timer.add_peer(peer, wait_s=time.perf_counter() - start)
            # A peer posts its receives before its sends, exchange by exchange: earlier messages to it have been taken.
            self._let_go([sent for sent in self._outbox if sent.peer == peer and sent.number < number])

    def drain(self) -> None:
        """Wait until every message sent so far has been taken."""
        self._let_go(self._outbox)

    def _let_go(self, taken: Sequence[_Sent]) -> None:
        for sent in taken:
            try:
                sent.work.wait(self.world.timeout)
            except RuntimeError as error:
                raise self.world.lost(f"exchange {sent.label}", [sent.peer], error) from error
        gone = set(map(id, taken))
        self._outbox = [sent for sent in self._outbox if id(sent) not in gone]


class Flight:
    """One use of a route: a gather or scatter under way, and afterwards its transpose in backward."""

    __slots__ = ("channel", "keep", "kept", "label", "like", "pending", "received", "route", "slots", "width")

    def __init__(
        self, channel: Channel, route: Route, label: str, like: Tensor, width: tuple[int, int, int], keep: bool = False
    ):
        """like: gives dtype and device. width: `(T, H, d)` of the row tensor on the owner's side.

        keep: hold what other ranks sent in `kept`, so that `replay_*` can do without them.
        """
        self.channel, self.route, self.label, self.keep = channel, route, label, keep
        self.kept: list[Tensor] = []
        self.like = like.new_empty(0)
        self.width = width
        self.pending: list[tuple[int, int, Any]] = []
        self.slots: list[Tensor] = []
        self.received: list[Tensor] = []

    def _heads(self, heads: HeadRange | None) -> int:
        return self.width[1] if heads is None else heads[1] - heads[0]

    def _record(self, sent: int, received: int, messages: int, wait_s: float = 0.0) -> None:
        if sent or received or wait_s:
            self.channel.timer.add_exchange(
                self.route.kind, sent_bytes=sent, received_bytes=received, wait_s=wait_s, messages=messages
            )

    def _wait(self) -> None:
        if self.pending:
            start = time.perf_counter()
            self.channel.wait(self.pending, self.label)
            self.pending = []
            self._record(0, 0, 0, time.perf_counter() - start)

    def post_gather(self, x: Tensor) -> None:
        """Send rows of `x [N, T, H, d]` to whoever needs them; own blocks are copied at once."""
        rank, t, d = self.route.rank, self.width[0], self.width[2]
        with self.channel.timer.phase(f"exchange.{self.route.kind}"):
            own = {b.heads: _pick(x, b) for b in self.route.sends if b.peer == rank}
            sends = [(b.peer, _pick(x, b).contiguous()) for b in self.route.sends if b.peer != rank]
            recvs = []
            self.slots = []
            for slot in self.route.slots:
                if all(peer == rank for peer, _ in slot.blocks):
                    self.slots.append(own[slot.heads] if slot.blocks else x.new_empty(0, t, self._heads(slot.heads), d))
                    continue
                buffer = x.new_empty(slot.num_rows, t, self._heads(slot.heads), d)
                start = 0
                for peer, n in slot.blocks:
                    part = buffer.narrow(0, start, n)
                    start += n
                    if peer == rank:
                        part.copy_(own[slot.heads])
                    else:
                        recvs.append((peer, part))
                self.slots.append(buffer)
            self.pending = self.channel.post(sends, recvs, self.label)
            self._record(_bytes(sends), _bytes(recvs), len(sends))

    def wait_gather(self) -> list[Tensor]:
        """The slots `[n, T, h1 - h0, d]`, in the order of the route."""
        with self.channel.timer.phase(f"exchange.{self.route.kind}"):
            self._wait()
            slots, self.slots = self.slots, []
            if self.keep:
                self.kept = [s[self._own_rows(slot) :].clone() for s, slot in zip(slots, self.route.slots, strict=True)]
            return self._ordered(slots)

    def replay_gather(self, x: Tensor, kept: Sequence[Tensor]) -> list[Tensor]:
        """What `wait_gather` gave, from own rows and what was kept of the others', without a message."""
        own = {b.heads: _pick(x, b) for b in self.route.sends if b.peer == self.route.rank}
        slots = []
        for slot, remote in zip(self.route.slots, kept, strict=True):
            mine = [own[slot.heads]] if self._own_rows(slot) else []
            slots.append(torch.cat([*mine, remote]) if remote.shape[0] or not mine else mine[0])
        return self._ordered(slots)

    def _own_rows(self, slot: Slot) -> int:
        return slot.blocks[0][1] if slot.blocks and slot.blocks[0][0] == self.route.rank else 0

    def _ordered(self, slots: Sequence[Tensor]) -> list[Tensor]:
        return [
            s if slot.order is None else s.index_select(0, slot.order)
            for s, slot in zip(slots, self.route.slots, strict=True)
        ]

    def post_scatter(self, slots: Sequence[Tensor]) -> None:
        """Send slot rows back to their owners."""
        rank, t, d = self.route.rank, self.width[0], self.width[2]
        with self.channel.timer.phase(f"exchange.{self.route.kind}"):
            parts = self._parts(slots)
            sends = [(peer, part.contiguous()) for peer, _, part in parts if peer != rank]
            own = {heads: part for peer, heads, part in parts if peer == rank}
            self.received, recvs = [], []
            for block in self.route.sends:
                if block.peer == rank:
                    self.received.append(own[block.heads])
                else:
                    buffer = self.like.new_empty(block.num_rows, t, self._heads(block.heads), d)
                    recvs.append((block.peer, buffer))
                    self.received.append(buffer)
            self.pending = self.channel.post(sends, recvs, self.label)
            self._record(_bytes(sends), _bytes(recvs), len(sends))

    def wait_scatter(self) -> Tensor:
        """The sum `[N, T, H, d]` of everything that came back, added in rank order."""
        with self.channel.timer.phase(f"exchange.{self.route.kind}"):
            self._wait()
            received, self.received = self.received, []
            if self.keep:
                blocks = zip(self.route.sends, received, strict=True)
                self.kept = [piece for block, piece in blocks if block.peer != self.route.rank]
            return self._sum(received)

    def replay_scatter(self, slots: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
        """What `wait_scatter` gave, from own slots and what was kept of the others', without a message."""
        own = {heads: part for peer, heads, part in self._parts(slots) if peer == self.route.rank}
        remote = iter(kept)
        return self._sum([own[b.heads] if b.peer == self.route.rank else next(remote) for b in self.route.sends])

    def _parts(self, slots: Sequence[Tensor]) -> list[tuple[int, HeadRange | None, Tensor]]:
        """Slot tensors cut into the blocks they arrived as: (peer, heads, rows)."""
        parts = []
        for slot, tensor in zip(self.route.slots, slots, strict=True):
            if slot.order is not None:
                tensor = torch.empty_like(tensor).index_copy_(0, slot.order, tensor)
            start = 0
            for peer, n in slot.blocks:
                parts.append((peer, slot.heads, tensor.narrow(0, start, n)))
                start += n
        return parts

    def _sum(self, received: Sequence[Tensor]) -> Tensor:
        if self.route.is_identity:
            return received[0]
        out = self.like.new_zeros(self.route.num_rows, *self.width)
        for block, piece in zip(self.route.sends, received, strict=True):
            view = out if block.heads is None else out[:, :, block.heads[0] : block.heads[1]]
            if block.rows is None:
                view.add_(piece)
            else:
                view.index_add_(0, block.rows, piece)
        return out


class _GatherStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.post_gather(x)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = ctx.flight.wait_scatter()
        return grads[0], grad_x if ctx.needs_input_grad[1] else None, None


class _GatherFinish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return token.clone(), *(s.detach() for s in flight.wait_gather())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.post_scatter(grads[1:])
        return grads[0], None


class _ScatterStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight, *slots: Tensor) -> Tensor:
        ctx.flight = flight
        flight.post_scatter(slots)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *ctx.flight.wait_gather()


class _ScatterFinish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return token.clone(), flight.wait_scatter().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.post_gather(grads[1])
        return grads[0], None


def gather_start(token: Tensor, x: Tensor, flight: Flight) -> Tensor:
    """Start to pass rows of `x [N, T, H, d]` on; returns the token that `gather_finish` takes."""
    return _GatherStart.apply(token, x, flight)


def gather_finish(token: Tensor, flight: Flight) -> tuple[Tensor, list[Tensor]]:
    """Wait for the rows of a started gather: the token and the slots."""
    token, *slots = _GatherFinish.apply(token, flight)
    return token, slots


def scatter(token: Tensor, slots: Sequence[Tensor], flight: Flight) -> tuple[Tensor, Tensor]:
    """Pass slot rows back to their owners and add them up: the token and `[N, T, H, d]`."""
    token = _ScatterStart.apply(token, flight, *slots)
    return _ScatterFinish.apply(token, flight)


def _pick(x: Tensor, block: Block) -> Tensor:
    """The rows and heads of one block."""
    piece = x if block.heads is None else x[:, :, block.heads[0] : block.heads[1]]
    return piece if block.rows is None else piece.index_select(0, block.rows)


def _bytes(messages: Sequence[tuple[int, Tensor]]) -> int:
    return sum(_size(t) for _, t in messages)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
