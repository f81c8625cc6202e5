"""Sparse kernels for graph transformers: patterns, attention, aggregation, neighbour sampling, keyed randomness.

Knows tensors and no ranks; imports nothing of the project outside itself.
"""

from sparse_engine.aggregate import aggregate
from sparse_engine.attention import BACKENDS, auto_backends, fastest_backend, resolve_backend, sparse_attention
from sparse_engine.keyed import (
    PURPOSE_DROPOUT,
    PURPOSE_EXPANDER,
    PURPOSE_FEATURES,
    PURPOSE_INIT,
    PURPOSE_SAMPLING,
    PURPOSE_SHARED,
    PURPOSE_SHUFFLE,
    PURPOSE_WALKS,
    keyed_dropout,
    keyed_permutation,
    keys,
    subkeys,
    uniform,
)
from sparse_engine.pattern import SparsePattern
from sparse_engine.sampler import METHODS, WEIGHTED_METHODS, Method, Sample, sample_neighbors
from sparse_engine.walks import Visited, most_visited

__all__ = [
    "BACKENDS",
    "METHODS",
    "PURPOSE_DROPOUT",
    "PURPOSE_EXPANDER",
    "PURPOSE_FEATURES",
    "PURPOSE_INIT",
    "PURPOSE_SAMPLING",
    "PURPOSE_SHARED",
    "PURPOSE_SHUFFLE",
    "PURPOSE_WALKS",
    "WEIGHTED_METHODS",
    "Method",
    "Sample",
    "SparsePattern",
    "Visited",
    "aggregate",
    "auto_backends",
    "fastest_backend",
    "keyed_dropout",
    "keyed_permutation",
    "keys",
    "most_visited",
    "resolve_backend",
    "sample_neighbors",
    "sparse_attention",
    "subkeys",
    "uniform",
]
