"""Measures what this machine's ranks and links can do, in a few seconds, as a topology.

The same code that training runs is timed: a layer's products, its attention, layers without rows, and the row exchange
between ranks. Not here: what follows from the figures (`scheduler/cost.py`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from gtx.batches import BatchPlanner
from gtx.config import BatchConfig, Config, EngineConfig, SamplingConfig
from gtx.engine import DTYPES, TorchEngine
from gtx.graphs import from_edges
from gtx.models import GraphModel
from gtx.parallel.compiler import Compiler
from gtx.parallel.exchange import Block, Channel, Flight, Route, Slot
from gtx.parallel.executor import Executor
from gtx.parallel.world import World, solo
from gtx.partition import partition
from gtx.session import attention_backend, joined, load_partitioned, silent
from gtx.workload import model_shape
from monitor import PhaseTimer, current_memory_bytes, host_memory_bytes
from scheduler.cost import destination_flops, edge_bytes, row_bytes, source_flops
from scheduler.plan import fixed_plan
from scheduler.topology import FREE, Device, Link, Topology
from scheduler.workload import ModelShape

ROWS, DEGREE, REPEATS = 8192, 16, 5
MESSAGE_BYTES = (1 << 12, 1 << 20, 1 << 22)
PROBE_BYTES = (1 << 12, 1 << 18)


def run_calibration(config: Config, out: Path, command: str) -> None:
    """Calibrate on the launched ranks; rank 0 writes the file. Raises ValueError with one line if it cannot."""
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    with joined(config) as world:
        graph = load_partitioned(config, world).partitioned
        model = GraphModel(config.model, *graph.graph.dims)
        shape = model_shape(config.model, model, graph, DTYPES[config.engine.precision].itemsize)
        topology = calibrate(config, world, shape, command)
        if world.rank == 0:
            out.write_text(topology.to_json(), encoding="utf-8")
            print(f"{world.size} rank(s) measured, written to {out}", flush=True)


def calibrate(config: Config, world: World, shape: ModelShape, command: str, rows: int = ROWS) -> Topology:
    """The topology of the ranks at hand, measured on all of them at once; the same on every rank.

    rows: of the made-up graph that is timed; near those of a rank, since caches matter.
    """
    links, message_s = _links(world)
    device = _device(config, world, shape, max(min(rows, 1 << 15), 1 << 11), message_s)
    everyone = world.gather_facts(
        (device, socket.gethostname(), links, _stream_bytes_per_s(), _host_bytes_per_s(world))
    )
    hosts = list(dict.fromkeys(host for _, host, *_ in everyone))
    devices = tuple(replace(found, host=hosts.index(host)) for found, host, *_ in everyone)
    same, between = _kind(everyone, same_host=True), _kind(everyone, same_host=False)
    near = same or between or Link(0.0, FREE)
    return Topology(
        devices=devices,
        same_host=near,
        between_hosts=between or near,
        optimizer_bytes_per_s=min(stream for *_, stream, _ in everyone),
        step_s=0.0,
        host_bytes_per_s=min(found for *_, found in everyone),
        made=f"{datetime.now(timezone.utc):%Y-%m-%d}, {command}",
    )


def probe_links(world: World) -> tuple[tuple[int, int, float, float], ...]:
    """(rank, rank, alpha_s, bytes_per_s) of every pair, measured now with few and small messages.

    The same on every rank.
    """
    links, _ = _links(world, PROBE_BYTES, 2)
    everyone = world.gather_facts(links)
    return tuple(
        (rank, peer, link.alpha_s, link.bytes_per_s)
        for rank, found in enumerate(everyone)
        for peer, link in sorted(found.items())
        if peer > rank
    )


def _kind(everyone: list[Any], same_host: bool) -> Link | None:
    """The median link among pairs of ranks on one host, or on different ones; None where there is no such pair."""
    found = []
    for rank, (_, host, links, *_) in enumerate(everyone):
        for peer, link in links.items():
            if peer > rank and (everyone[peer][1] == host) == same_host:
                found.append(link)
    if not found:
        return None
    return Link(median(link.alpha_s for link in found), median(link.bytes_per_s for link in found))


def _device(config: Config, world: World, shape: ModelShape, rows: int, message_s: float) -> Device:
    """This rank's rates: the config's own model on made-up graphs of no rows, rows without edges, and with edges."""
    layers = range(shape.layers)
    tiny = _phases(config, world, shape, 8, 0)
    plain = _phases(config, world, shape, rows, 0)
    edged = _phases(config, world, shape, rows, DEGREE)
    least = 0.02 * sum(edged.values())

    def spent(phase: str, of: dict[str, float], without: dict[str, float]) -> float:
        return max(of.get(phase, 0.0) - without.get(phase, 0.0), least)

    flops = rows * sum(source_flops(shape, layer) + destination_flops(shape, layer) for layer in layers)
    traffic = rows * sum(row_bytes(shape, layer) for layer in layers)
    per_edge, per_row = (sum(column) for column in zip(*(edge_bytes(shape, layer) for layer in layers), strict=True))
    row_s, edge_s = spent("rowwise", plain, tiny), spent("edgewise", edged, tiny)
    product = _product_flops_per_s(world, shape, rows)
    return Device(
        row_flops_per_s=max(product, flops / row_s) if flops else product,
        row_bytes_per_s=traffic / max(row_s - flops / product, 0.2 * row_s),
        edge_bytes_per_s=(per_edge * rows * DEGREE + per_row * rows) / edge_s if per_edge else FREE,
        packed_bytes_per_s=_packed_bytes_per_s(world, shape, rows),
        message_s=message_s,
        visit_s=sum(tiny.values()) / shape.layers,
        row_backward=min(max(spent("backward", plain, tiny) / row_s, 1.0), 4.0),
        edge_backward=min(max(spent("backward", edged, plain) / edge_s, 1.0), 5.0),
        memory_bytes=memory_of_rank(world),
        resident_bytes=float(current_memory_bytes(str(world.device)) or 0),
    )


def _phases(config: Config, world: World, shape: ModelShape, rows: int, degree: int) -> dict[str, float]:
    """Median seconds by phase of a step of the model on a graph of equal degrees, while all ranks run it."""
    generator = np.random.default_rng(0)
    src = generator.integers(0, rows, rows * degree)
    dst = np.repeat(np.arange(rows), degree)
    everyone, nobody = np.ones(rows, dtype=bool), np.zeros(rows, dtype=bool)
    features = generator.standard_normal((rows, shape.num_inputs), dtype=np.float32)
    labels = np.arange(rows) % shape.num_classes
    graph = from_edges("made up", src, dst, rows, features, labels, everyone, nobody, nobody)
    cut = partition(graph, "random", 1, 0)
    here = solo(world.device)
    plan = fixed_plan("graph", [1.0], 1, shape.layers)
    plain = config.model.model_copy(update={"edge_bias": False})  # a graph that is made up has no edge features
    model = GraphModel(plain, shape.num_features, shape.num_classes)
    precision = config.engine.precision if config.engine.precision == "float64" else "float32"
    engine = TorchEngine(model, EngineConfig(name="torch", precision=precision), here, 1)
    timer = PhaseTimer(synchronize=torch.cuda.synchronize if world.device.type == "cuda" else None)
    backend = attention_backend(config, world, engine.dtype, print if world.rank == 0 else silent, cut)
    executor = Executor(engine, cut, here, timer, seed=0, num_heads=config.model.heads, backend=backend)
    batch = BatchPlanner(cut, BatchConfig(), SamplingConfig(), shape.layers, 0).step(0)
    compiled = Compiler(cut, plan, here, config.model.heads, np.zeros(1, dtype=np.int64)).compile(batch)
    world.barrier()
    found = []
    for _ in range(REPEATS + 1):
        timer.start_step()
        executor.train_step(compiled, plan, 0, fixed=True)
        phases = timer.finish_step()
        found.append({name: phases.get(name, 0.0) for name in ("rowwise", "edgewise", "backward")})
    return {name: median(f[name] for f in found[1:]) for name in found[0]}


def _product_flops_per_s(world: World, shape: ModelShape, rows: int) -> float:
    """FLOP/s of a product of rows with a weight."""
    x = torch.randn(rows, shape.width, device=world.device)
    weight = torch.randn(2 * shape.width, shape.width, device=world.device)
    seconds = _timed(lambda: torch.nn.functional.linear(x, weight), world.device)
    return 4.0 * rows * shape.width**2 / seconds


def _packed_bytes_per_s(world: World, shape: ModelShape, rows: int) -> float:
    """Bytes per second of picking rows to send and adding up rows that came, as the exchange does both."""
    x = torch.randn(rows, 2 * shape.width, device=world.device)
    chosen = torch.arange(0, rows, 2, device=world.device)
    total = torch.zeros_like(x)
    seconds = _timed(lambda: total.index_add_(0, chosen, x.index_select(0, chosen)), world.device)
    return 2.0 * chosen.numel() * 2 * shape.width * 4.0 / seconds


def _links(world: World, sizes: Sequence[int] = MESSAGE_BYTES, repeats: int = REPEATS) -> tuple[dict[int, Link], float]:
    """alpha and beta to each later rank, from messages of several sizes that go there and back.

    And the seconds that this rank is busy with posting one message of the smallest size; 0 without peers.
    """
    links: dict[int, Link] = {}
    busy = []
    for a in range(world.size):
        for b in range(a + 1, world.size):
            world.barrier()
            if world.rank in (a, b):
                peer = b if world.rank == a else a
                times = [_round_trip(world, peer, size, repeats, first=world.rank == a) for size in sizes]
                alpha, largest = max(times[0][0] / 2, 1e-6), times[-1][0] / 2
                links[peer] = Link(alpha, sizes[-1] / max(largest - alpha, 0.02 * largest))
                busy.append(times[0][1])
    return links, median(busy) if busy else 0.0


def _round_trip(world: World, peer: int, size: int, repeats: int, *, first: bool) -> tuple[float, float]:
    """Seconds for a message of `size` bytes to go to the peer and back through the row exchange, and to post it."""
    channel = Channel(world, PhaseTimer())
    x = torch.zeros(1, 1, 1, size // 4, device=world.device)
    out = Route("move", world.rank, 1, (Block(peer, 1, None, None),), (Slot(None, ()),))
    back = Route("move", world.rank, 0, (), (Slot(None, ((peer, 1),)),))
    times, posting = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for route in (out, back) if first else (back, out):
            flight = Flight(channel, route, "calibration", x, (1, 1, size // 4))
            begin = time.perf_counter()
            flight.post_gather(x)
            posting.append(time.perf_counter() - begin)
            flight.wait_gather()
        channel.drain()
        times.append(time.perf_counter() - start)
    return min(times[1:]), median(posting[2:])  # the least: what else runs on the machine only adds


def _stream_bytes_per_s() -> float:
    """Memory traffic per second of an update in place, read and written."""
    x, y = torch.zeros(1 << 22), torch.ones(1 << 22)
    return 3 * 4.0 * x.numel() / _timed(lambda: x.add_(y))


def _host_bytes_per_s(world: World) -> float:
    """Bytes per second from device to pinned host memory; free on a CPU, which has no host behind it."""
    if world.device.type != "cuda":
        return FREE
    x, y = torch.zeros(1 << 22, device=world.device), torch.zeros(1 << 22).pin_memory()
    return 4.0 * x.numel() / _timed(lambda: y.copy_(x), world.device)


def memory_of_rank(world: World) -> float:
    """Bytes a rank may use: the device's, or an equal share of the host's for each of its ranks."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world.size)))
    return (host_memory_bytes() or FREE) / max(local, 1)


def _timed(run: Callable[[], object], device: torch.device = torch.device("cpu")) -> float:  # noqa: B008
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
