"""Measures what this machine's ranks and links can do, in a few seconds, as a topology.

The same code that training runs is timed: a layer's products, its attention, layers without rows, and the row exchange
between ranks. Not here: what follows from the figures (`scheduler/cost.py`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
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
from gtx.train import joined, load_partitioned
from gtx.workload import model_shape
from monitor import PhaseTimer
from scheduler.cost import BACKWARD, edge_bytes, source_flops
from scheduler.plan import fixed_plan
from scheduler.topology import Device, Link, Topology
from scheduler.workload import ModelShape
from sparse_engine import SparsePattern, sparse_attention

ROWS, DEGREE, REPEATS = 8192, 16, 5
MESSAGE_BYTES = (1 << 12, 1 << 20, 1 << 22)


def run_calibration(config: Config, out: Path, command: str) -> None:
    """Calibrate on the launched ranks; rank 0 writes the file. Raises ValueError with one line if it cannot."""
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    with joined(config) as world:
        graph = load_partitioned(config, world).partitioned
        model = GraphModel(config.model, graph.graph.num_features, graph.graph.num_classes)
        shape = model_shape(config.model, model, graph, DTYPES[config.engine.precision].itemsize)
        topology = calibrate(config, world, shape, command)
        if world.rank == 0:
            out.write_text(topology.to_json(), encoding="utf-8")
            print(f"{world.size} rank(s) measured, written to {out}", flush=True)


def calibrate(config: Config, world: World, shape: ModelShape, command: str) -> Topology:
    """The topology of the ranks at hand, measured on all of them at once; the same on every rank."""
    device = Device(
        row_flops_per_s=_row_rate(config, world, shape),
        edge_bytes_per_s=_edge_rate(config, world, shape),
        visit_s=_visit_s(config, world),
        memory_bytes=_memory_bytes(world),
    )
    links = _links(world)
    everyone = world.gather_facts((device, socket.gethostname(), links, _stream_bytes_per_s()))
    hosts = list(dict.fromkeys(host for _, host, _, _ in everyone))
    devices = tuple(Device(**{**vars(found), "host": hosts.index(host)}) for found, host, _, _ in everyone)
    same, between = _kind(everyone, same_host=True), _kind(everyone, same_host=False)
    near = same or between or Link(0.0, 1e12)
    return Topology(
        devices=devices,
        same_host=near,
        between_hosts=between or near,
        optimizer_bytes_per_s=min(stream for _, _, _, stream in everyone),
        step_s=0.0,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d}, {command}",
    )


def _kind(everyone: list[Any], same_host: bool) -> Link | None:
    """The median link among pairs of ranks on one host, or on different ones; None where there is no such pair."""
    found = []
    for rank, (_, host, links, _) in enumerate(everyone):
        for peer, link in links.items():
            if peer > rank and (everyone[peer][1] == host) == same_host:
                found.append(link)
    if not found:
        return None
    return Link(median(link.alpha_s for link in found), median(link.bytes_per_s for link in found))


def _row_rate(config: Config, world: World, shape: ModelShape) -> float:
    """FLOP/s of a product of rows with a weight, forward and backward."""
    x = torch.randn(ROWS, shape.width, device=world.device, requires_grad=True)
    weight = torch.randn(2 * shape.width, shape.width, device=world.device, requires_grad=True)

    def run() -> None:
        torch.nn.functional.linear(x, weight).sum().backward()

    flops = float(np.sum(source_flops(ModelShape(**{**vars(shape), "kind": "GT"}), float(ROWS))))
    return flops * (1 + BACKWARD) / _seconds(run, world)


def _edge_rate(config: Config, world: World, shape: ModelShape) -> float:
    """Bytes per second of attention, forward and backward, as `cost.edge_bytes` counts them."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, ROWS, (ROWS * DEGREE,), generator=generator).to(world.device)
    pattern = SparsePattern(torch.arange(0, ROWS * DEGREE + 1, DEGREE, device=world.device), indices, ROWS)
    pattern.transpose()
    heads, dim = shape.heads, max(shape.width // shape.heads, 1)
    q, k, v = (torch.randn(ROWS, heads, dim, device=world.device, requires_grad=True) for _ in range(3))

    def run() -> None:
        sparse_attention(q, k, v, pattern, backend=config.model.backend).sum().backward()

    count = float(np.sum(edge_bytes(ModelShape(**{**vars(shape), "kind": "GT"}), float(ROWS), float(ROWS * DEGREE))))
    return count * (1 + BACKWARD) / _seconds(run, world)


def _visit_s(config: Config, world: World) -> float:
    """Seconds of one layer of one wave whose rows cost nothing: a whole step on a graph of eight nodes, per layer."""
    nodes = np.arange(8)
    everyone, nobody = np.ones(8, dtype=bool), np.zeros(8, dtype=bool)
    graph = from_edges(
        "eight", nodes, np.roll(nodes, 1), 8, np.ones((8, 4), np.float32), nodes % 2, everyone, nobody, nobody
    )
    cut = partition(graph, "random", 1, 0)
    here, layers = solo(world.device), config.model.layers
    plan = fixed_plan("graph", [1.0], 1, layers)
    model = GraphModel(config.model, 4, 2)
    engine = TorchEngine(model, EngineConfig(name="torch"), here, 1)
    timer = PhaseTimer()
    timer.start_step()
    executor = Executor(engine, cut, here, timer, seed=0, num_heads=config.model.heads, backend=config.model.backend)
    batch = BatchPlanner(cut, BatchConfig(), SamplingConfig(), layers, 0).step(0)
    compiled = Compiler(cut, plan, here, config.model.heads, np.zeros(1, dtype=np.int64)).compile(batch)
    return _seconds(lambda: executor.train_step(compiled, plan, 0, fixed=True), world) / layers


def _links(world: World) -> dict[int, Link]:
    """alpha and beta to each later rank, from messages of several sizes that go there and back."""
    links: dict[int, Link] = {}
    for a in range(world.size):
        for b in range(a + 1, world.size):
            world.barrier()
            if world.rank in (a, b):
                peer = b if world.rank == a else a
                times = [_round_trip(world, peer, size, first=world.rank == a) / 2 for size in MESSAGE_BYTES]
                slope, base = np.polyfit(MESSAGE_BYTES, times, 1)
                links[peer] = Link(max(float(base), 1e-6), 1.0 / max(float(slope), 1e-12))
    return links


def _round_trip(world: World, peer: int, size: int, *, first: bool) -> float:
    """Seconds for a message of `size` bytes to go to the peer and back through the row exchange."""
    channel = Channel(world, PhaseTimer())
    x = torch.zeros(1, 1, 1, size // 4, device=world.device)
    out = Route("move", world.rank, 1, (Block(peer, 1, None, None),), (Slot(None, ()),))
    back = Route("move", world.rank, 0, (), (Slot(None, ((peer, 1),)),))

    def pass_on(route: Route) -> None:
        flight = Flight(channel, route, "calibration", x, (1, 1, size // 4))
        flight.post_gather(x)
        flight.wait_gather()

    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for route in (out, back) if first else (back, out):
            pass_on(route)
        channel.drain()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _stream_bytes_per_s() -> float:
    """Memory traffic per second of an update in place, read and written."""
    x, y = torch.zeros(1 << 22), torch.ones(1 << 22)
    return 3 * 4.0 * x.numel() / _timed(lambda: x.add_(y))


def _memory_bytes(world: World) -> float:
    """Memory a rank may use: the device's, or an equal share of the host's for each of its ranks."""
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world.size)))
    return total / max(local, 1)


def _seconds(run: Callable[[], object], world: World) -> float:
    """The median time of `run` while all ranks run it."""
    world.barrier()
    return _timed(run, world.device)


def _timed(run: Callable[[], object], device: torch.device = torch.device("cpu")) -> float:  # noqa: B008
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])
