"""The same graph transformer on one graph by gtx, by PyG and by DGL: seconds a step, bytes between hosts, test score.

Two ranks, each in a network namespace of its own with a core of its own, joined by veth (needs root and iproute2): what
crosses that link is what is counted, for everyone alike, with whatever their libraries add. PyG: `NeighborLoader` on
each rank, which holds the whole graph, and `DistributedDataParallel`. DGL: `DistGraph`, a server on each host with its
METIS part, and `DistributedDataParallel`. gtx: `batch.kind: neighbor` with the engine `torch`. All sum gradients over
gloo. PyG wants `torch_geometric` and `torch_sparse`; who cannot be imported is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import PLAIN, ROOT, SPACES, free_port, steps_done, steps_of, throttled_link, write
from torch import Tensor, nn

from gtx.config import load_config
from gtx.session import load_partitioned

LAYERS, WIDTH, HEADS, FANOUT, SEEDS, DROPOUT, LR, DECAY = 2, 64, 4, 10, 512, 0.2, 0.003, 0.01
LABELS = {"gtx data": "data", "gtx graph": "graph", "gtx auto": "auto"}
NEEDS = {"PyG": ("torch_geometric", "torch_sparse"), "DGL": ("dgl",)}
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def settings(options: argparse.Namespace) -> list[str]:
    """The job in gtx's words; the peers are given the same numbers."""
    sbm = f"data.options={{num_nodes: {options.nodes}, num_edges: {options.edges}, num_blocks: 16, feature_noise: 2.0}}"
    graph = (
        ["data.name=sbm", sbm] if options.root is None else [f"data.name={options.graph}", f"data.root={options.root}"]
    )
    model = [f"model.layers={LAYERS}", f"model.width={WIDTH}", f"model.heads={HEADS}", f"model.dropout={DROPOUT}"]
    batch = ["batch.kind=neighbor", f"batch.seeds={SEEDS}", "batch.micro_batches=2", f"sampling.fanout={FANOUT}"]
    engine = [f"engine.lr={LR}", f"engine.weight_decay={DECAY}", "engine.lr_schedule=constant", "engine.warmup_steps=0"]
    return [*graph, *model, *batch, *engine]


# The model, as the peers' users would write it ------------------------------------------------------------------------


class Layer(nn.Module):
    """gtx's GT layer around somebody else's attention over edges.

    attend: (sources `[n, C]`, number of destinations, which are the first of them, edges) -> `[n_dst, C]`.
    """

    def __init__(self, attend: nn.Module):
        super().__init__()
        self.attend = attend
        self.norm, self.norm_ffn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, num_dst: int, edges: Any) -> Tensor:
        attended = self.output(self.attend(self.norm(x), num_dst, edges))
        x = x[:num_dst] + F.dropout(attended, DROPOUT, self.training)
        hidden = F.dropout(F.gelu(self.expand(self.norm_ffn(x))), DROPOUT, self.training)
        return x + F.dropout(self.contract(hidden), DROPOUT, self.training)


class PyGAttention(nn.Module):
    """edges: `edge_index [2, E]`, source above destination."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import TransformerConv

        self.conv = TransformerConv(WIDTH, WIDTH // HEADS, heads=HEADS, root_weight=False)
        self.conv.lin_skip = nn.Identity()  # made, and not used, without root weight

    def forward(self, x: Tensor, num_dst: int, edges: Tensor) -> Tensor:
        out: Tensor = self.conv((x, x[:num_dst]), edges)
        return out


class DGLAttention(nn.Module):
    """edges: a DGL block or graph."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, num_dst: int, edges: Any) -> Tensor:
        import dgl

        shape = (-1, HEADS, WIDTH // HEADS)
        key, value = (half.reshape(shape) for half in self.key_value(x).chunk(2, dim=1))
        query = self.query(x[:num_dst]).view(shape) * shape[2] ** -0.5
        weights = dgl.ops.edge_softmax(edges, dgl.ops.u_dot_v(edges, key, query))
        out: Tensor = dgl.ops.u_mul_e_sum(edges, value, weights)
        return out.flatten(1)


class Model(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], num_features: int, num_classes: int):
        super().__init__()
        self.encoder = nn.Linear(num_features, WIDTH)
        self.layers = nn.ModuleList(Layer(attention()) for _ in range(LAYERS))
        self.classifier = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_classes))

    def forward(self, x: Tensor, hops: Sequence[tuple[int, Any]]) -> Tensor:
        """hops: for each layer the number of its destinations and its edges."""
        x = self.encoder(x)
        for layer, (num_dst, edges) in zip(self.layers, hops, strict=True):
            x = layer(x, num_dst, edges)
        out: Tensor = self.classifier(x)
        return out


# What a rank of a peer does -------------------------------------------------------------------------------------------

Step = tuple[Tensor, list[tuple[int, Any]], Tensor]  # features, hops, labels of the seeds


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def pyg_steps(graph: dict[str, Tensor], rank: int) -> Iterator[Step]:
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    data = Data(x=graph["x"], edge_index=torch.stack([graph["src"], graph["dst"]]), y=graph["y"])
    seeds = graph["train"][rank::2]
    size = min(SEEDS, len(seeds))
    loader = NeighborLoader(
        data, num_neighbors=[FANOUT] * LAYERS, batch_size=size, input_nodes=seeds, shuffle=True, drop_last=True
    )
    for batch in endless(loader):
        # Nodes and edges come hop by hop: what a layer does not need is cut off, as with pyg-lib's `trim_to_layer`.
        dst, hops, num_dst = batch.edge_index[1], [], batch.batch_size
        for _ in range(LAYERS):
            edges = batch.edge_index[:, : int((dst < num_dst).sum())]
            hops.append((num_dst, edges))
            num_dst = max(num_dst, int(edges[0].max()) + 1)
        yield batch.x[:num_dst], hops[::-1], batch.y[: batch.batch_size]


def dgl_steps(folder: Path, rank: int) -> Iterator[Step]:
    import dgl

    graph = dgl.distributed.DistGraph("peer", part_config=str(folder / "parts" / "peer.json"))
    book = graph.get_partition_book()
    seeds = dgl.distributed.node_split(graph.ndata["train"], book, force_even=True)
    sampler = dgl.dataloading.NeighborSampler([FANOUT] * LAYERS)
    size = min(SEEDS, len(seeds))
    loader = dgl.dataloading.DistNodeDataLoader(graph, seeds, sampler, batch_size=size, shuffle=True, drop_last=True)
    for inputs, outputs, blocks in endless(loader):
        yield graph.ndata["x"][inputs], [(b.num_dst_nodes(), b) for b in blocks], graph.ndata["y"][outputs].long()


def work(peer: str, folder: Path, num_steps: int) -> None:
    """One rank of a peer: train, write what each step took as gtx's records do, and the first rank the score."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    graph = {key: torch.from_numpy(value) for key, value in np.load(folder / "graph.npz").items()}
    if peer == "DGL":
        import dgl

        dgl.distributed.initialize(str(folder / "hosts.txt"))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    attention = PyGAttention if peer == "PyG" else DGLAttention
    model = Model(attention, graph["x"].shape[1], int(graph["y"].max()) + 1)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    steps = pyg_steps(graph, rank) if peer == "PyG" else dgl_steps(folder, rank)
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    with (run_dir / f"records-{rank}.jsonl").open("w") as records, (run_dir / f"metrics-{rank}.csv").open("w") as done:
        done.write("step\n")
        for step in range(num_steps):
            begin = time.perf_counter()
            x, hops, labels = next(steps)
            loss = F.cross_entropy(parallel(x, hops), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            records.write(json.dumps({"step": step, "wall_s": time.perf_counter() - begin, "phases": {}}) + "\n")
            done.write(f"{step}\n")
            done.flush()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            nodes, edges = len(graph["x"]), torch.stack([graph["src"], graph["dst"]])
            everything: Any = edges
            if peer == "DGL":
                everything = dgl.graph((graph["src"], graph["dst"]), num_nodes=nodes)
            logits = model(graph["x"], [(nodes, everything)] * LAYERS)[graph["test"]]
        accuracy = 100.0 * float((logits.argmax(1) == graph["y"][graph["test"]]).float().mean())
        (run_dir / "score.txt").write_text(str(accuracy))
    dist.barrier()
    if peer == "DGL":
        dgl.distributed.exit_client()


def serve() -> None:
    import dgl

    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])


# Both hosts -----------------------------------------------------------------------------------------------------------


def on_both_hosts(command: Sequence[str], folder: Path, server: Sequence[str] = ()) -> list[subprocess.Popen[bytes]]:
    """Start a command as rank 0 and 1, each in its namespace and on its core; a server beside it where there is one."""
    port = free_port()
    started = []
    for rank, space in enumerate(SPACES):
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": f"veth{rank}"}
        words = list(command)
        if server:  # shared memory of its own, as hosts have it
            env |= {
                "DGL_DIST_MODE": "distributed",
                "DGL_NUM_SERVER": "1",
                "DGL_NUM_CLIENT": "2",
                "DGL_NUM_SAMPLER": "0",
            }
            env |= {"DGL_SERVER_ID": str(rank), "DGL_IP_CONFIG": str(folder / "hosts.txt")}
            env |= {"DGL_CONF_PATH": str(folder / "parts" / "peer.json"), "OMP_NUM_THREADS": "1"}
            script = (
                'mount -t tmpfs tmpfs /dev/shm || exit 1; DGL_ROLE=server "$0" "$1" --serve & server=$!; '
                '"$0" "$@"; status=$?; [ $status = 0 ] || kill $server; wait; exit $status'
            )
            words = ["unshare", "-m", "sh", "-c", script, *command]
        pinned = ["ip", "netns", "exec", space, "taskset", "-c", str(rank), *words]
        with (folder / f"rank-{rank}.log").open("wb") as out:
            started.append(subprocess.Popen(pinned, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT))
    return started


def crossed_bytes() -> int:
    """Bytes that have left either host so far."""
    counters = [f"/sys/class/net/veth{rank}/statistics/tx_bytes" for rank in (0, 1)]
    return sum(
        int(subprocess.run(["ip", "netns", "exec", space, "cat", counter], capture_output=True, check=True).stdout)
        for space, counter in zip(SPACES, counters, strict=True)
    )


def watch(ranks: list[subprocess.Popen[bytes]], metrics: Path, first: int, last: int, folder: Path) -> float:
    """Wait for the ranks; the bytes that crossed in each step from `first` to about `last`."""
    seen: list[tuple[int, int]] = []
    while any(rank.poll() is None for rank in ranks):
        time.sleep(0.02)
        done = steps_done(metrics)
        if first <= done <= last and (not seen or done > seen[-1][0]):
            seen.append((done, crossed_bytes()))
        if any(rank.poll() for rank in ranks):
            time.sleep(5)
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join((folder / f"rank-{rank}.log").read_text()[-3000:] for rank in (0, 1)))
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def run(label: str, options: argparse.Namespace, shared: Path) -> dict[str, object]:
    """One contender, once. shared: a folder that holds `graph.npz`, the cut and DGL's parts."""
    folder = Path(tempfile.mkdtemp(prefix="gtx-peer-", dir=shared))
    first, last = options.steps // 2, options.steps - 2
    if label in LABELS:
        command = [sys.executable, str(ROOT / "launch.py"), "train", str(ROOT / "configs/digits_gt.yaml"), *PLAIN]
        command += [*settings(options), f"plan.mode={LABELS[label]}", f"partition.cache={shared}/cut"]
        command += [f"train.steps={options.steps}", f"train.eval_every={options.steps}", f"--run-dir={folder}/run"]
        per_step = watch(on_both_hosts(command, folder), folder / "run" / "metrics.csv", first, last, folder)
        seconds = steps_of(folder / "run")
        score = float(pd.read_csv(folder / "run" / "metrics.csv")["test_score"].dropna().iloc[-1])
    else:
        for name in ("graph.npz", "hosts.txt", "parts"):
            (folder / name).symlink_to(shared / name)
        worker = [sys.executable, str(Path(__file__).resolve())]
        command = [*worker, "--worker", label, "--folder", str(folder), "--steps", str(options.steps)]
        ranks = on_both_hosts(command, folder, worker if label == "DGL" else ())
        per_step = watch(ranks, folder / "run" / "metrics-0.csv", first, last, folder)
        rows = [
            json.loads(line) for r in (0, 1) for line in (folder / f"run/records-{r}.jsonl").read_text().splitlines()
        ]
        seconds = pd.DataFrame(rows).groupby("step").wall_s.max()
        score = float((folder / "run" / "score.txt").read_text())
    shutil.rmtree(folder)
    return {"": label, "step, s": float(seconds[first:].median()), "MiB a step": per_step / 2**20, "test, %": score}


def prepare(options: argparse.Namespace, shared: Path) -> str:
    """Write the graph for the peers, in the order of gtx's partitions, and cut it for DGL. Returns what it is."""
    config = load_config(ROOT / "configs/digits_gt.yaml", [*settings(options), f"partition.cache={shared}/cut"])
    graph = load_partitioned(config).partitioned.graph
    indptr = np.asarray(graph.indptr)
    arrays = {
        "src": np.asarray(graph.indices, dtype=np.int64),
        "dst": np.repeat(np.arange(graph.num_nodes), np.diff(indptr)),
        "x": np.asarray(graph.features),
        "y": np.asarray(graph.labels),
        "train": np.flatnonzero(graph.train_mask),
        "test": np.flatnonzero(graph.test_mask),
    }
    np.savez(shared / "graph.npz", **arrays)  # type: ignore[arg-type]
    (shared / "hosts.txt").write_text("".join(f"{address} {30050 + i}\n" for i, address in enumerate(ADDRESSES)))
    if "DGL" in options.contenders.split(","):
        import dgl

        whole = dgl.graph((torch.from_numpy(arrays["src"]), torch.from_numpy(arrays["dst"])), num_nodes=graph.num_nodes)
        whole.ndata["x"], whole.ndata["y"] = torch.from_numpy(arrays["x"].copy()), torch.from_numpy(arrays["y"].copy())
        whole.ndata["train"] = torch.from_numpy(np.asarray(graph.train_mask).copy())
        dgl.distributed.partition_graph(whole, "peer", 2, str(shared / "parts"), part_method="metis")
    return f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {graph.num_features} features"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contenders", default="gtx data,gtx graph,gtx auto,PyG,DGL")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--root", type=Path, help="folder of the .npz graphs, for --graph instead of a generated one")
    parser.add_argument("--graph", default="amazon_computers")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.worker:
        work(options.worker, options.folder, options.steps)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    labels, missing = [], []
    for label in options.contenders.split(","):
        absent = [name for name in NEEDS.get(label, ()) if importlib.util.find_spec(name) is None]
        (missing if absent else labels).append(f"{label} (no {absent[0]})" if absent else label)
    shared = Path(tempfile.mkdtemp(prefix="gtx-benchmark-"))
    what = prepare(options, shared)
    rows = []
    with throttled_link() as _:
        for _ in range(options.repeats):
            for label in labels:
                rows.append(run(label, options, shared))
                print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)
    shutil.rmtree(shared)
    every = pd.DataFrame(rows)
    table = every.groupby("", sort=False).median().reset_index()
    ours = median(every.loc[every[""] == labels[0], "step, s"])
    table.insert(2, f"over {labels[0]}", table["step, s"] / ours)
    spread = every.groupby("", sort=False)["step, s"].agg(lambda s: f"{s.min():.3f} to {s.max():.3f}")
    table.insert(3, "lowest to highest, s", list(spread))
    left_out = f" Left out: {', '.join(missing)}." if missing else ""
    write(
        "peers",
        "The same graph transformer in gtx, PyG and DGL",
        f"{what}. GT of {LAYERS} layers, width {WIDTH}, {HEADS} heads, fan-out {FANOUT}, {SEEDS} seeds a rank, AdamW, "
        f"float32; two hosts (namespaces joined by veth) of one core each. Step: median over the second half of "
        f"{options.steps} steps, of the slower rank; medians of {options.repeats} runs. MiB: all that crossed the "
        f"link, with gradients. Test: over all in-edges, after the last step. PyG keeps the whole graph on every host, "
        f"gtx and DGL divide it.{left_out}\n\n" + table.round(3).to_markdown(index=False),
    )


if __name__ == "__main__":
    main()
