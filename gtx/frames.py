"""Makes a graph of a frame of nodes and a frame of edges, and frames of a graph. Everything in them is checked.

Reading files is in `tables.py`, what a graph is in `graphs.py`.

Legend: `N` nodes, `E` edges, `F` features.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from gtx.graphs import UNLABELLED, BoolArray, Graph, Int64Array, Metric, Names, SplitOrigin, edge_list, from_edges
from gtx.splits import split_generator, stratified_split
from gtx.tables import Table, without_categories

logger = logging.getLogger(__name__)

_SPLITS = {"train": 0, "valid": 1, "val": 1, "validation": 1, "test": 2}
_BLANK = ("", "nan", "NaN", "NAN")
_NO_LABEL_NUMBERS = (-1.0, -100.0)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """Which columns mean what.

    Attributes:
        id, label, split: of the nodes. There need be no column `split`.
        src, dst: of the edges: ids of nodes, from source to destination.
        features: of the nodes; if None, all other columns that hold numbers.
        ignore: columns of either table that are not looked at.
    """

    id: str = "id"
    label: str = "label"
    split: str = "split"
    src: str = "src"
    dst: str = "dst"
    features: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()


def from_frames(
    nodes: pd.DataFrame,
    edges: pd.DataFrame,
    *,
    name: str = "table",
    columns: Columns = Columns(),
    metric: Metric = "accuracy",
    seed: int = 0,
    split: int = 0,
) -> Graph:
    """The graph of two pandas frames, as `graph_of_tables` makes it; ids may be of any hashable type.

    Raises:
        ValueError: one line that names frame, row, column and value.
    """
    tables = []
    for what, frame in (("the node table", nodes), ("the edge table", edges)):
        names = [str(column) for column in frame.columns]
        for column in names:
            if names.count(column) > 1:
                raise ValueError(f"{what}: column {column!r} comes twice; rename or remove one of them")
        frame = without_categories(frame.set_axis(names, axis="columns").reset_index(drop=True))
        tables.append(Table(frame, what))
    return graph_of_tables(*tables, name=name, columns=columns, metric=metric, seed=seed, split=split)


def graph_of_tables(
    nodes: Table, edges: Table, *, name: str, columns: Columns, metric: Metric, seed: int, split: int
) -> Graph:
    """The graph of a node table and an edge table.

    Node `i` is row `i`, with its id in `graph.node_ids`. Labels are words or whole numbers; their distinct values, in
    ascending order, are the classes 0, 1, ... An empty cell, NaN, -1 and -100 mean no label. Every other column of
    numbers is a feature, of a node or of an edge; a column of vectors is as many features.

    Args:
        seed, split: of the split that is drawn where the nodes have no column `split`.

    Raises:
        ValueError: one line that names file, row, column and value.
    """
    _check_columns(nodes, edges, columns)
    if not len(nodes.frame):
        raise ValueError(f"{nodes.source} has no nodes; give it a row for each node")
    ids = _node_ids(nodes, columns.id)
    source, destination = (_positions(edges, column, nodes, ids) for column in (columns.src, columns.dst))
    labels, classes = _labels(nodes, columns.label)
    if columns.split in nodes.frame:
        if split:
            raise ValueError(
                f"data.split is {split}, but {nodes.source} has a column {columns.split!r}, which is split 0; leave "
                "data.split out"
            )
        train, val, test = _masks(nodes, columns, labels)
        origin = SplitOrigin("given")
    else:
        origin = SplitOrigin("random", split, seed)
        train, val, test = stratified_split(labels, split_generator(seed, split))
    taken = (columns.id, columns.label, columns.split, *columns.ignore)
    features, feature_names = _features(nodes, columns.features, taken)
    if not feature_names:
        raise ValueError(
            f"{nodes.source} has no features: no column besides {columns.id!r}, {columns.label!r} and "
            f"{columns.split!r} holds numbers; add one, such as each node's degree"
        )
    edge_features, edge_names = _features(edges, None, (columns.src, columns.dst, *columns.ignore))
    return from_edges(
        name,
        source,
        destination,
        len(ids),
        features,
        labels,
        train,
        val,
        test,
        num_classes=len(classes),
        metric=metric,
        edge_features=edge_features if edge_names else None,
        names=Names(ids_as_array(ids), classes, feature_names, edge_names or None),
        split=origin,
    )


def to_frames(graph: Graph, columns: Columns = Columns()) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(nodes, edges) of a graph, as `from_frames` reads them; edges by destination, then source.

    Nodes without a label have -1, or nothing where classes are words.
    """
    names = graph.names
    classes = np.array([*(names.classes or range(graph.num_classes)), None], dtype=object)  # -1 takes the last
    words = any(isinstance(label, str) for label in classes)
    classes[-1] = "" if words else UNLABELLED
    split = np.full(graph.num_nodes, "", dtype=object)
    for mask, word in ((graph.train_mask, "train"), (graph.val_mask, "valid"), (graph.test_mask, "test")):
        split[mask] = word
    nodes: dict[str, Any] = {
        columns.id: graph.node_ids,
        columns.label: pd.Series(classes[graph.labels], dtype=str if words else np.int64),
        columns.split: pd.Series(split, dtype=str),
    }
    nodes |= zip(names.features or _numbered("f", graph.num_features), graph.features.T, strict=True)
    source, destination = edge_list(graph)
    edges: dict[str, Any] = {columns.src: graph.node_ids[source], columns.dst: graph.node_ids[destination]}
    if graph.edge_features is not None:
        width = graph.edge_features.shape[1]
        edges |= zip(names.edge_features or _numbered("e", width), graph.edge_features.T, strict=True)
    return pd.DataFrame(nodes), pd.DataFrame(edges)


def _numbered(letter: str, count: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(count))


# ---------------------------------------------------------------------------------------------------------------------
# Ids


def _check_columns(nodes: Table, edges: Table, columns: Columns) -> None:
    wanted = (columns.id, columns.label, columns.src, columns.dst)
    for table, names in ((nodes, wanted[:2]), (edges, wanted[2:]), (nodes, columns.features or ())):
        for name in names:
            if name not in table.frame:
                found = ", ".join(map(repr, table.frame.columns[:10])) or "none"
                more = f" and {len(table.frame.columns) - 10} more" if len(table.frame.columns) > 10 else ""
                raise ValueError(
                    f"{table.source} has no column {name!r}, its columns are {found}{more}; rename one, or say in "
                    "data.options which column, and which separator, is meant"
                )
    for name in columns.ignore:
        if name in (*wanted, columns.split, *(columns.features or ())):
            raise ValueError(f"column {name!r} is both used and ignored; take it out of data.options.ignore")
        if name not in nodes.frame and name not in edges.frame:
            raise ValueError(f"data.options.ignore names {name!r}, a column of neither table; take it out")


def _coded(table: Table, column: str) -> tuple[Int64Array, list[Hashable]]:
    """(number of each row's id [n], the distinct ids in order of appearance). Text that is an integer becomes one."""
    series = table.frame[column]
    try:
        codes, found = pd.factorize(series)
    except TypeError:
        row = next(i for i, value in enumerate(series) if not isinstance(value, Hashable))
        raise ValueError(f"{table.at(row, column)}: {series[row]!r} cannot be an id; use a number or text") from None
    missing = codes < 0
    if table.separator is not None:
        missing |= (series == "").to_numpy()
    if missing.any():
        raise ValueError(f"{table.at(int(np.argmax(missing)), column)}: the id is missing; fill it in or drop the row")
    ids: list[Hashable] = found.tolist()
    return codes.astype(np.int64), ids if table.separator is None else [_typed(cast(str, text)) for text in ids]


def _typed(text: str) -> int | str:
    """The integer whose plain form this text is, else the text: `7` is a number; `07`, `7.0` and `-0` stay text."""
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 4300 and str(int(text)) == text:
        return int(text)
    return text


def _node_ids(table: Table, column: str) -> list[Hashable]:
    codes, ids = _coded(table, column)
    if len(ids) < len(codes):
        row = int(np.argmax(pd.Series(codes).duplicated()))
        first = int(np.argmax(codes == codes[row]))
        raise ValueError(
            f"{table.at(row, column)}: node {ids[codes[row]]!r} is already {table.at(first)}; a node has one row, and "
            f"is in one split (rows too many: {len(codes) - len(ids)})"
        )
    return ids


def _positions(edges: Table, column: str, nodes: Table, ids: Sequence[Hashable]) -> Int64Array:
    """int64 [E]: the rows of the nodes at one end of the edges."""
    codes, found = _coded(edges, column)
    position = {node: i for i, node in enumerate(ids)}
    rows = np.fromiter((position.get(node, -1) for node in found), dtype=np.int64, count=len(found))[codes]
    unknown = rows < 0
    if unknown.any():
        edge = int(np.argmax(unknown))
        node = found[codes[edge]]
        alike = next((known for known in ids if str(known).strip() == str(node).strip()), None)
        hint = "" if alike is None else f" (it has {alike!r}, which is not the same)"
        raise ValueError(
            f"{edges.at(edge, column)}: there is no node {node!r} in {nodes.source}{hint}; add its row there or drop "
            f"the edge (such edges: {np.count_nonzero(unknown)})"
        )
    return rows


def ids_as_array(ids: Sequence[Hashable]) -> npt.NDArray[Any] | None:
    """[N] as in `Names.nodes`: int64 if all fit, else object; None for 0, 1, 2, ..."""
    if all(type(node) is int and -(2**63) <= node < 2**63 for node in ids):
        numbers = np.array(ids, dtype=np.int64)
        return None if np.array_equal(numbers, np.arange(len(ids))) else numbers
    return np.fromiter(ids, dtype=object, count=len(ids))


# ---------------------------------------------------------------------------------------------------------------------
# Labels and splits


def _labels(table: Table, column: str) -> tuple[Int64Array, tuple[Hashable, ...]]:
    """(class of each node [N], -1 for none; what each class is called)."""
    series = table.frame[column]
    numbers = _as_floats(series)
    unlabelled = np.isin(numbers, _NO_LABEL_NUMBERS) | series.isna().to_numpy()
    numeric = ~np.isnan(numbers)
    unlabelled |= _blank(series)
    labelled = ~unlabelled
    if not labelled.any():
        raise ValueError(f"{table.source}, column {column!r}: no node has a label; label the nodes to train on")
    labels = np.full(len(series), UNLABELLED, dtype=np.int64)
    if not (labelled & numeric).any():
        for row, value in enumerate(series):
            if isinstance(value, list | tuple | dict | np.ndarray):
                raise ValueError(f"{table.at(row, column)}: {_short(value)} is no label; give one word or whole number")
        words, labels[labelled] = np.unique(series[labelled].astype(str).to_numpy(dtype=object), return_inverse=True)
        return labels, tuple(words.tolist())
    if (labelled & ~numeric).any():
        few, among = labelled & ~numeric, "numbers"
        if few.sum() > (labelled & numeric).sum():
            few, among = labelled & numeric, "words"
        row = int(np.argmax(few))
        raise ValueError(
            f"{table.at(row, column)}: the label {_short(series[row])} stands among {among}; labels are all whole "
            "numbers or all words"
        )
    with np.errstate(invalid="ignore"):
        wrong = labelled & ~(np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{table.at(row, column)}: the label {series[row]} is no class; a label is a whole number from 0 or a "
            "word, and an empty cell, NaN, -1 or -100 mean that there is none"
        )
    classes, labels[labelled] = np.unique(numbers[labelled], return_inverse=True)
    return labels, tuple(int(value) for value in classes)


def _masks(table: Table, columns: Columns, labels: Int64Array) -> list[BoolArray]:
    column = columns.split
    words, found = pd.factorize(table.frame[column])
    which = np.full(len(found) + 1, -1)  # the last for a missing value, which has code -1
    for i, word in enumerate(found):
        if str(word).strip():
            which[i] = _SPLITS.get(str(word).strip().lower(), -2)
    of_row = which[words]
    if (of_row == -2).any():
        row = int(np.argmax(of_row == -2))
        raise ValueError(
            f"{table.at(row, column)}: {table.frame[column][row]!r} is no split; write train, valid or test, or leave "
            "it empty"
        )
    train = of_row == 0
    if not train.any():
        raise ValueError(f"{table.source}, column {column!r}: no node is in train; mark the nodes to train on")
    without = train & (labels == UNLABELLED)
    if without.any():
        raise ValueError(
            f"{table.at(int(np.argmax(without)), columns.label)}: a node of the training split has no label; label it "
            f"or take it out of train (such nodes: {np.count_nonzero(without)})"
        )
    return [of_row == number for number in range(3)]


# ---------------------------------------------------------------------------------------------------------------------
# Features


def _features(
    table: Table, wanted: Sequence[str] | None, others: Sequence[str]
) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
    """(float32 [n, F], names) of the wanted columns, or of those besides `others` that hold numbers."""
    names: list[str] = []
    blocks: list[npt.NDArray[np.float32]] = []
    left_out = []
    for column in table.frame.columns if wanted is None else wanted:
        if wanted is None and column in others:
            continue
        values = _numbers(table, column, may_be_text=wanted is None)
        if values is None:
            left_out.append(column)
        elif values.ndim == 1:
            names.append(column)
            blocks.append(values[:, None])
        else:
            names += [f"{column}.{i}" for i in range(values.shape[1])]
            blocks.append(values)
    if left_out and len(table.frame):
        logger.warning(
            "%s: columns without any number are not used: %s; what is meant so goes into data.options.ignore",
            table.source, ", ".join(map(repr, left_out)),
        )  # fmt: skip
    if len(set(names)) < len(names):
        raise ValueError(f"{table.source}: two features are called {max(names, key=names.count)!r}; rename a column")
    joined = np.concatenate(blocks, axis=1) if blocks else np.empty((len(table.frame), 0), dtype=np.float32)
    return joined, tuple(names)


def _numbers(table: Table, column: str, *, may_be_text: bool) -> npt.NDArray[np.float32] | None:
    """float32 [n], or [n, k] of a column of vectors; None for a column without any number, which is text."""
    series = table.frame[column]
    values = _vectors(table, column) if _holds_vectors(series) else _as_floats(series)
    wrong = ~(np.abs(values) <= _FLOAT32_MAX)
    if not wrong.any():
        return values.astype(np.float32)
    if wrong.ndim == 2:
        row, place = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{table.at(row, column)}: value {place} is {values[row, place]}; {_REPAIR}")
    row = int(np.argmax(wrong))
    value = series[row]
    if not np.isnan(values[row]):
        raise ValueError(f"{table.at(row, column)}: {value} is no finite float32; {_REPAIR}")
    given = ~(series.isna().to_numpy() | _blank(series))
    if may_be_text and given.any() and np.isnan(values).all():
        return None
    what = f"{_short(value)} is no number" if given[row] else "the value is missing"
    raise ValueError(f"{table.at(row, column)}: {what}; {_REPAIR}")


_REPAIR = "repair it, or name the column in data.options.ignore"


def _as_floats(series: pd.Series) -> Floats:
    """float64 [n]; NaN where the value is missing or no number."""
    if pd.api.types.is_complex_dtype(series) or not (
        pd.api.types.is_numeric_dtype(series) or series.dtype == object or isinstance(series.dtype, pd.StringDtype)
    ):
        return np.full(len(series), np.nan)  # dates, categories and the like
    if not pd.api.types.is_numeric_dtype(series):
        series = pd.to_numeric(series, errors="coerce")
    return cast(Floats, series.to_numpy(dtype=np.float64, na_value=np.nan))


def _blank(series: pd.Series) -> BoolArray:
    """bool [n]: text that means that there is no value."""
    if isinstance(series.dtype, pd.StringDtype):
        return cast(BoolArray, series.isin(_BLANK).to_numpy(dtype=np.bool_))
    if series.dtype != object:
        return np.zeros(len(series), dtype=np.bool_)
    return np.fromiter((isinstance(value, str) and value in _BLANK for value in series), np.bool_, len(series))


def _holds_vectors(series: pd.Series) -> bool:
    return series.dtype == object and any(isinstance(value, list | tuple | np.ndarray) for value in series)


def _vectors(table: Table, column: str) -> Floats:
    """float64 [n, k]."""
    series = table.frame[column]
    width = next(len(value) for value in series if isinstance(value, list | tuple | np.ndarray))
    rows = np.empty((len(series), width))
    for row, value in enumerate(series):
        try:
            vector = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            vector = np.empty(())
        if vector.shape != (width,):
            raise ValueError(f"{table.at(row, column)}: {_short(value)} is no vector of {width} numbers; {_REPAIR}")
        rows[row] = vector
    return rows


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."
