"""Fused attention on the CPU beside DGL, PyG, compiled and plain gather-scatter: time and peak memory, as ratios.

Every contender computes the same numbers first. Then they take turns in one process; a ratio is of medians. PyG is
measured where it can be imported (`pip install torch_geometric`). Memory is of one process for each contender.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import geometric_mean, median

import pandas as pd
import torch
from common import ROOT, write
from torch import Tensor

from sparse_engine import SparsePattern, sparse_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS = "gtx"


def power_law(num_nodes: int, num_edges: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Edges whose both ends are drawn with a probability that falls as a power of the node's number, ids shuffled."""

    def ends() -> Tensor:
        drawn = torch.rand(num_edges, generator=generator, dtype=torch.float64).pow_(2.2).mul_(num_nodes).long()
        return torch.randperm(num_nodes, generator=torch.Generator().manual_seed(5))[drawn]

    return ends(), ends()


def workload(name: str) -> tuple[SparsePattern, int, int, torch.dtype]:
    """A pattern, heads, head dim and dtype, by the names of docs/benchmarks/attention.md."""
    g = torch.Generator().manual_seed(0)
    if name == "W1":
        n, e = 169_343, 2_315_598
        return SparsePattern.from_edges(*power_law(n, e, g), n, n), 8, 16, torch.float32
    if name == "W3":
        n = 20_000
        dst = torch.cat([torch.arange(50).repeat_interleave(20_000), torch.randint(0, n, (1_000_000,), generator=g)])
        src = torch.cat([torch.arange(n).repeat(50), torch.randint(0, n, (1_000_000,), generator=g)])
        return SparsePattern.from_edges(dst, src, n, n), 8, 16, torch.float32
    n, heads, dim = {"W2": (100_000, 8, 16), "W2h": (40_000, 4, 64), "W2 bf16": (100_000, 8, 16), "W5k": (5000, 8, 16)}[
        name
    ]
    degrees = torch.randint(14, 16, (n,), generator=g) if name != "W5k" else torch.randint(8, 20, (n,), generator=g)
    dst = torch.repeat_interleave(torch.arange(n), degrees)
    src = torch.randint(0, n, (dst.numel(),), generator=g)
    return SparsePattern.from_edges(dst, src, n, n), heads, dim, torch.bfloat16 if "bf16" in name else torch.float32


def gather_scatter(pattern: SparsePattern) -> Attend:
    row, col = pattern.row_index, pattern.indices

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (q[row] * k[col]).sum(-1) * q.shape[-1] ** -0.5
        index = row[:, None].expand_as(logits)
        peak = logits.new_full((pattern.num_rows, q.shape[1]), -torch.inf)
        weights = torch.exp(logits - peak.scatter_reduce(0, index, logits.detach(), "amax")[row])
        probs = weights / torch.zeros_like(peak).index_add(0, row, weights)[row]
        return torch.zeros_like(q).index_add(0, row, probs[:, :, None] * v[col])

    return attend


def with_dgl(pattern: SparsePattern) -> Attend:
    import dgl

    graph = dgl.graph((pattern.indices, pattern.row_index), num_nodes=pattern.num_rows)
    graph.create_formats_()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = dgl.ops.u_dot_v(graph, k, q * q.shape[-1] ** -0.5)
        out: Tensor = dgl.ops.u_mul_e_sum(graph, v, dgl.ops.edge_softmax(graph, logits))
        return out

    return attend


def with_pyg(pattern: SparsePattern) -> Attend:
    from torch_geometric.nn import TransformerConv

    edge_index = torch.stack([pattern.indices, pattern.row_index])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        conv = TransformerConv(1, q.shape[2], heads=q.shape[1])
        out: Tensor = conv.propagate(edge_index, query=q, key=k, value=v, edge_attr=None)
        return out

    return attend


def contender(name: str, pattern: SparsePattern) -> Attend:
    if name == "DGL":
        return with_dgl(pattern)
    if name == "PyG":
        return with_pyg(pattern)
    if name == "compiled":
        compiled: Attend = torch.compile(gather_scatter(pattern), dynamic=False)
        return compiled
    if name == "gather-scatter":
        return gather_scatter(pattern)
    backend = "torch" if name == "gtx torch" else "cpu"
    return lambda q, k, v: sparse_attention(q, k, v, pattern, backend=backend)


def inputs(pattern: SparsePattern, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    sizes = (pattern.num_rows, pattern.num_cols, pattern.num_cols, pattern.num_rows)
    return [torch.randn(n, heads, dim, generator=g).to(dtype) for n in sizes]


def both_ways(attend: Attend, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def measure(name: str, names: list[str], repeats: int) -> list[dict[str, object]]:
    """Ratios of every contender's median time to ours, forward alone and with backward."""
    pattern, heads, dim, dtype = workload(name)
    tensors = inputs(pattern, heads, dim, dtype)
    if dtype != torch.float32:
        names = [n for n in names if n not in ("DGL",)]  # its CPU kernels have no bf16
    attends = {n: contender(n, pattern) for n in names}
    right = both_ways(attends[OURS], [t.float() for t in tensors])
    for n, attend in attends.items():
        for ours, true in zip(both_ways(attend, tensors), right, strict=True):
            error = float((ours.float() - true).norm() / true.norm())
            if error > (2e-2 if dtype != torch.float32 else 1e-4):
                raise RuntimeError(f"{n} on {name} is off by {error}")
    times: dict[tuple[str, str], list[float]] = {}
    with32 = [t.float() for t in tensors]
    for _ in range(repeats + 1):
        for n, attend in attends.items():
            with torch.no_grad():
                begin = time.perf_counter()
                attend(*tensors[:3])
                times.setdefault((n, "forward"), []).append(time.perf_counter() - begin)
            begin = time.perf_counter()
            both_ways(attend, tensors)
            times.setdefault((n, "both"), []).append(time.perf_counter() - begin)
        if dtype != torch.float32:
            with torch.no_grad():
                begin = time.perf_counter()
                attends[OURS](*with32[:3])
                times.setdefault(("gtx float32", "forward"), []).append(time.perf_counter() - begin)
            begin = time.perf_counter()
            both_ways(attends[OURS], with32)
            times.setdefault(("gtx float32", "both"), []).append(time.perf_counter() - begin)
    middle = {key: median(values[1:]) for key, values in times.items()}
    return [
        {
            "workload": name,
            "peer": n,
            "forward": middle[(n, "forward")] / middle[(OURS, "forward")],
            "forward + backward": middle[(n, "both")] / middle[(OURS, "both")],
        }
        for n in dict.fromkeys(key[0] for key in middle)
        if n != OURS
    ]


def growth_mib(name: str, peer: str) -> float:
    """Peak resident growth over forward and backward, in a process of its own."""
    command = [sys.executable, __file__, "--grow", name, peer]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout.strip().splitlines()[-1])


def grow(name: str, peer: str) -> None:
    pattern, heads, dim, dtype = workload(name)
    tensors = inputs(pattern, heads, dim, dtype)
    attend = contender(peer, pattern)
    small = SparsePattern(torch.arange(3), torch.arange(2), 2)
    if peer == OURS:
        both_ways(contender(peer, small), inputs(small, heads, dim, dtype))
    pattern.transpose()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    both_ways(attend, tensors)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default="W1,W2,W2h,W3,W2 bf16,W5k")
    parser.add_argument("--peers", default="DGL,PyG,compiled,gather-scatter,gtx torch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--grow", nargs=2, help="a workload and a peer: print its growth in MiB and end")
    options = parser.parse_args()
    if options.grow:
        grow(*options.grow)
        return
    names = [OURS, *options.peers.split(",")]
    rows = []
    for name in options.workloads.split(","):
        rows += measure(name, names, options.repeats)
        print(pd.DataFrame(rows).round(2).to_string(), flush=True)
    table = pd.DataFrame(rows)
    main_four = table[table.workload.isin(["W1", "W2", "W2h", "W3"])].groupby("peer", sort=False)
    means = main_four[["forward", "forward + backward"]].agg(lambda s: geometric_mean(s)).reset_index()
    body = (
        "Time of a peer over the time of `sparse_attention` with backend `cpu`, two threads. W1: 169,343 nodes, 2.3 M "
        "edges by a power law, 8 heads of 16; W2: 100,000 nodes, 14 or 15 edges each; W2h: 40,000 nodes, 4 heads of "
        "64; W3: 50 hubs of 20,000 edges among 2 M; W5k: 5,000 nodes.\n\n"
        "Geometric mean over W1, W2, W2h and W3:\n\n"
        + means.round(2).to_markdown(index=False)
        + "\n\nEach:\n\n"
        + table.round(2).to_markdown(index=False)
    )
    if not options.no_memory:
        grown = [{"peer": n, "MiB": growth_mib("W1", n)} for n in names]
        body += "\n\nPeak resident growth on W1, forward and backward; one [N, H, d] is 83 MiB:\n\n"
        body += pd.DataFrame(grown).round(0).to_markdown(index=False)
    write("attention", "Sparse attention on the CPU beside others", body)


if __name__ == "__main__":
    main()
