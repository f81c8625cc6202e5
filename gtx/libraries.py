"""Named sets of DGL, PyG and OGB, loaded by these libraries themselves: `dgl:`, `pyg:` or `ogb:` and what they call it.

What a library downloads it keeps in `data.root`, and reads from there ever after. Not here: what its graph becomes
(`convert.py`), folders of `dgl.distributed.partition_graph` (`partition_folders.py`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import os
import socket
import sys
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gtx.graphs import Graph, Metric

TIMEOUT_S = 20.0  # that a server has to answer
_ROC_AUC = ("minesweeper", "tolokers", "questions")  # as Platonov et al. 2023 (arXiv 2302.11640) score them


def load_set(name: str, *, root: Path | None, seed: int, split: int, metric: Metric | None) -> Graph:
    """The set that `name` means: `dgl:CLASS` of `dgl.data`, `pyg:CLASS` or `pyg:CLASS/NAME` of
    `torch_geometric.datasets`, `ogb:ogbn-NAME`.

    The split is the set's own, `split` says which where it has several; where it has none one is drawn by `seed`.

    Args:
        root: the folder that the library keeps its files in; sets that come with the library need none.
        metric: what is scored; None for what is usual: ROC AUC for minesweeper, tolokers and questions, else accuracy.

    Raises:
        ValueError: one line if the library cannot be imported, has no such set, cannot download it, or the set is not
            one graph whose nodes have features and one label each.
    """
    library, _, called = name.partition(":")
    if metric is None:
        usual = called.rpartition("/")[2].lower().removesuffix("dataset") in _ROC_AUC
        metric = "roc_auc" if usual else "accuracy"
    return LIBRARIES[library](name, called, root, seed, split, metric)


def _dgl(name: str, called: str, root: Path | None, seed: int, split: int, metric: Metric) -> Graph:
    data = _imported("dgl.data", name, "DGL", "dgl")
    from gtx.convert import from_dgl

    made, argument = _class_named(name, called, vars(data), data.DGLDataset)

    class Reached(made):  # type: ignore[misc, valid-type]
        """requests, which DGL downloads with, waits for minutes where nobody answers, and DGL asks six times."""

        def download(self) -> None:
            _reach(self.url)
            super().download()

    found = _loaded(name, root, lambda: Reached(**_arguments(name, made, "raw_dir", root, argument)))
    graph = _only(name, found)
    classes = getattr(found, "num_classes", None)
    return from_dgl(graph, name=name, num_classes=classes, metric=metric, seed=seed, split=split)


def _pyg(name: str, called: str, root: Path | None, seed: int, split: int, metric: Metric) -> Graph:
    datasets = _imported("torch_geometric.datasets", name, "PyG", "torch_geometric")
    from torch_geometric.data import Dataset

    from gtx.convert import from_pyg

    made, argument = _class_named(name, called, vars(datasets), Dataset)
    found = _loaded(name, root, lambda: made(**_arguments(name, made, "root", root, argument)))
    data = _only(name, found)
    masks = {key: data[key] for key in ("train_mask", "val_mask", "test_mask") if key in data}
    splits = max((mask.shape[1] for mask in masks.values() if mask.dim() == 2), default=0)
    for key, mask in masks.items():  # WikiCS has one test split beside 20 others
        data[key] = mask[:, None].expand(-1, splits) if splits and mask.dim() == 1 else mask
    return from_pyg(data, name=name, num_classes=found.num_classes, metric=metric, seed=seed, split=split)


def _ogb(name: str, called: str, root: Path | None, seed: int, split: int, metric: Metric) -> Graph:
    with _without_outdated():
        nodeproppred = _imported("ogb.nodeproppred", name, "OGB", "ogb")
    from gtx.convert import from_arrays

    known = _ogb_sets(nodeproppred)
    if called not in known:
        raise ValueError(_unknown(name, called, "OGB's node property prediction", known))
    if root is None:
        raise ValueError(_needs_root(name))
    if split:
        raise ValueError(f"data.split is {split}, but {name} has one split, 0")

    def load() -> tuple[dict[str, Any], Any, dict[str, Any]]:
        with _unpickled():
            found = nodeproppred.NodePropPredDataset(called, root=str(root))
            graph, labels = found[0]
            return graph, labels, {} if found.is_hetero else found.get_idx_split()

    graph, labels, indices = _loaded(name, root, load)
    if not indices:
        raise ValueError(
            f"{name} has several types of nodes or edges; choose a set of one type, such as ogb:ogbn-arxiv"
        )
    if graph["node_feat"] is None:
        raise ValueError(f"{name} has no features of nodes; choose a set that has some, such as ogb:ogbn-arxiv")
    masks = []
    for key in ("train", "valid", "test"):
        masks.append(np.zeros(graph["num_nodes"], dtype=np.bool_))
        masks[-1][np.asarray(indices[key])] = True
    source, destination = graph["edge_index"]
    return from_arrays(
        source, destination, graph["node_feat"], labels, masks, graph["edge_feat"], name=name, metric=metric
    )


LIBRARIES: dict[str, Callable[[str, str, Path | None, int, int, Metric], Graph]] = {
    "dgl": _dgl,
    "pyg": _pyg,
    "ogb": _ogb,
}


# ---------------------------------------------------------------------------------------------------------------------
# Names


def _class_named(name: str, called: str, known: dict[str, Any], kind: type) -> tuple[type, str | None]:
    """The class before the slash and the name after it."""
    class_name, _, argument = called.partition("/")
    classes = {key for key, value in known.items() if inspect.isclass(value) and issubclass(value, kind)}
    if class_name not in classes:
        raise ValueError(_unknown(name, class_name, known["__name__"], sorted(classes)))
    return known[class_name], argument or None


def _arguments(name: str, made: type, folder: str, root: Path | None, argument: str | None) -> dict[str, Any]:
    """What the constructor is called with."""
    takes = inspect.signature(made).parameters
    given: dict[str, Any] = {"verbose": False} if "verbose" in takes else {}
    if folder in takes:
        if root is None:
            raise ValueError(_needs_root(name))
        given[folder] = str(root)
    elif root is not None:
        raise ValueError(f"data.root {root} has no effect: {name} comes with the library; leave it out")
    if "name" in takes:
        if argument is None:
            raise ValueError(f"data.name {name} is of several sets; say which, as in pyg:Planetoid/Cora")
        given["name"] = argument
    elif argument is not None:
        raise ValueError(f"data.name {name} has no sets to choose from; leave out /{argument}")
    return given


def _ogb_sets(nodeproppred: ModuleType) -> list[str]:
    assert nodeproppred.__file__ is not None
    with (Path(nodeproppred.__file__).parent / "master.csv").open(encoding="utf-8") as stream:
        return stream.readline().strip().split(",")[1:]


def _unknown(name: str, called: str, where: str, known: list[str]) -> str:
    near = difflib.get_close_matches(called, known, n=3, cutoff=0.4) or known[:3]
    return f"data.name is {name}, and {where} has no {called!r}; near it are {', '.join(near)}"


def _needs_root(name: str) -> str:
    return f"data.name {name} needs data.root; set it to the folder that holds the set or that it shall be kept in"


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def _imported(module: str, name: str, library: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a native library that is not there
        raise ValueError(
            f"data.name {name} needs {library}, which cannot be imported ({_reason(error)}); pip install {package}, or "
            "use a table (docs/your_graph.md)"
        ) from None


def _only(name: str, found: Any) -> Any:
    if len(found) != 1:
        raise ValueError(f"{name} is a set of {len(found)} graphs; gtx classifies the nodes of one graph")
    return found[0]


def _loaded(name: str, root: Path | None, load: Callable[[], Any]) -> Any:
    """What `load` returns; whatever goes wrong in a library is one line. Nothing is asked of a terminal."""
    where = "" if root is None else f" from {root}"
    try:
        with _patient(), _no_questions():
            return load()
    except ValueError as error:
        if type(error) is not ValueError or str(error).startswith("data."):
            raise ValueError(str(error)) from None
        reason = _reason(error)
    except AssertionError as error:
        reason = _reason(error) + f", as for a name that is none: {name}"
    except EOFError:
        raise ValueError(
            f"{name} cannot be loaded{where}: its library asks before it downloads or replaces more than a gigabyte; "
            "load it once by hand, or put its files there"
        ) from None
    except (Exception, SystemExit) as error:
        reason = _reason(error)
    raise ValueError(
        f"{name} cannot be loaded{where} ({reason}); without a network copy its files there from a machine that has "
        "one, and remove what a download that was cut off has left"
    )


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _reach(url: str | None) -> None:
    """Raise OSError at once where the server of `url` does not answer; a proxy is left to answer for itself."""
    parts = urllib.parse.urlsplit(url or "")
    if parts.hostname and parts.scheme not in urllib.request.getproxies():
        port = parts.port or (80 if parts.scheme == "http" else 443)
        socket.create_connection((parts.hostname, port), timeout=TIMEOUT_S).close()


@contextmanager
def _patient() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def _no_questions() -> Iterator[None]:
    """A job has nobody to answer: `input` then raises EOFError."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


@contextmanager
def _without_outdated() -> Iterator[None]:
    """At import OGB asks PyPI for its newest version, in a thread that Python waits for at its end; not in a job."""
    before = sys.modules.get("outdated")
    sys.modules["outdated"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["outdated"]
        if before is not None:
            sys.modules["outdated"] = before


@contextmanager
def _unpickled() -> Iterator[None]:
    """Since torch 2.6 `torch.load` refuses what OGB keeps, arrays pickled by protocol 4; this is torch's way to have it
    as OGB wrote it for. The files are OGB's own, as trusted as the library."""
    key = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f"Environment variable {key}")
            yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
