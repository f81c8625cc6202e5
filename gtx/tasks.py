"""Node classification: the loss of target rows and the score of a split.

Not here: which rows are targets (`batches.py`) and how ranks add up (`parallel/executor.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Metric = Literal["accuracy", "roc_auc"]


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy of `logits [n, classes]` in at least float32; the caller divides by the global count."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, reduction="sum")


def score(
    metric: Metric, predictions: Sequence[npt.NDArray[np.float64]], labels: npt.NDArray[np.int64]
) -> float | None:
    """The score of one split in percent, or None where it is not defined (no node, or one class only for ROC AUC).

    predictions: blocks `[n_i, classes]` of logits whose rows together match `labels [n]`.
    """
    if len(labels) == 0:
        return None
    logits = np.concatenate(list(predictions))
    if metric == "accuracy":
        return float((logits.argmax(1) == labels).mean() * 100.0)
    if len(np.unique(labels)) < 2:
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, logits[:, 1] - logits[:, 0]) * 100.0)


def per_class(
    logits: npt.NDArray[np.float64], labels: npt.NDArray[np.int64], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Precision, recall and F1 of each class in percent, a class being predicted where its logit is the largest.

    logits: `[n, classes]`. labels: `[n]`. names: one per class. A class that is never predicted has precision 0, one
    without a node recall 0, as scikit-learn has it; `nodes` tells the latter.
    """
    from sklearn.metrics import precision_recall_fscore_support

    found = precision_recall_fscore_support(
        labels, logits.argmax(1), labels=np.arange(len(names)), average=None, zero_division=0.0
    )
    return [
        {"class": name, "nodes": int(n), "precision": 100.0 * p, "recall": 100.0 * r, "f1": 100.0 * f}
        for name, p, r, f, n in zip(names, *(values.tolist() for values in found), strict=True)
    ]
