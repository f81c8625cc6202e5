"""What a family of models is to the rest of gtx: its layers, and what else must be known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from gtx.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """layers: from the config, the number of features and that of classes, `config.layers` modules that are called as
    `layer(x [n_src, columns], LayerContext)` and return `[n_dst, columns]`.

    uses_edges: whether any layer does edge-wise work. has_ends: whether a linear encoder comes before the layers and a
    norm and a linear classifier after them; the layers take features and give logits where not. costs: the built-in
    model whose cost formulas the scheduler starts from; what was measured corrects them.
    """

    layers: Callable[[ModelConfig, int, int], Sequence[nn.Module]]
    uses_edges: bool = True
    has_ends: bool = True
    costs: str = "GT"
