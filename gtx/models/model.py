"""The model that a config names: an encoder, a family's layers and a classifier."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from gtx.config import ModelConfig
from gtx.models.layers import MicroBatchNorm
from gtx.models.registry import family_named
from gtx.parallel.context import LayerContext, WaveContext


class GraphModel(nn.Module):
    """An encoder, layers and a classifier; the encoder and classifier are plain rows and, for GCN, absent.

    Positional encodings are projected and added to the encoded features, as in Dwivedi and Bresson 2021 (arXiv
    2012.09699).
    """

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int):
        super().__init__()
        family = family_named(config.name)
        self.uses_edges = family.uses_edges
        self.input_dropout = config.input_dropout
        self.encoder: nn.Module = nn.Linear(num_features, config.width)
        self.classifier: nn.Module = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, num_classes))
        if not family.has_ends:
            self.encoder, self.classifier = nn.Identity(), nn.Identity()
        self.num_features, columns = num_features, config.encodings.columns
        encoded = config.width if family.has_ends else num_features
        self.encodings = nn.Linear(columns, encoded, bias=False) if columns else None
        self.layers = nn.ModuleList(family.layers(config, num_features, num_classes))

    @property
    def norms(self) -> list[MicroBatchNorm]:
        """Batch norms by their number."""
        found = [m for m in self.modules() if isinstance(m, MicroBatchNorm)]
        return sorted(found, key=lambda norm: norm.number)

    def forward(self, x: Tensor, token: Tensor, wave: WaveContext) -> tuple[Tensor, Tensor]:
        """x: features and then encodings `[n, F + columns]` of this rank's rows. token: scalar that threads through all
        exchanges.

        Returns logits `[rows after the last layer, classes]` and the token.
        """
        x = self.encode(x, wave.input)
        for index, layer in enumerate(self.layers):
            x, token = wave.run(layer, index, x, token)
        return cast(Tensor, self.classifier(x)), token

    def encode(self, x: Tensor, context: LayerContext) -> Tensor:
        """The rows before the first layer, `[n, width]`, of inputs `x [n, F + columns]`."""
        features, encodings = x[:, : self.num_features], x[:, self.num_features :]
        x = self.encoder(context.dropout(features, self.input_dropout))
        return x if self.encodings is None else x + self.encodings(encodings)
