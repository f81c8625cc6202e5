"""The row exchange by itself: gather and scatter are transposes, in any shape, and a peer that is lost is named.

Routes are written by hand here. Not here: how the compiler finds them (`test_gtx_parallel_compiler.py`).

Legend: `N` rows of a rank, `T` tensors side by side, `H` heads, `d` width of a head, `P` ranks.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import end_ranks, run_ranks
from torch import Tensor

from gtx.parallel.exchange import Block, Channel, Flight, Route, Slot, gather_finish, gather_start, scatter
from gtx.parallel.world import ExchangeError, World, solo
from monitor import PhaseTimer

T, H, D = 2, 3, 2
Heads = tuple[int, int] | None


@dataclass(frozen=True)
class Wish:
    """Who wants what, known to all: `wants[reader][slot][owner]` lists rows of the owner.

    num_rows: `N` of each rank. heads: of each slot. order: positions in which readers take what arrived, by reader, for
    one slot only.
    """

    num_rows: tuple[int, ...]
    heads: tuple[Heads, ...]
    wants: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    order: tuple[tuple[int, ...], ...] | None = None

    def route(self, rank: int) -> Route:
        size = len(self.num_rows)
        sends = []
        for peer, (slot, heads) in itertools.product(range(size), enumerate(self.heads)):
            rows = self.wants[peer][slot][rank]
            if rows:
                every = peer == rank and rows == tuple(range(self.num_rows[rank]))
                sends.append(Block(peer, len(rows), None if every else torch.tensor(rows), heads))
        slots = []
        for slot, heads in enumerate(self.heads):
            blocks = tuple((p, len(self.wants[rank][slot][p])) for p in self.arrival(rank) if self.wants[rank][slot][p])
            order = None if self.order is None else torch.tensor(self.order[rank], dtype=torch.int64)
            slots.append(Slot(heads, blocks, order))
        return Route("kv", rank, self.num_rows[rank], tuple(sends), tuple(slots))

    def arrival(self, rank: int) -> list[int]:
        return [rank, *(p for p in range(len(self.num_rows)) if p != rank)]

    def gathered(self, rows: Sequence[Tensor], reader: int) -> list[Tensor]:
        """What `reader` gets, from all ranks' rows at one place."""
        found = []
        for slot, heads in enumerate(self.heads):
            pieces = [rows[p][list(self.wants[reader][slot][p])] for p in self.arrival(reader)]
            whole = torch.cat(pieces)
            whole = whole if heads is None else whole[:, :, heads[0] : heads[1]]
            found.append(whole if self.order is None else whole[list(self.order[reader])])
        return found

    def scattered(self, slots: Sequence[Sequence[Tensor]], owner: int) -> Tensor:
        """What `owner` gets back, from all ranks' slots at one place, by the transpose of `gathered`."""
        rows = [torch.zeros(n, T, H, D, dtype=torch.float64, requires_grad=True) for n in self.num_rows]
        total = sum(
            (have * want).sum()
            for reader in range(len(self.num_rows))
            for have, want in zip(self.gathered(rows, reader), slots[reader], strict=True)
        )
        (grad,) = torch.autograd.grad(total, rows[owner], allow_unused=True)
        return torch.zeros_like(rows[owner]) if grad is None else grad


WISHES = {
    "two ranks, some rows, one wanted twice": Wish((3, 2), (None,), ((((0, 1, 2), (1,)),), (((2, 0), (0, 1)),))),
    "head ranges, rows wanted for one of them only": Wish(
        (3, 2), ((0, 1), (1, 3)), ((((1,), (0, 1)), ((0, 1, 2), ())), (((), (1,)), ((2,), (0, 1))))
    ),
    "a rank without rows": Wish((3, 0), (None,), ((((0, 1), ()),), (((2, 1), ()),))),
    "a rank that wants nothing": Wish((2, 2), (None,), ((((), ()),), (((0,), (0, 1)),))),
    "nothing for nobody": Wish((2, 1), (None,), ((((), ()),), (((), ()),))),
    "an order of its own": Wish(
        (2, 3), (None,), ((((0, 1), (2, 0)),), (((1,), (0, 1, 2)),)), ((3, 0, 2, 1), (1, 3, 0, 2))
    ),
    "three ranks in a ring": Wish(
        (2, 1, 3),
        ((0, 2), (2, 3)),
        (
            (((0, 1), (0,), ()), ((1,), (), ())),
            (((), (0,), (2, 1)), ((), (0,), (0,))),
            (((0,), (), (0, 1, 2)), ((1, 0), (), (0, 1, 2))),
        ),
    ),
}


def rows_of(wish: Wish, rank: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(wish.num_rows[rank], T, H, D, generator=generator, dtype=torch.float64)


def slots_of(wish: Wish, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + rank)
    shapes = [slot.shape for slot in wish.gathered([rows_of(wish, r) for r in range(len(wish.num_rows))], rank)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def flight_of(channel: Channel, wish: Wish, label: str = "kv of a test") -> Flight:
    like = torch.zeros(0, dtype=torch.float64)
    return Flight(channel, wish.route(channel.world.rank), label, like, (T, H, D))


def token_of() -> Tensor:
    return torch.zeros((), dtype=torch.float64, requires_grad=True)


def exchange(world: World, wish: Wish) -> dict[str, Any]:
    """Gather and scatter once, each with its backward."""
    x, y = rows_of(wish, world.rank).requires_grad_(), [slot.requires_grad_() for slot in slots_of(wish, world.rank)]
    channel = Channel(world, PhaseTimer())
    flight = flight_of(channel, wish)
    token, slots = gather_finish(gather_start(token_of(), x, flight), flight)
    product = sum(
        ((have * want).sum() for have, want in zip(slots, slots_of(wish, world.rank), strict=True)), token * 0
    )
    product.backward()
    token, back = scatter(token_of(), y, flight_of(channel, wish))
    ((back * rows_of(wish, world.rank)).sum() + token * 0).backward()
    channel.drain()
    return {
        "slots": [slot.detach() for slot in slots],
        "grad of rows": x.grad,
        "rows": back.detach(),
        "grads of slots": [slot.grad for slot in y],
    }


def exchange_all(world: World, wishes: dict[str, Wish]) -> dict[str, dict[str, Any]]:
    return {name: exchange(world, wish) for name, wish in wishes.items()}


def assert_close(have: Tensor | None, want: Tensor, what: str) -> None:
    if have is None:
        assert want.numel() == 0 or float(want.abs().max()) == 0, what
        return
    assert have.shape == want.shape, what
    torch.testing.assert_close(have, want, rtol=1e-13, atol=1e-13, msg=what)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_and_scatter_are_transposes(size: int) -> None:
    """Values and gradients equal those of plain indexing at one place, and `<gather(x), y> == <x, scatter(y)>`."""
    wishes = {name: wish for name, wish in WISHES.items() if len(wish.num_rows) == size}
    if size == 1:
        wishes = {"alone": Wish((4,), ((0, 1), (1, 3)), ((((0, 1, 2, 3),), ((2, 0),)),))}
    found = [exchange_all(solo(), wishes)] if size == 1 else run_ranks(exchange_all, size, wishes)
    assert wishes
    for name, wish in wishes.items():
        rows = [rows_of(wish, rank) for rank in range(size)]
        slots = [slots_of(wish, rank) for rank in range(size)]
        gathered = scattered = 0.0
        for rank in range(size):
            have = found[rank][name]
            for one, other in zip(have["slots"], wish.gathered(rows, rank), strict=True):
                assert torch.equal(one, other), name
            want = wish.scattered(slots, rank)
            assert_close(have["rows"], want, f"{name}: rows")
            assert_close(have["grad of rows"], want, f"{name}: the gradient of gather")
            for one, other in zip(have["grads of slots"], wish.gathered(rows, rank), strict=True):
                assert_close(one, other, f"{name}: the gradient of scatter")
            gathered += sum(float((a * b).sum()) for a, b in zip(have["slots"], slots[rank], strict=True))
            scattered += float((rows[rank] * have["rows"]).sum())
        assert gathered == pytest.approx(scattered, rel=1e-12, abs=1e-12), name


def test_a_route_counts_what_it_passes_on() -> None:
    wish = WISHES["three ranks in a ring"]
    routes = [wish.route(rank) for rank in range(3)]
    assert [route.rows_sent for route in routes] == [3, 1, 3]
    assert [route.rows_received for route in routes] == [1, 3, 3]
    assert not any(route.is_identity for route in routes)
    assert Wish((4,), (None,), ((((0, 1, 2, 3),),),)).route(0).is_identity


# Several at once ------------------------------------------------------------------------------------------------------


def several(world: World, wish: Wish, finishing: Sequence[int]) -> list[list[Tensor]]:
    """Start as many gathers as there are numbers, and finish them in that order."""
    channel = Channel(world, PhaseTimer())
    flights = [flight_of(channel, wish, f"kv {i}") for i in range(len(finishing))]
    for seed, flight in enumerate(flights):
        flight.post_gather(rows_of(wish, world.rank, seed))
    found: dict[int, list[Tensor]] = {i: flights[i].wait_gather() for i in finishing}
    channel.drain()
    return [found[i] for i in range(len(finishing))]


def in_turn_of_rank(world: World, wish: Wish) -> list[list[Tensor]]:
    """Ranks finish their flights in different orders."""
    return several(world, wish, list(itertools.permutations(range(4)))[5 * world.rank + 3])


def test_flights_may_be_in_the_air_together_and_land_in_any_order() -> None:
    """Four gathers at once; every rank finishes them in an order of its own, and each gets what was meant for it."""
    wish = WISHES["three ranks in a ring"]
    found = run_ranks(in_turn_of_rank, 3, wish)
    for seed in range(4):
        rows = [rows_of(wish, rank, seed) for rank in range(3)]
        for rank in range(3):
            for have, want in zip(found[rank][seed], wish.gathered(rows, rank), strict=True):
                assert torch.equal(have, want)


def send_and_go_on(world: World) -> float:
    """Rank 0 sends without waiting while rank 1 is busy; returns the seconds until rank 0 could go on."""
    wish = Wish((1, 0), (None,), ((((), ()),), (((0,), ()),)))
    start = time.perf_counter()
    if world.rank == 1:
        time.sleep(1.0)
    flight = flight_of(Channel(world, PhaseTimer()), wish)
    flight.post_gather(rows_of(wish, world.rank))
    flight.wait_gather()
    went_on = time.perf_counter() - start
    flight.channel.drain()
    return went_on


def test_a_sender_does_not_wait_for_its_reader() -> None:
    sender, reader = run_ranks(send_and_go_on, 2)
    assert sender < 0.5 < 1.0 <= reader


# Peers that are lost --------------------------------------------------------------------------------------------------

HANG_S = 3.0


def facts_of(world: World, sizes: Sequence[int]) -> list[list[tuple[int, bytes]]]:
    """Gather twice: first facts of one size each, then those of the next rank."""
    return [world.gather_facts((world.rank, bytes(sizes[(world.rank + i) % world.size]))) for i in (0, 1)]


@pytest.mark.parametrize("sizes", [(0, 10, 20), (4000, 4087, 4096), (0, 100_000, 5000), (9000, 0, 0)])
def test_facts_come_whole_and_in_rank_order_whatever_their_size(sizes: tuple[int, ...]) -> None:
    expected = [[(rank, bytes(sizes[(rank + i) % 3])) for rank in range(3)] for i in (0, 1)]
    assert run_ranks(facts_of, 3, sizes) == [expected] * 3


def silent_peers(world: World) -> tuple[str, float]:
    """Rank 0 waits for 1 and 2, of which 1 never posts."""
    wish = Wish((1, 1, 1), (None,), ((((0,), (0,), (0,)),), (((), (), ()),), (((), (), ()),)))
    start = time.perf_counter()
    flight = flight_of(Channel(world, PhaseTimer()), wish, "kv of layer 1, wave 2, step 3")
    if world.rank == 1:
        time.sleep(HANG_S + 4.0)
        return "", 0.0
    flight.post_gather(rows_of(wish, world.rank))
    if world.rank == 2:
        time.sleep(HANG_S + 4.0)
        return "", 0.0
    with pytest.raises(ExchangeError) as caught:
        flight.wait_gather()
    return str(caught.value), time.perf_counter() - start


def test_a_peer_that_never_posts_is_named_within_the_timeout() -> None:
    """The exchange, the rank that waited, and only the rank that did not arrive."""
    error, seconds = run_ranks(silent_peers, 3, hang_s=HANG_S)[0]
    assert error.startswith("exchange kv of layer 1, wave 2, step 3: rank 0 waited up to 3 s; ")
    assert "rank(s) that did not arrive: 1" in error.split(";")[1]
    assert HANG_S <= seconds < HANG_S + 4.0
    end_ranks()  # their connections are broken


def dying_peer(world: World, notice_s: float) -> None:
    """Rank 1 ends after an exchange. notice_s: what rank 0 does until the next one."""
    wish = Wish((1, 1), (None,), ((((0,), (0,)),), (((0,), (0,)),)))
    channel = Channel(world, PhaseTimer())
    for step in range(2):
        flight = flight_of(channel, wish, f"kv of layer 0, wave 0, step {step}")
        flight.post_gather(rows_of(wish, world.rank))
        flight.wait_gather()
        channel.drain()
        world.barrier()
        if world.rank == 1:
            os._exit(1)
        time.sleep(notice_s)


@pytest.mark.parametrize("notice_s", [0.0, 0.5])
def test_a_peer_that_dies_is_named_before_the_timeout(notice_s: float) -> None:
    """Whether it dies during the exchange or before."""
    start = time.perf_counter()
    with pytest.raises(AssertionError) as caught:
        run_ranks(dying_peer, 2, notice_s, hang_s=60.0)
    text = str(caught.value)
    assert time.perf_counter() - start < 30
    assert "ExchangeError: exchange kv of layer 0, wave 0, step 1: rank 0 waited" in text
    assert "rank(s) that did not arrive: 1" in text
    assert "the process died" in text
