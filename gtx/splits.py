"""Draws the nodes to train, validate and test on where a graph comes without a split.

Not here: graphs with splits of their own (`packed` in `datasets.py`, a column of a table in `frames.py`).
"""

from __future__ import annotations

import numpy as np

from gtx.graphs import UNLABELLED, BoolArray, Int64Array

TRAIN_SHARE, VAL_SHARE = 0.2, 0.2  # of each class; the rest is test


def stratified_split(labels: Int64Array, generator: np.random.Generator) -> tuple[BoolArray, BoolArray, BoolArray]:
    """(train, val, test) bool [N]: of each class 20 / 20 / 60 %, at least one training node; no label, no split."""
    sizes = np.bincount(labels[labels != UNLABELLED])
    shuffled = generator.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]  # by class, at random within
    order = order[np.count_nonzero(labels == UNLABELLED) :]
    label = labels[order]
    rank = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[label]
    num_train = np.maximum(1, np.round(TRAIN_SHARE * sizes)).astype(np.int64)[label]
    num_val = np.round(VAL_SHARE * sizes).astype(np.int64)[label]
    masks = np.zeros((3, len(labels)), dtype=np.bool_)
    masks[0, order] = rank < num_train
    masks[1, order] = (rank >= num_train) & (rank < num_train + num_val)
    masks[2, order] = rank >= num_train + num_val
    return masks[0], masks[1], masks[2]


def split_generator(seed: int, split: int) -> np.random.Generator:
    """The stream that split number `split` is drawn from, whichever graph it is of."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, 0, split])))
