"""The graphs one can ask for by name: one's own tables, scikit-learn's digits, two generators, packed real graphs.

What a graph is and how it is checked is in `graphs.py`, sets of DGL, PyG and OGB in `libraries.py`. Nothing here
downloads: the real graphs are read from a folder.

Every draw comes from a Philox stream keyed by (seed, purpose), so that a graph is the same on every rank and its split
can change without the graph changing.

Legend: `N` nodes, `E` stored edges (an undirected edge counts twice), `F` features, `C` classes.
"""

from __future__ import annotations

import dataclasses
import logging
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from gtx.graphs import (
    UNLABELLED,
    Graph,
    Int64Array,
    Metric,
    SelfLoopPolicy,
    SplitOrigin,
    from_edges,
    with_distinct_edges,
    with_self_loops,
    with_standardized_edge_features,
    with_standardized_features,
    with_undirected,
)
from gtx.libraries import LIBRARIES, load_set
from gtx.splits import split_generator, stratified_split

logger = logging.getLogger(__name__)

_TOP_UP_ROUNDS = 32
_RMAT_CHUNK = 1 << 18  # edges drawn at a time, so that the bits of a chunk stay in cache
_STREAMS = ("split of `splits.py`", "blocks", "degrees", "edges", "centroids", "features", "ids", "latent")


def load_graph(
    name: str,
    *,
    root: str | Path | None,
    seed: int,
    split: int = 0,
    undirected: bool,
    self_loops: str,
    options: Mapping[str, object],
    nodes: str | Path | None = None,
    edges: str | Path | None = None,
    dedupe: bool = False,
    standardize: bool = False,
    edge_bias: bool = False,
) -> Graph:
    """The graph called `name`, read or generated.

    Args:
        name: one of `graph_names()`, an alias of it, or a library's set, see `libraries.load_set`.
        root: folder of the packed real graphs or of a library's; generated graphs do not look at it.
        seed: of everything that is drawn here. Graphs with a split of their own draw nothing.
        split: which split: 0 for Planetoid's, 0..9 for the other real graphs; generated graphs and tables without a
            split draw any number of them.
        undirected: whether to add the reverse of each edge that lacks it (before self loops).
        self_loops: `keep`, `add` or `remove`, see `graphs.with_self_loops`.
        options: of this graph, see the builder's docstring; a value left out takes its default.
        nodes, edges: the files of `table`.
        dedupe: whether to keep only the first of edges with the same ends (before `undirected`).
        standardize: whether features get mean 0 and deviation 1 over the training nodes.
        edge_bias: whether edge features are standardized for the attention (before self loops, so that an added one is
            as any edge).

    Raises:
        ValueError: for an unknown name, option or split, or a file that is missing or damaged.
    """
    canonical = _ALIASES.get(name, name)
    library = name.partition(":")[0] if ":" in name else ""
    if canonical not in _SOURCES and library not in LIBRARIES:
        raise ValueError(
            f"data.name is {name!r}, which is no known graph; choose one of {', '.join(graph_names())}, or a library's "
            "set as dgl:CLASS, pyg:CLASS/NAME or ogb:NAME"
        )
    if seed < 0 or split < 0:
        raise ValueError(f"seed is {seed} and data.split is {split}; neither can be negative")
    source = _SOURCES.get(canonical) or _Source(_of_library, _LIBRARY_OPTIONS)
    taken = _take_options(canonical, source.options, options)
    files = [None if file is None else Path(file) for file in (root, nodes, edges)]
    graph = source.build(_Request(canonical, seed, split, taken, *files))
    if dedupe:
        graph = with_distinct_edges(graph)
    if undirected:
        graph = with_undirected(graph)
    if edge_bias:
        graph = with_standardized_edge_features(graph)
    graph = with_self_loops(graph, cast(SelfLoopPolicy, self_loops))
    return with_standardized_features(graph) if standardize else graph


def graph_names() -> tuple[str, ...]:
    """The names `load_graph` knows, without aliases."""
    return tuple(_SOURCES)


# ---------------------------------------------------------------------------------------------------------------------
# Options


@dataclass(frozen=True)
class _Option:
    """One option: `default` None means that the builder works the value out; bounds are inclusive.

    kind: list is a list of texts. choices: of a text; any but the empty one if there are none.
    """

    kind: type[int] | type[float] | type[str] | type[list[str]]
    default: int | float | str | tuple[str, ...] | None
    low: float = -np.inf
    high: float = np.inf
    choices: tuple[str, ...] = ()

    def take(self, where: str, value: object) -> int | float | str | tuple[str, ...]:
        """`value` as `kind`; 1e6 is accepted for an integer, since YAML has no other short way to write it."""
        if self.kind is list:
            if not isinstance(value, list | tuple) or not all(isinstance(word, str) and word for word in value):
                raise ValueError(f"{where} is {value!r}; expected a list of names, such as [age, height]")
            return tuple(value)
        if self.kind is str:
            if self.choices and value not in self.choices:
                raise ValueError(f"{where} is {value!r}; choose one of {', '.join(self.choices)}")
            if not isinstance(value, str) or not value:
                raise ValueError(f"{where} is {value!r}; expected a text")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise ValueError(f"{where} is {value!r}; expected a number of type {self.kind.__name__}")
        if self.kind is int and (not np.isfinite(value) or value != int(value)):
            raise ValueError(f"{where} is {value!r}; expected a whole number")
        if not self.low <= value <= self.high:
            raise ValueError(f"{where} is {value!r}; it must lie in {self.low}..{self.high}")
        return int(value) if self.kind is int else float(value)


@dataclass(frozen=True)
class _Request:
    """What a builder is given; `options` holds every option of its graph, checked."""

    name: str
    seed: int
    split: int
    options: Mapping[str, Any]
    root: Path | None
    nodes: Path | None
    edges: Path | None

    @property
    def drawn(self) -> SplitOrigin:
        """Of a split that is drawn for this request."""
        return SplitOrigin("random", self.split, self.seed)

    def generator(self, purpose: str, *more: int) -> np.random.Generator:
        stream = np.random.SeedSequence([self.seed, _STREAMS.index(purpose), *more])
        return np.random.Generator(np.random.Philox(stream))


@dataclass(frozen=True)
class _Source:
    build: Callable[[_Request], Graph]
    options: Mapping[str, _Option]


def _take_options(name: str, known: Mapping[str, _Option], given: Mapping[str, object]) -> dict[str, Any]:
    for key in given:
        if key not in known:
            raise ValueError(
                f"data.options.{key} is no option of {name!r}; it has {', '.join(sorted(known)) or 'none'}"
            )
    return {
        key: option.take(f"data.options.{key}", given[key]) if given.get(key) is not None else option.default
        for key, option in known.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def _table(request: _Request) -> Graph:
    """One's own graph: a table of nodes and one of edges, see `frames.graph_of_tables`.

    Options: the names of the columns `id`, `label`, `split`, `src` and `dst`; `features`, a list of the columns that
    are (all other columns of numbers); `ignore`, a list of columns to pass over; `separator` of text files (a comma for
    .csv, a tab for .tsv); `metric` (`accuracy`, or `roc_auc` for two classes).
    """
    from gtx.frames import Columns, graph_of_tables  # pandas takes a while
    from gtx.tables import read_table

    if request.nodes is None or request.edges is None:
        raise ValueError("data.name table needs data.nodes and data.edges; give a .csv, .tsv or .parquet file each")
    given = dict(request.options)
    metric, separator = given.pop("metric"), given.pop("separator")
    if separator is not None and len(separator) != 1:
        raise ValueError(f"data.options.separator is {separator!r}; expected one character")
    columns = Columns(**given)
    return graph_of_tables(
        read_table(request.nodes, text=(columns.id, columns.label, columns.split), separator=separator),
        read_table(request.edges, text=(columns.src, columns.dst), separator=separator),
        name=str(request.nodes),
        columns=columns,
        metric=metric,
        seed=request.seed,
        split=request.split,
    )


def _dgl_partition(request: _Request) -> Graph:
    """What `dgl.distributed.partition_graph` wrote into `data.root`, see `partition_folders.py`.

    Options: `features` (`feat`) and `label` (`label`), keys of ndata; `edge_features`, a key of edata; `original_id`,
    the key of ndata or the file that holds the original number of each node; `metric`.
    """
    from gtx.partition_folders import read_partition_folder

    if request.root is None:
        raise ValueError(
            "data.name dgl-partition needs data.root; set it to the folder that dgl.distributed.partition_graph wrote"
        )
    return read_partition_folder(request.root, seed=request.seed, split=request.split, **request.options)


def _of_library(request: _Request) -> Graph:
    """A set that DGL, PyG or OGB loads, see `libraries.py`. Options: `metric`, if not the usual one; `normalize`."""
    graph = load_set(
        request.name,
        root=request.root,
        seed=request.seed,
        split=request.split,
        metric=cast(Metric | None, request.options["metric"]),
    )
    if request.options["normalize"] == "row":
        graph = dataclasses.replace(graph, features=_row_normalized(graph.features))
    if graph.split is None or graph.split.kind == "given":  # by the library, with the set
        graph = dataclasses.replace(graph, split=SplitOrigin("public", request.split))
    return graph


# ---------------------------------------------------------------------------------------------------------------------
# Generated graphs


def _digits(request: _Request) -> Graph:
    """1,797 handwritten digits of 8 x 8 pixels, each with in-edges from its nearest images.

    Options: `neighbors` (8), in-edges per node. Distances are exact integers and ties go to the smaller id, so the
    graph does not depend on the machine. Pixels are scaled from 0..16 to 0..1.
    """
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    num_nodes, neighbors = len(pixels), request.options["neighbors"]
    squares = np.square(pixels).sum(axis=1)  # whole numbers below 2**53, hence exact in float64
    distances = (squares[:, None] + squares[None, :] - 2 * pixels @ pixels.T).astype(np.int64)  # [N, N]
    order = distances * num_nodes + np.arange(num_nodes)  # unique within a row: by distance, then by id
    np.fill_diagonal(order, np.iinfo(np.int64).max)
    nearest = np.argpartition(order, neighbors - 1, axis=1)[:, :neighbors]  # [N, neighbors]
    labels = digits.astype(np.int64)
    return from_edges(
        request.name,
        nearest.ravel(),
        np.repeat(np.arange(num_nodes), neighbors),
        num_nodes,
        (pixels / 16.0).astype(np.float32),
        labels,
        *stratified_split(labels, split_generator(request.seed, request.split)),
        split=request.drawn,
    )


def _sbm(request: _Request) -> Graph:
    """A degree-corrected stochastic block model (Karrer & Newman 2011), undirected, without duplicates or self loops.

    Blocks are of equal size and are the classes. Each undirected edge is inside a block or between two with the asked
    share; its ends are drawn in proportion to node weights of a power law. A node's features are its class's random
    unit vector plus noise, so that one node says little and its neighbourhood says more.

    Options: `num_nodes` (10,000), `num_edges` (200,000 stored edges, both directions counted), `num_blocks` (10),
    `homophily` (0.8, share of edges inside a block), `degree_exponent` (2.5; `.inf` gives equal weights),
    `num_features` (32), `feature_noise` (1.0, standard deviation per feature).
    """
    options = request.options
    num_nodes: int = options["num_nodes"]
    num_blocks: int = options["num_blocks"]
    if num_blocks > num_nodes:
        raise ValueError(f"data.options.num_blocks is {num_blocks}, more than num_nodes {num_nodes}; lower it")
    generator = request.generator("blocks")
    labels = generator.permutation(np.arange(num_nodes, dtype=np.int64) % num_blocks)
    sizes = np.bincount(labels, minlength=num_blocks)
    num_pairs = options["num_edges"] // 2
    num_inside = round(num_pairs * options["homophily"])
    room_inside = int((sizes * (sizes - 1) // 2).sum())
    room_between = num_nodes * (num_nodes - 1) // 2 - room_inside
    for what, wanted, room in (
        ("inside blocks", num_inside, room_inside),
        ("between blocks", num_pairs - num_inside, room_between),
    ):
        if wanted > room:
            raise ValueError(
                f"data.options.num_edges {options['num_edges']} at homophily {options['homophily']} asks for {wanted} "
                f"undirected edges {what}, but only {room} are possible; lower num_edges or change homophily"
            )

    # Positions are nodes in block order, so that a block is a range of the cumulated weights.
    node_at = np.argsort(labels, kind="stable")
    block_at = labels[node_at]
    weights = _power_law_weights(request, num_nodes, num_pairs)[node_at]
    cumulated = np.concatenate([[0.0], np.cumsum(weights)])
    block_ends = np.cumsum(sizes)
    low, high = cumulated[block_ends - sizes], cumulated[block_ends]
    total = float(cumulated[-1])
    generator = request.generator("edges")

    def draw(count: int, inside: bool) -> Int64Array:
        first = _position(cumulated, np.sort(generator.random(count)) * total)  # looking up in order is 4x faster
        block = block_at[first]
        width = high[block] - low[block]
        if inside:
            point = low[block] + generator.random(count) * width
        else:
            point = generator.random(count) * (total - width)
            point += np.where(point >= low[block], width, 0.0)  # step over the block
        second = _position(cumulated, point)
        valid = (first != second) & ((block_at[second] == block) == inside)  # rounding may cross a block's border
        one, other = node_at[first[valid]], node_at[second[valid]]
        keys: Int64Array = np.minimum(one, other) * num_nodes + np.maximum(one, other)
        return keys

    inside_keys = _distinct_draws(request.name, "pairs inside blocks", num_inside, lambda n: draw(n, True))
    between_keys = _distinct_draws(
        request.name, "pairs between blocks", num_pairs - num_inside, lambda n: draw(n, False)
    )
    one, other = np.divmod(np.concatenate([inside_keys, between_keys]), num_nodes)
    return from_edges(
        request.name,
        np.concatenate([one, other]),
        np.concatenate([other, one]),
        num_nodes,
        _class_features(request, labels, num_blocks),
        labels,
        *stratified_split(labels, split_generator(request.seed, request.split)),
        split=request.drawn,
        num_classes=num_blocks,
    )


def _rmat(request: _Request) -> Graph:
    """A recursive-matrix graph (Chakrabarti et al. 2004): power-law degrees with hubs, directed, no duplicates.

    Each edge falls into a quadrant of the adjacency matrix with probabilities a, b, c and 1-a-b-c, then into a quadrant
    of that, and so on; ids are scrambled, so that hubs lie anywhere. Each node has a random latent class that its
    features hint at; its label is the most frequent latent class among itself and its neighbours of both directions
    (ties: its own first), which one aggregation over the undirected graph can find and one node alone cannot.

    Options: `scale` (12, giving 2**scale nodes) or `num_nodes`; `num_edges` (16 per node, in small graphs an eighth of
    what is possible; directed edges, so `undirected` gives up to twice as many), `a` (0.57), `b` (0.19), `c` (0.19),
    `num_classes` (8), `num_features` (32), `feature_noise` (1.0).
    """
    options = request.options
    if options["scale"] is not None and options["num_nodes"] is not None:
        raise ValueError("data.options has both scale and num_nodes; give one")
    num_nodes: int = options["num_nodes"] or 1 << (12 if options["scale"] is None else options["scale"])
    room = num_nodes * (num_nodes - 1)
    num_edges: int = min(16 * num_nodes, room // 8) if options["num_edges"] is None else options["num_edges"]
    if num_edges > room:
        raise ValueError(f"data.options.num_edges is {num_edges}, but {num_nodes} nodes have room for {room}; lower it")
    a, b, c = options["a"], options["b"], options["c"]
    if a + b + c > 1 + 1e-9:
        raise ValueError(
            f"data.options a {a}, b {b} and c {c} add up to {a + b + c}; they are probabilities, at most 1"
        )
    levels = max(1, (num_nodes - 1).bit_length())
    generator = request.generator("edges")
    scrambled = request.generator("ids").permutation(num_nodes).astype(np.int64)

    def draw(count: int) -> Int64Array:
        sizes = [min(_RMAT_CHUNK, count - begin) for begin in range(0, count, _RMAT_CHUNK)]
        cells = np.concatenate([_rmat_cells(generator, size, levels, a, b, c) for size in sizes], axis=1)  # [2, count]
        source, destination = scrambled[(cells * num_nodes) >> levels]
        valid = source != destination
        keys: Int64Array = destination[valid] * num_nodes + source[valid]
        return keys

    destination, source = np.divmod(_distinct_draws(request.name, "edges", num_edges, draw), num_nodes)
    num_classes = options["num_classes"]
    latent = request.generator("latent").integers(0, num_classes, num_nodes)
    labels = _neighborhood_majority(source, destination, latent, num_classes)
    return from_edges(
        request.name,
        source,
        destination,
        num_nodes,
        _class_features(request, latent, num_classes),
        labels,
        *stratified_split(labels, split_generator(request.seed, request.split)),
        split=request.drawn,
        num_classes=num_classes,
    )


def _power_law_weights(request: _Request, num_nodes: int, num_pairs: int) -> npt.NDArray[np.float64]:
    """[N] weights with density ~ w**-degree_exponent, cut where an expected degree exceeds sqrt(E).

    Beyond that (the structural cut-off) two hubs would want more than one edge between them.
    """
    exponent: float = request.options["degree_exponent"]
    weights = (1.0 - request.generator("degrees").random(num_nodes)) ** (-1.0 / (exponent - 1.0))
    expected_degree = 2 * num_pairs / weights.sum()  # of a node of weight 1
    return np.minimum(weights, max(1.0, np.sqrt(2 * num_pairs) / expected_degree)) if num_pairs else weights


def _position(cumulated: npt.NDArray[np.float64], points: npt.NDArray[np.float64]) -> Int64Array:
    """The intervals of `cumulated` [N+1] in which `points` lie."""
    found = np.searchsorted(cumulated, points, side="right") - 1
    return np.minimum(found, len(cumulated) - 2).astype(np.int64)


def _distinct_draws(name: str, what: str, wanted: int, draw: Callable[[int], Int64Array]) -> Int64Array:
    """`wanted` distinct keys of `draw`, ascending. What repeats is drawn again; a shortfall is logged.

    `draw(n)` returns at most `n` keys. A graph of few nodes and heavy hubs can run out of likely edges.
    """
    keys = np.empty(0, dtype=np.int64)
    for _ in range(_TOP_UP_ROUNDS):
        missing = wanted - len(keys)
        if missing == 0:
            break
        keys = np.sort(np.concatenate([keys, draw(missing)]))
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    if len(keys) < wanted:
        logger.warning(
            "graph %r has %d %s where %d were asked for: the likely ones are used up; lower data.options.num_edges",
            name, len(keys), what, wanted,
        )  # fmt: skip
    return keys


def _rmat_cells(generator: np.random.Generator, count: int, levels: int, a: float, b: float, c: float) -> Int64Array:
    """int64 [2, count]: row and column of cells of a 2**levels square, drawn quadrant by quadrant."""
    cells = np.zeros((2, count), dtype=np.int64)
    for _ in range(levels):
        uniform = generator.random(count, dtype=np.float32)
        lower = uniform >= a + b
        right = ((uniform >= a) & ~lower) | (uniform >= a + b + c)
        cells <<= 1
        cells[0] |= lower
        cells[1] |= right
    return cells


def _neighborhood_majority(
    source: Int64Array, destination: Int64Array, latent: Int64Array, num_classes: int
) -> Int64Array:
    """[N]: the latent class most frequent among a node and its neighbours; ties go to its own, then cyclically on."""
    num_nodes = len(latent)
    one, other = np.concatenate([source, destination]), np.concatenate([destination, source])
    ahead = (latent[one] - latent[other]) % num_classes  # cyclic, so that no class wins ties more often than another
    counts = np.bincount(other * num_classes + ahead, minlength=num_nodes * num_classes)
    counts = counts.reshape(num_nodes, num_classes)  # [N, C], column 0 = own class
    counts[:, 0] += 1
    majority: Int64Array = (latent + counts.argmax(axis=1)) % num_classes
    return majority


def _class_features(request: _Request, classes: Int64Array, num_classes: int) -> npt.NDArray[np.float32]:
    """float32 [N, F]: a random unit vector per class, plus Gaussian noise of `feature_noise` per feature."""
    num_features, noise = request.options["num_features"], request.options["feature_noise"]
    centroids = request.generator("centroids").standard_normal((num_classes, num_features))
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    features = request.generator("features").standard_normal((len(classes), num_features), dtype=np.float32)
    features *= np.float32(noise)
    features += centroids.astype(np.float32)[classes]
    return features


# ---------------------------------------------------------------------------------------------------------------------
# Packed real graphs


def _packed(file: str, metric: Metric = "accuracy") -> Callable[[_Request], Graph]:
    def build(request: _Request) -> Graph:
        return _read_packed(request, file, metric)

    return build


def _read_packed(request: _Request, file: str, metric: Metric) -> Graph:
    """A graph from `<root>/<file>`, an `.npz` without pickles.

    Arrays: `edge_index` [2, E] (source, destination); `x` [N, F] or its CSR parts `x_data`, `x_indices`, `x_indptr`,
    `x_shape`; `y` [N]; `train_mask`, `val_mask`, `test_mask` [N] or `train_masks`, ... [splits, N]; and optionally
    `labelled` [N], false where `y` means nothing.

    Options: `normalize` (`none`, or `row`: features of a node divided by their sum).
    """
    if request.root is None:
        raise ValueError(f"graph {request.name!r} is read from a folder; set data.root to the one that holds {file}")
    path = request.root / file
    if not path.is_file():
        raise ValueError(
            f"graph {request.name!r}: there is no file {path}; set data.root to the folder that holds {file}"
        )
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
        features = _packed_features(arrays)
        edges, labels = arrays["edge_index"], arrays["y"]
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"graph {request.name!r}: {path} is no packed graph ({type(error).__name__}: {error}); restore the file or "
            "change data.root"
        ) from error
    masks = _packed_masks(request, arrays)
    if request.options["normalize"] == "row":
        features = _row_normalized(features)
    if "labelled" in arrays:
        labels = np.where(arrays["labelled"], labels, UNLABELLED)
    origin = SplitOrigin("public", request.split)
    return from_edges(
        request.name, edges[0], edges[1], len(labels), features, labels, *masks, metric=metric, split=origin
    )


def _row_normalized(features: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    sums = features.sum(axis=1, keepdims=True)
    normalized: npt.NDArray[np.float32] = features / np.where(sums == 0, np.float32(1), sums)
    return normalized


def _packed_features(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    if "x" in arrays:
        return arrays["x"].astype(np.float32)
    num_nodes, num_features = (int(size) for size in arrays["x_shape"])
    features = np.zeros((num_nodes, num_features), dtype=np.float32)
    features[np.repeat(np.arange(num_nodes), np.diff(arrays["x_indptr"])), arrays["x_indices"]] = arrays["x_data"]
    return features


def _packed_masks(request: _Request, arrays: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    public = [f"{part}_mask" for part in ("train", "val", "test")]  # one split, else several as `train_masks`, ...
    names = public if public[0] in arrays else [f"{mask}s" for mask in public]
    for name in names:
        if name not in arrays:
            raise ValueError(f"graph {request.name!r}: its file has no array {name!r}; restore the file")
    masks = [arrays[name][None] if names is public else arrays[name] for name in names]
    num_splits = len(masks[0])
    if request.split >= num_splits:
        raise ValueError(f"data.split is {request.split}, but {request.name!r} has split(s) 0..{num_splits - 1}")
    return [mask[request.split] for mask in masks]


_COUNT = _Option(int, None, low=1)
_FEATURE_OPTIONS = {
    "num_features": dataclasses.replace(_COUNT, default=32),
    "feature_noise": _Option(float, 1.0, low=0, high=1e6),
}
_NORMALIZE = {"normalize": _Option(str, "none", choices=("none", "row"))}
_LIBRARY_OPTIONS = {"metric": _Option(str, None, choices=("accuracy", "roc_auc")), **_NORMALIZE}
_ALIASES = {
    "squirrel_filtered": "squirrel",
    "amazon_computers": "computer",
    "computers": "computer",
    "amazon_photo": "photo",
    "coauthor_cs": "cs",
}
_TEXT = _Option(str, None)
_SOURCES: Mapping[str, _Source] = {
    "table": _Source(
        _table,
        {
            "id": dataclasses.replace(_TEXT, default="id"),
            "label": dataclasses.replace(_TEXT, default="label"),
            "split": dataclasses.replace(_TEXT, default="split"),
            "src": dataclasses.replace(_TEXT, default="src"),
            "dst": dataclasses.replace(_TEXT, default="dst"),
            "features": _Option(list, None),
            "ignore": _Option(list, ()),
            "separator": _TEXT,
            "metric": _Option(str, "accuracy", choices=("accuracy", "roc_auc")),
        },
    ),
    "dgl-partition": _Source(
        _dgl_partition,
        {
            "features": dataclasses.replace(_TEXT, default="feat"),
            "label": dataclasses.replace(_TEXT, default="label"),
            "edge_features": _TEXT,
            "original_id": _TEXT,
            "metric": _Option(str, "accuracy", choices=("accuracy", "roc_auc")),
        },
    ),
    "digits": _Source(_digits, {"neighbors": _Option(int, 8, low=1, high=1796)}),
    "sbm": _Source(
        _sbm,
        {
            "num_nodes": dataclasses.replace(_COUNT, default=10_000),
            "num_edges": _Option(int, 200_000, low=0),
            "num_blocks": _Option(int, 10, low=2),
            "homophily": _Option(float, 0.8, low=0, high=1),
            "degree_exponent": _Option(float, 2.5, low=2),
            **_FEATURE_OPTIONS,
        },
    ),
    "rmat": _Source(
        _rmat,
        {
            "scale": _Option(int, None, low=1, high=30),
            "num_nodes": _Option(int, None, low=2, high=2**30),
            "num_edges": _Option(int, None, low=0),
            "a": _Option(float, 0.57, low=0, high=1),
            "b": _Option(float, 0.19, low=0, high=1),
            "c": _Option(float, 0.19, low=0, high=1),
            "num_classes": _Option(int, 8, low=2),
            **_FEATURE_OPTIONS,
        },
    ),
    "cora": _Source(_packed("cora/cora.npz"), _NORMALIZE),
    "citeseer": _Source(_packed("citeseer/citeseer.npz"), _NORMALIZE),
    "pubmed": _Source(_packed("pubmed/pubmed.npz"), _NORMALIZE),
    "minesweeper": _Source(_packed("heterophilous/minesweeper.npz", "roc_auc"), _NORMALIZE),
    "tolokers": _Source(_packed("heterophilous/tolokers.npz", "roc_auc"), _NORMALIZE),
    "squirrel": _Source(_packed("heterophilous/squirrel_filtered.npz"), _NORMALIZE),
    "actor": _Source(_packed("heterophilous/actor.npz"), _NORMALIZE),
    "texas": _Source(_packed("heterophilous/texas.npz"), _NORMALIZE),
    "wisconsin": _Source(_packed("heterophilous/wisconsin.npz"), _NORMALIZE),
    "cornell": _Source(_packed("heterophilous/cornell.npz"), _NORMALIZE),
    "computer": _Source(_packed("amazon_computers/amazon_computers.npz"), _NORMALIZE),
    "photo": _Source(_packed("amazon_photo/amazon_photo.npz"), _NORMALIZE),
    "cs": _Source(_packed("coauthor_cs/coauthor_cs.npz"), _NORMALIZE),
}
