"""The models, as layers whose parts are row-wise, edge-wise or sums over a micro-batch; a file for each family.

Models know nothing of ranks: every layer takes rows and a `LayerContext`. Not here: the attention itself
(`sparse_engine/`), losses and scores (`gtx/tasks.py`).
"""

from gtx.models.exphormer import ExphormerLayer
from gtx.models.family import Family
from gtx.models.gat import GATLayer
from gtx.models.gcn import GCNLayer
from gtx.models.gps import GPSLayer
from gtx.models.gt import GTLayer
from gtx.models.layers import FeedForward, LinearAttention, LocalMean, MicroBatchNorm
from gtx.models.mlp import MLPLayer
from gtx.models.model import GraphModel
from gtx.models.nagphormer import NAGphormerLayer
from gtx.models.polynormer import PolynormerGlobalLayer, PolynormerLocalLayer
from gtx.models.registry import FAMILIES, family_named
from gtx.models.sage import SAGELayer
from gtx.models.sgformer import SGFormerLayer
from gtx.parallel.context import LayerContext

__all__ = [
    "FAMILIES",
    "ExphormerLayer",
    "Family",
    "FeedForward",
    "GATLayer",
    "GCNLayer",
    "GPSLayer",
    "GTLayer",
    "GraphModel",
    "LayerContext",
    "LinearAttention",
    "LocalMean",
    "MLPLayer",
    "MicroBatchNorm",
    "NAGphormerLayer",
    "PolynormerGlobalLayer",
    "PolynormerLocalLayer",
    "SAGELayer",
    "SGFormerLayer",
    "family_named",
]
