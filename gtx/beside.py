"""Another model in the place of the run's own, all else kept, so that a reader sees what graph and attention are worth.

Not here: when such runs happen (`runs.py`), training (`train.py`), how their scores are shown (`report.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gtx.config import MODELS, Config, EncodingsConfig, ModelConfig, PlanConfig

_TAKES_ENCODINGS = ("GT", "GPS")  # for the others edges are all there is to know of places, or nothing is
_SPLITS_WIDTH = ("GT", "GPS", "GAT")  # into heads


def parse_beside(text: str, config: Config) -> tuple[str, ...]:
    """The models that `mlp,gcn` names, each once, in order. Raises ValueError with one line."""
    known = {name.lower(): name for name in MODELS}
    names: dict[str, None] = {}
    for word in (word.strip() for word in text.split(",")):
        if word.lower() not in known:
            raise ValueError(f"--beside has {word!r}; give models such as mlp,gcn, known are {', '.join(known)}")
        name = known[word.lower()]
        if name == config.model.name:
            raise ValueError(f"--beside names {word}, which is the run's own model; leave it out")
        names[name] = None
    return tuple(names)


def beside_config(config: Config, name: str) -> tuple[Config, str]:
    """The config with the model `name` in place, and what of the model was kept and what was not, in words.

    Data, split, seed, steps, batches, sampling and optimizer stay. Width, layers, FFN width and dropout stay. Heads
    become the most that divide the width where the model needs that; encodings go where the model takes none. A plan
    is not searched for it: any plan computes the same.
    """
    model = config.model
    kept = [f"width {model.width}", f"{model.layers} layers"]
    if model.dropout or model.input_dropout:
        kept.append(f"dropout {model.dropout:g}, of inputs {model.input_dropout:g}")
    told = [f"kept: {', '.join(kept)}"]
    heads = model.heads
    if name in _SPLITS_WIDTH and model.width % heads:
        heads = next(h for h in range(min(heads, model.width), 0, -1) if model.width % h == 0)
        told.append(f"heads {heads}, not {model.heads}, to divide the width")
    encodings = model.encodings
    if encodings.kinds and name not in _TAKES_ENCODINGS:
        encodings = EncodingsConfig()
        told.append(f"without encodings ({', '.join(kind for kind, _ in model.encodings.kinds)})")
    taken = {key: getattr(model, key) for key in model.model_fields_set - {"options", "backend"}}
    changes: dict[str, Any] = {
        "name": f"{config.name}-beside-{name.lower()}",
        "model": ModelConfig(**{**taken, "name": name, "heads": heads, "encodings": encodings}),
    }
    if config.plan.searched:
        layout = ("micro_batches_per_wave", "waves_per_round", "checkpointing")
        given = {key: getattr(config.plan, key) for key in layout if key in config.plan.model_fields_set}
        changes["plan"] = PlanConfig(mode="graph", **given)
        engine = {"zero_stage": 0, "offload_optimizer": "none"}
        changes["engine"] = config.engine.model_copy(
            update={key: value for key, value in engine.items() if getattr(config.engine, key) == "auto"}
        )
        changes["scheduler"] = type(config.scheduler)()
        told.append(f"plan graph, not {config.plan.mode}")
    return config.model_copy(update=changes), "; ".join(told)


def beside_row(report: Mapping[str, Any], folder: str, told: str) -> dict[str, Any]:
    """A finished run as an entry of the report's `evaluation.beside`. folder: its name in the run's own."""
    best = report["best"] or {"step": None, "val_score": None, "test_score": None}
    return {
        "model": report["model"]["name"],
        "parameters": report["model"]["parameters"],
        "best_step": best["step"],
        "val_score": best["val_score"],
        "test_score": best["test_score"],
        "folder": folder,
        "told": told,
    }
