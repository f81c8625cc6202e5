"""GCN: graph convolutions from the features to the classes, without an encoder or a classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.family import Family
from gtx.models.layers import normalised_sum
from gtx.parallel.context import LayerContext


class GCNLayer(nn.Module):
    """`D^-1/2 A D^-1/2 X W + b` (Kipf and Welling 2017), degrees those of the whole graph."""

    def __init__(self, in_dim: int, out_dim: int, dropout: float, last: bool):
        super().__init__()
        self.weight = nn.Linear(in_dim, out_dim, bias=False)
        nn.init.xavier_uniform_(self.weight.weight)
        self.bias = _Bias(out_dim)
        self.dropout, self.last = dropout, last

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        projected = self.weight(context.dropout(x, self.dropout))
        out: Tensor = self.bias(normalised_sum(projected, context))
        return out if self.last else F.relu(out)


class _Bias(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def _layers(config: ModelConfig, num_features: int, num_classes: int) -> list[nn.Module]:
    dims = [num_features, *[config.width] * (config.layers - 1), num_classes]
    last = config.layers - 1
    return [GCNLayer(dims[i], dims[i + 1], config.dropout, i == last) for i in range(config.layers)]


FAMILY = Family(_layers, has_ends=False, costs="GCN")
