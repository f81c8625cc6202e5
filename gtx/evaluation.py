"""How the scores of a run came about: where the split is from, what could have leaked, what preparing took.

Facts for the strategy report, found after training. Not here: the scores themselves (`loop.py`, `tasks.py`), what the
graph's summary counts, label rate among it (`graphs.py`), and models beside the run's own (`beside.py`).

Legend: `N` nodes, `E` edges, `F` features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gtx.config import Config
from gtx.graphs import Graph, SplitOrigin, edge_list
from gtx.models import family_named
from monitor import StepRecord

SUSPICIOUS = ("a feature gives the class away", "edges derive from labels")  # what a user is told of at once
_ENOUGH = 5  # nodes of a class, below which a constant feature may be chance
_SHOWN = 5
_DRAWN_BY_CLASS = {
    "sbm": "the generator draws edges by class",
    "rmat": "the generator derives labels from edges, those of test nodes too",
}


def describe(
    config: Config,
    graph: Graph,
    split: SplitOrigin | None,
    partitioning: Mapping[str, Any],
    records: Sequence[StepRecord],
    *,
    search_s: float,
    loop_s: float,
) -> dict[str, Any]:
    """The report's block `evaluation`, but for models beside the run's own.

    split: where the split is from; None if that is not known. partitioning: how the graph was cut and what was made for
    it, as `session.Loaded.facts` has it. records: of all steps of rank 0. search_s: of looking for a plan before the
    first step. loop_s: of all steps.
    """
    return {
        "split": {
            "kind": "unknown" if split is None else split.kind,
            "number": None if split is None else split.number,
            "seed": None if split is None else split.seed,
        },
        "checks": checks(config, graph),
        "seconds": _seconds(config, partitioning, records, search_s, loop_s),
        "beside": [],
    }


# What could leak ------------------------------------------------------------------------------------------------------


def checks(config: Config, graph: Graph) -> list[dict[str, str]]:
    """Ways in which what is known of test nodes can reach training, each with an answer and why.

    The answer is `yes`, `no`, or `no sign` where only traces can be looked for.
    """
    made = [
        _test_edges(config, graph),
        _statistics(config),
        _telling_features(graph),
        _edges_of_classes(config, graph),
        _encodings(config),
        (
            "the step was chosen by test scores",
            "no",
            "the test score is read at the best validation score"
            if graph.val_mask.any()
            else "there are no validation nodes: no step is chosen, and no test score named best",
        ),
        (
            "graphs or micro-batches of a step see each other",
            "no",
            "one graph; micro-batches run as disjoint graphs, none attends to another",
        ),
    ]
    return [{"question": question, "answer": answer, "because": because} for question, answer, because in made]


def _test_edges(config: Config, graph: Graph) -> tuple[str, str, str]:
    question = "edges between test nodes are used in training"
    if not family_named(config.model.name).uses_edges:
        return question, "no", f"{config.model.name} reads no edges"
    count, share = edges_of_test(graph)
    if not count:
        return question, "no", "no edge joins two test nodes"
    if config.model.layers == 1:
        return question, "no", "one layer: only edges into training nodes reach the loss"
    how = {
        "full": "the full graph is trained on",
        "cluster": "within the partitions of a micro-batch",
        "neighbor": "where they lie two or more hops around training nodes",
    }[config.batch.kind]
    return question, "yes", f"transductive: {how}; {count:,} edges ({share:.1%}) join two test nodes; no label is read"


def edges_of_test(graph: Graph) -> tuple[int, float]:
    """(edges whose ends are both test nodes, their share of all edges); self loops are left out of both."""
    source, destination = edge_list(graph)
    other = source != destination
    test = np.asarray(graph.test_mask)
    count = int(np.count_nonzero(test[source] & test[destination] & other))
    return count, count / max(int(np.count_nonzero(other)), 1)


def _statistics(config: Config) -> tuple[str, str, str]:
    question = "features are scaled by statistics of test nodes"
    if config.data.standardize:
        return question, "no", "data.standardize: mean and deviation are those of the training nodes"
    if config.data.options.get("normalize") == "row":
        return question, "no", "data.options.normalize row: each node is divided by its own sum"
    return question, "no", "gtx scales nothing: features are as they came"


def _telling_features(graph: Graph) -> tuple[str, str, str]:
    question = SUSPICIOUS[0]
    found = telling_features(graph)
    if not found:
        return question, "no sign", "none is constant within every class and differs between classes"
    names = graph.names.features or tuple(f"feature {i}" for i in range(graph.num_features))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    told = ", ".join(names[i] for i in found[:_SHOWN]) + more
    return question, "yes", f"constant within every class and different between classes: {told}"


def telling_features(graph: Graph) -> list[int]:
    """The features that have one value a class, test nodes included, and not the same one in all classes.

    Classes of fewer than five nodes are left out, since a value may be theirs by chance. Returns columns, ascending.
    """
    labels, features = np.asarray(graph.labels), np.asarray(graph.features)
    lows, highs = [], []
    for label in range(graph.num_classes):
        nodes = np.flatnonzero(labels == label)
        if len(nodes) >= _ENOUGH:
            rows = features[nodes]
            lows.append(rows.min(axis=0))
            highs.append(rows.max(axis=0))
    if len(lows) < 2:
        return []
    low, high = np.stack(lows), np.stack(highs)
    telling = (low == high).all(axis=0) & (low.min(axis=0) < low.max(axis=0))
    columns: list[int] = np.flatnonzero(telling).tolist()
    return columns


def _edges_of_classes(config: Config, graph: Graph) -> tuple[str, str, str]:
    question = SUSPICIOUS[1]
    homophily = edge_homophily(graph)
    if config.data.name in _DRAWN_BY_CLASS:
        return question, "yes", f"{_DRAWN_BY_CLASS[config.data.name]}; edge homophily {homophily:.2f}"
    if math.isnan(homophily):
        return question, "no sign", "no edge joins two labelled nodes"
    if homophily == 1.0:
        return question, "yes", "every edge joins two nodes of one class (edge homophily 1)"
    return question, "no sign", f"edge homophily {homophily:.2f}: not all edges join nodes of one class"


def edge_homophily(graph: Graph) -> float:
    """Share of the edges between labelled nodes whose ends have one class (Zhu et al. 2020); nan where there is none.

    Self loops are left out.
    """
    source, destination = edge_list(graph)
    labels = np.asarray(graph.labels)
    chosen = (source != destination) & (labels[source] >= 0) & (labels[destination] >= 0)
    if not chosen.any():
        return math.nan
    return float((labels[source[chosen]] == labels[destination[chosen]]).mean())


def _encodings(config: Config) -> tuple[str, str, str]:
    question = "encodings see test nodes"
    kinds = [kind for kind, _ in config.model.encodings.kinds]
    if not kinds:
        return question, "no", "the model has no encodings"
    return question, "yes", f"{', '.join(kinds)} of all edges, those of test nodes too; no label is read"


# What it took ---------------------------------------------------------------------------------------------------------


def _seconds(
    config: Config, partitioning: Mapping[str, Any], records: Sequence[StepRecord], search_s: float, loop_s: float
) -> dict[str, Any]:
    """Seconds of preparing by part, and of the loop. The loop's parts, on rank 0, add up to it."""
    encodings = [kind for kind, _ in config.model.encodings.kinds]
    preparing = {"partitioning": float(partitioning["seconds"])}
    reused = ["partitioning"] if partitioning["reused"] else []
    if "lists_seconds" in partitioning:
        preparing["neighbor_lists"] = float(partitioning["lists_seconds"])
        reused += ["neighbor_lists"] if partitioning["lists_reused"] else []
    for kind in encodings:
        preparing[kind] = float(partitioning[f"{kind}_seconds"])
        reused += [kind] if partitioning[f"{kind}_reused"] else []
    if search_s:
        preparing["plan_search"] = search_s
    spent = {
        name: math.fsum(record.phases.get(phase, 0.0) for record in records)
        for name, phase in (("compiling", "compiling"), ("evaluating", "evaluate"))
    }
    return {"preparing": preparing, "reused": reused, **spent, "training": max(loop_s - sum(spent.values()), 0.0)}
