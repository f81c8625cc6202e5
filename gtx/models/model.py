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

    With `edge_bias` a linear map of the edge features gives each layer's attention a bias per edge and head (a constant
    would cancel in the softmax, so it has none), as GAT has it in PyG, and Graphormer (arXiv 2106.05234) for paths.
    Positional encodings are projected and added to the encoded features, as in Dwivedi and Bresson 2021 (arXiv
    2012.09699). A node with several tokens has their rows side by side, `tokens * C` columns.
    """

    def __init__(self, config: ModelConfig, num_features: int, num_classes: int, num_edge_features: int = 0):
        super().__init__()
        family = family_named(config.name)
        self.uses_edges = family.uses_edges
        self.input_dropout = config.input_dropout
        self.encoder: nn.Module = nn.Linear(num_features, config.width)
        self.classifier: nn.Module = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, num_classes))
        if not family.has_ends:
            self.encoder, self.classifier = nn.Identity(), nn.Identity()
        self.num_features, self.tokens, columns = num_features, config.tokens, config.encodings.columns
        encoded = config.width if family.has_ends else num_features
        self.encodings = nn.Linear(columns, encoded, bias=False) if columns else None
        self.layers = nn.ModuleList(family.layers(config, num_features, num_classes))
        biased = config.layers if config.edge_bias else 0
        self.edge_biases = nn.ModuleList(nn.Linear(num_edge_features, config.heads, bias=False) for _ in range(biased))

    @property
    def norms(self) -> list[MicroBatchNorm]:
        """Batch norms by their number."""
        found = [m for m in self.modules() if isinstance(m, MicroBatchNorm)]
        return sorted(found, key=lambda norm: norm.number)

    def forward(self, x: Tensor, token: Tensor, wave: WaveContext) -> tuple[Tensor, Tensor]:
        """x: features of all tokens and then encodings `[n, tokens * F + columns]` of this rank's rows. token: scalar
        that threads through all exchanges.

        Returns logits `[rows after the last layer, classes]` and the token.
        """
        x = self.encode(x, wave.input)
        for index, layer in enumerate(self.layers):
            x, token = wave.run(
                layer, index, x, token, cast(nn.Linear, self.edge_biases[index]) if self.edge_biases else None
            )
        return cast(Tensor, self.classifier(x)), token

    def encode(self, x: Tensor, context: LayerContext) -> Tensor:
        """The rows before the first layer, `[n, tokens * width]`, of inputs `x [n, tokens * F + columns]`."""
        count = self.tokens * self.num_features
        features, encodings = context.dropout(x[:, :count], self.input_dropout), x[:, count:]
        if self.tokens > 1:
            features = features.unflatten(1, (self.tokens, self.num_features))
        x = self.encoder(features)  # [n, C], or [n, tokens, C]
        if self.encodings is not None:
            added = self.encodings(encodings)
            x = x + (added if self.tokens == 1 else added[:, None])
        return x.flatten(1)
