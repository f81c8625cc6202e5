"""The Triton kernels on a GPU beside torch operators, DGL, PyG and gather-scatter: right first, then time and memory.

No speed is printed unless every output and gradient of odd shapes and of each workload is within the error budget.
Then contenders take turns in one process; a ratio is of medians. The first calls, which compile and pick tiles, do not
count. The workloads are those of `attention.py`; a run takes a few minutes.

`TRITON_INTERPRET=1 python benchmarks/triton_attention.py --device cpu` runs all of it on Triton's interpreter with a
handful of nodes, which says nothing about speed and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from statistics import geometric_mean, median

import pandas as pd
import torch
from attention import Attend, both_ways, gather_scatter, inputs, with_dgl, with_pyg, workload
from common import RESULTS, write
from torch import Tensor

from sparse_engine import SparsePattern, resolve_backend, sparse_attention
from sparse_engine.triton_backend import PIECE

OURS, FIXED = "gtx triton", "gtx triton, first tile"
PEERS = ("gtx torch", "gather-scatter", "compiled", "PyG", "DGL")
MAIN = ("W1", "W2", "W2h", "W3")


# Right first ----------------------------------------------------------------------------------------------------------


def odd_pattern(device: torch.device) -> SparsePattern:
    """Row 0 and column 0 have edges for several pieces; every fifth of 40 rows has none, the others a few."""
    long = 2 * PIECE + 77
    others = torch.tensor([row for row in range(1, 40) if row % 5])
    dst = torch.cat([torch.zeros(long, dtype=torch.int64), others[torch.arange(long) % len(others)], others])
    src = torch.cat([torch.arange(long) % 31, torch.zeros(long, dtype=torch.int64), others % 31])
    return SparsePattern.from_edges(dst, src, 40, 31).to(device)


def check(what: str, pattern: SparsePattern, tensors: list[Tensor], bias: Tensor | None = None) -> dict[str, object]:
    """The largest share that ours takes of its error budget: twice, for gradients three times, the plain error."""

    def attend(backend: str, dtype: torch.dtype) -> Attend:
        cast = None if bias is None else bias.to(tensors[0].dtype).to(dtype)
        return lambda q, k, v: sparse_attention(q, k, v, pattern, edge_bias=cast, backend=backend)

    found = both_ways(attend("triton", tensors[0].dtype), tensors)
    exact = both_ways(attend("torch", torch.float64), [t.double() for t in tensors])
    plain = both_ways(gather_scatter(pattern) if bias is None else biased(pattern, bias), tensors)
    worst = 0.0
    for budget, our, usual, true in zip((2, 3, 3, 3), found, plain, exact, strict=True):
        floor = torch.finfo(our.dtype).eps * float(true.norm())  # where the yardstick happens to be exact
        allowed = budget * float((usual.double() - true).norm()) + floor
        error = float((our.double() - true).norm())
        if not error <= allowed:
            raise RuntimeError(f"{what}: the error is {error}, {allowed} is allowed; nothing was timed")
        worst = max(worst, error / allowed if allowed else 0.0)
    return {"case": what, "share of the error budget": worst}


def biased(pattern: SparsePattern, bias: Tensor) -> Attend:
    """Gather-scatter with a bias of edges and heads, in the dtype of q."""
    row, col = pattern.row_index, pattern.indices

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (q[row] * k[col]).sum(-1) * q.shape[-1] ** -0.5 + bias.to(q.dtype)
        index = row[:, None].expand_as(logits)
        peak = logits.new_full((pattern.num_rows, q.shape[1]), -torch.inf)
        weights = torch.exp(logits - peak.scatter_reduce(0, index, logits.detach(), "amax")[row])
        probs = weights / torch.zeros_like(peak).index_add(0, row, weights)[row]
        return torch.zeros_like(q).index_add(0, row, probs[:, :, None] * v[col])

    return attend


def gate(device: torch.device, shapes: list[tuple[int, int]]) -> list[dict[str, object]]:
    pattern = odd_pattern(device)
    rows = []
    for heads, dim in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensors = [t.to(device) for t in inputs(pattern, heads, dim, dtype)]
            name = f"{heads} x {dim} {str(dtype).removeprefix('torch.')}"
            rows.append(check(name, pattern, tensors))
            bias = torch.randn(pattern.num_edges, heads, generator=torch.Generator().manual_seed(3)).to(device)
            rows.append(check(f"{name} bias", pattern, tensors, bias))
    return rows


# Then time ------------------------------------------------------------------------------------------------------------


def contender(name: str, pattern: SparsePattern) -> Attend:
    if name == "gather-scatter":
        return gather_scatter(pattern)
    if name == "compiled":
        compiled: Attend = torch.compile(gather_scatter(pattern), dynamic=False)
        return compiled
    if name == "PyG":
        return with_pyg(pattern)
    if name == "DGL":
        return with_dgl(pattern)
    backend = "torch" if name == "gtx torch" else "triton"
    return lambda q, k, v: sparse_attention(q, k, v, pattern, backend=backend)


def available(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a peer can be measured: PyG where it is installed, DGL where its build knows the GPU."""
    if name == "PyG":
        return importlib.util.find_spec("torch_geometric") is not None
    if name == "DGL":
        if importlib.util.find_spec("dgl") is None or dtype != torch.float32:
            return False
        try:
            import dgl

            dgl.graph(([0], [0]), device=device)
        except Exception as error:  # a build for another torch or without CUDA fails in its own ways
            print(f"DGL is not measured: {str(error).splitlines()[0]}")
            return False
    return True


def timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds, and bytes of the GPU's memory at their highest beyond what was held before."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    begin = time.perf_counter()
    run()
    if gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    return seconds, float(torch.cuda.max_memory_allocated(device) - held) if gpu else 0.0


def measure(
    name: str, pattern: SparsePattern, tensors: list[Tensor], peers: list[str], repeats: int
) -> list[dict[str, object]]:
    """A line for each contender: seconds and peak memory, and both over ours."""
    device = pattern.device
    names = [OURS, FIXED, *(peer for peer in peers if available(peer, device, tensors[0].dtype))]
    attends = {n: contender(n, pattern) for n in names}
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def forward(attend: Attend) -> None:
        with torch.no_grad():
            attend(*tensors[:3])

    for _ in range(repeats + 1):
        for n in [n for n in names if n in attends]:
            torch.use_deterministic_algorithms(n == FIXED)
            try:
                taken.setdefault((n, "forward"), []).append(timed(lambda n=n: forward(attends[n]), device))
                taken.setdefault((n, "both"), []).append(timed(lambda n=n: both_ways(attends[n], tensors), device))
            except torch.OutOfMemoryError:
                print(f"{n} on {name} is out of memory")
                del attends[n]
            finally:
                torch.use_deterministic_algorithms(False)
    rows: list[dict[str, object]] = []
    gathered = 2 * pattern.num_edges * tensors[0][0].numel() * tensors[0].element_size()  # K and V rows
    first: dict[str, float] = {}
    for n in attends:
        seconds = {what: median(s for s, _ in taken[(n, what)][1:]) for what in ("forward", "both")}
        peak = median(m for _, m in taken[(n, "both")][1:])
        first = first or {**seconds, "peak": max(peak, 1.0)}
        rows.append(
            {
                "workload": name,
                "contender": n,
                "forward ms": 1e3 * seconds["forward"],
                "forward + backward ms": 1e3 * seconds["both"],
                "gathered GB/s forward": gathered / seconds["forward"] / 1e9,
                "peak MiB": peak / 2**20,
                "forward": seconds["forward"] / first["forward"],
                "forward + backward": seconds["both"] / first["both"],
                "peak": peak / first["peak"],
            }
        )
    return rows


def tiny(name: str) -> tuple[SparsePattern, int, int, torch.dtype]:
    """A workload's heads, head dim and dtype on a dozen nodes, for the interpreter."""
    heads, dim = (4, 64) if name == "W2h" else (8, 16)
    dst = torch.arange(60) % 12
    pattern = SparsePattern.from_edges(dst, torch.arange(60) * 7 % 12, 12, 12)
    return pattern, heads, dim, torch.bfloat16 if "bf16" in name else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a smoke test on Triton's interpreter")
    parser.add_argument("--workloads", default="W1,W2,W2h,W3,W2 bf16,W5k")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    try:
        resolve_backend("triton", device, torch.float32)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    checked = gate(device, [(1, 1), (5, 3), (1, 17), (5, 17), (8, 16), (4, 64), (2, 256)] if gpu else [(5, 3)])
    made: dict[str, tuple[SparsePattern, list[Tensor]]] = {}
    for name in options.workloads.split(","):
        pattern, heads, dim, dtype = workload(name) if gpu else tiny(name)
        made[name] = pattern.to(device), [t.to(device) for t in inputs(pattern, heads, dim, dtype)]
        checked.append(check(name, *made[name]))
    print(pd.DataFrame(checked).round(2).to_string(), flush=True)
    rows: list[dict[str, object]] = []
    for name, (pattern, tensors) in made.items():
        found = measure(name, pattern, tensors, options.peers.split(","), options.repeats)
        print(pd.DataFrame(found).round(2).to_string(), flush=True)
        rows += found
    if not gpu:
        print("an interpreter's times mean nothing; nothing is written")
        return
    table = pd.DataFrame(rows)
    table.to_csv(RESULTS / "triton_attention.csv", index=False)
    of_four = table[table.workload.isin(MAIN) & (table.contender != OURS)].groupby("contender", sort=False)
    means = of_four[["forward", "forward + backward", "peak"]].agg(lambda s: geometric_mean(s)).reset_index()
    worst = max(float(str(row["share of the error budget"])) for row in checked)
    write(
        "triton_attention",
        "Sparse attention by Triton on a GPU beside others",
        f"On one {torch.cuda.get_device_name(device)}, torch {torch.__version__}. `forward`, `forward + backward` and "
        "`peak` (memory beyond what is held before) are over those of `gtx triton`; the workloads are those of "
        "`attention.md`. `first tile` is what runs under torch.use_deterministic_algorithms.\n\n"
        f"All {len(checked)} checks of the output and of every gradient passed; the worst took {worst:.0%} of its "
        "error budget.\n\nGeometric mean over the workloads W1, W2, W2h and W3 that a contender ran:\n\n"
        + means.round(2).to_markdown(index=False)
        + "\n\nEach:\n\n"
        + table.round(2).to_markdown(index=False),
    )


if __name__ == "__main__":
    main()
