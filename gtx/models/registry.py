"""The models by the name that a config gives them. A new one is a file beside this one and a line here.

The names stand in `gtx.config.ModelConfig` as well, what a model costs in `scheduler/cost.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gtx.models import gat, gcn, gps, gt, mlp, sage
from gtx.models.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"GT": gt.FAMILY, "GPS": gps.FAMILY, "GCN": gcn.FAMILY, "SAGE": sage.FAMILY, "GAT": gat.FAMILY, "MLP": mlp.FAMILY}
)
