"""The models by the name that a config gives them. A new one of gtx is a file beside this one and a line here.

The names stand in `gtx.config.MODELS` as well, what a model costs in `scheduler/cost.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gtx.models import exphormer, gat, gcn, gps, gt, mlp, nagphormer, polynormer, sage, sgformer
from gtx.models.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GT": gt.FAMILY,
        "GPS": gps.FAMILY,
        "GCN": gcn.FAMILY,
        "SAGE": sage.FAMILY,
        "GAT": gat.FAMILY,
        "MLP": mlp.FAMILY,
        "SGFormer": sgformer.FAMILY,
        "Polynormer": polynormer.FAMILY,
        "Exphormer": exphormer.FAMILY,
        "NAGphormer": nagphormer.FAMILY,
    }
)


def family_named(name: str) -> Family:
    """The family that `model.name` means: a built-in one, or `FAMILY` of the Python file at that path.

    Raises ValueError with one line if the file is not there, does not run, or has no `FAMILY`.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    path = Path(name).resolve()
    if not path.is_file():
        raise ValueError(f"model.name is {name!r}, and there is no file {path}")
    module_name = f"gtx_own_model_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None  # it ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle look modules up by name
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ValueError(f"model.name: {name} does not run: {type(error).__name__}: {error}") from error
    family = getattr(sys.modules[module_name], "FAMILY", None)
    if not isinstance(family, Family):
        found = "has no FAMILY" if family is None else f"has a FAMILY that is a {type(family).__name__}"
        raise ValueError(f"model.name: {name} {found}; write FAMILY = gtx.models.Family(...) there")
    return family
