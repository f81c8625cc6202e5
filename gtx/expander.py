"""Edges that a model wants beside the graph's own: a random regular graph that brings any two nodes near each other.

Not here: what a model makes of them (`models/exphormer.py`).
"""

from __future__ import annotations

import numpy as np

from gtx.graphs import Graph, with_added_edges
from sparse_engine import PURPOSE_EXPANDER, keyed_permutation


def with_expander(graph: Graph, degree: int, seed: int) -> Graph:
    """Add a random `degree`-regular graph, as edges of type 1; the graph itself if `degree` is 0.

    `degree / 2` cycles through all nodes in random orders, both ways (the model H of Friedman 2008, arXiv cs/0405020:
    almost always a nearly Ramanujan graph, which is to say a good expander). An order is keyed by seed, cycle and node
    ids, so that the edges are the same for any partition, plan and number of ranks. Cycles may share an edge, or have
    one of the graph's own: it is then there several times. A graph of fewer than 2 nodes gets no edges.

    Raises:
        ValueError: for a degree that is odd or negative.
    """
    if degree < 0 or degree % 2:
        raise ValueError(f"an expander of degree {degree} cannot be made of cycles; give an even number")
    if degree == 0:
        return graph
    num_nodes = graph.num_nodes if graph.num_nodes > 1 else 0
    orders = [keyed_permutation(seed, PURPOSE_EXPANDER, cycle, num_nodes).numpy() for cycle in range(degree // 2)]
    here = np.concatenate(orders)
    there = np.concatenate([np.roll(order, -1) for order in orders])
    return with_added_edges(graph, np.concatenate([here, there]), np.concatenate([there, here]))
