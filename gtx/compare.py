"""Two runs side by side, as tables for a terminal: what was asked, where it ran, what it cost and what came out.

Not here: one run's report (`report.py`) and its page (`page.py`). Only reports and `config.yaml` are read, no records.

Losses matter most: runs that compute the same must have the same losses under any plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtx.report import load_report
from gtx.words import MISSING, bytes_text, counted, figure_text, seconds_text, share_text, value_text
from monitor.records import EXCHANGE_KINDS, PHASES

# Settings that say where and how a run computes, not what. All others are mathematics.
PLACEMENT = (
    *("name", "plan", "scheduler", "monitor", "partition.cache", "data.root", "model.backend", "train.eval_every"),
    *("engine.name", "engine.device", "engine.zero_stage", "engine.offload_optimizer", "engine.timeout_s"),
    "engine.threads",
)
# Up to this relative difference losses count as equal: rounding, after it went through many steps.
ROUNDING = {"float64": 1e-8, "float32": 1e-3}
COARSE_ROUNDING = 0.05  # bf16 and fp16


def compare_runs(a: Path, b: Path, console: Console | None = None) -> None:
    """Print what differs between the runs of two folders, in tables that fit 100 columns.

    Raises ValueError with one line where a folder is no run's.
    """
    console = console or Console()
    one, other = load_report(a), load_report(b)
    for letter, folder, report in (("A", a, one), ("B", b, other)):
        run = report["run"]
        line = (
            f"{letter}  {run['name']}: {report['model'].get('name', 'model')} on {counted(run['world_size'], 'rank')}"
        )
        console.print(Text(f"{line}, {counted(len(report['losses']), 'step')}, {folder}"))
    configs = [_read_config(folder, console) for folder in (a, b)]
    mathematics: list[str] | None = None
    if configs[0] is not None and configs[1] is not None:
        differing = _differing(configs[0], configs[1])
        _print_config(differing, console)
        mathematics = [key for key in differing if not _only_places(key, configs[0], configs[1])]
    console.print(_plan_table(one, other))
    console.print(_seconds_table(one, other))
    console.print(_bytes_table(one, other))
    console.print(_results_table(one, other))
    console.print(Text(losses_line(one, other, mathematics)))


def losses_line(one: Mapping[str, Any], other: Mapping[str, Any], mathematics: Sequence[str] | None) -> str:
    """Whether two reports have the same losses, and whether they should.

    mathematics: the config keys that differ and change what is computed; None where that is not known.
    """
    if not one["losses"] or not other["losses"]:
        return "losses: one of the runs has none"
    pairs = list(zip(map(float, one["losses"]), map(float, other["losses"]), strict=False))
    worst = max(range(len(pairs)), key=lambda step: _relative(*pairs[step]))
    difference = _relative(*pairs[worst])
    precisions = [report["run"]["precision"] for report in (one, other)]
    rounding = max(ROUNDING.get(precision, COARSE_ROUNDING) for precision in precisions)
    steps = counted(len(pairs), "step")
    if len(one["losses"]) != len(other["losses"]):
        steps = f"the first {steps} (A has {len(one['losses']):,}, B {len(other['losses']):,})"
    if difference == 0.0:
        said = f"losses: equal to the last digit over {steps}"
    else:
        said = f"losses: largest relative difference {difference:.2g} over {steps}, at step {worst}"
        said += ", equal but for rounding" if difference <= rounding else ", not equal"
    if mathematics is None:
        return said
    if mathematics:
        shown = ", ".join(mathematics[:3]) + (f" and {len(mathematics) - 3} more" if len(mathematics) > 3 else "")
        return f"{said}; the configs ask for different mathematics: {shown}"
    if difference <= rounding:
        return f"{said}, as they should be: the configs ask for the same mathematics"
    return f"{said}, and they should be: the configs ask for the same mathematics"


# What differs ---------------------------------------------------------------------------------------------------------


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config by `a.b` keys. An empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def _read_config(folder: Path, console: Console) -> dict[str, Any] | None:
    """A run's config by `a.b` keys; None, and a line says why, where it cannot be read."""
    path = folder / "config.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        console.print(Text(f"configs are not compared: cannot read {path}: {reason}"))
        return None
    return flatten(data) if isinstance(data, Mapping) else {}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The keys that differ, with both values as texts."""
    return {
        key: (_setting(one, key), _setting(other, key))
        for key in dict.fromkeys([*one, *other])
        if (key in one, one.get(key)) != (key in other, other.get(key))
    }


def _setting(config: Mapping[str, Any], key: str) -> str:
    return value_text(config[key]) if key in config else "not set"


def _only_places(key: str, *configs: Mapping[str, Any]) -> bool:
    """Whether a setting changes where or how a run computes, not what. Cluster batches are made of partitions."""
    if key.startswith("partition.") and not any(config.get("batch.kind") == "cluster" for config in configs):
        return True
    return any(key == placement or key.startswith(f"{placement}.") for placement in PLACEMENT)


def _relative(a: float, b: float) -> float:
    """|a - b| over the larger of both; 0 for equals, nan among them; infinite where only one is a finite number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


# Tables ---------------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, numbers: bool = True) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0], overflow="fold", max_width=36)
    for column in columns[1:]:
        table.add_column(column, justify="right" if numbers else "left", overflow="fold", max_width=28)
    return table


def _print_config(differing: Mapping[str, tuple[str, str]], console: Console) -> None:
    if not differing:
        console.print("the configs are the same")
        return
    table = _table("config, where it differs", "key", "A", "B", numbers=False)
    for key, (one, other) in differing.items():
        table.add_row(Text(key), Text(one), Text(other))
    console.print(table)


def _plan_table(one: Mapping[str, Any], other: Mapping[str, Any]) -> Table:
    table = _table("plan", "what", "A", "B", numbers=False)
    columns = [_plan_facts(report) for report in (one, other)]
    for name in dict.fromkeys([*columns[0], *columns[1]]):
        table.add_row(name, *(Text(column.get(name, MISSING)) for column in columns))
    return table


def _plan_facts(report: Mapping[str, Any]) -> dict[str, str]:
    plan, scheduler = report["plan"], report["scheduler"] or {}
    modes = Counter(partition["mode"] for partition in report["partitions"])
    return {
        "asked for": str(scheduler.get("setting", plan["mode"])),
        "fingerprint at last": plan["fingerprint"],
        "partitions": ", ".join(f"{number} {mode}" for mode, number in sorted(modes.items())),
        "waves, rounds": f"{plan['num_waves']}, {plan['num_rounds']}",
        "checkpointing": plan["checkpointing"],
        "changes of plan": str(max(len(scheduler.get("plans", [])) - 1, 0)),
        "ranks": str(report["run"]["world_size"]),
    }


def _seconds_table(one: Mapping[str, Any], other: Mapping[str, Any]) -> Table:
    """Medians of the slowest rank, then means over ranks and steps."""
    table = _table("seconds a step", "what", "A", "B", "B / A")
    columns = [report["measured"]["ranks"] for report in (one, other)]
    for name, key in (("median of the slowest rank", "step_s"), ("busy, median of the busiest", "busy_s")):
        _add(table, name, [max(rank[key]["median"] for rank in ranks) for ranks in columns], seconds_text)
    table.add_section()
    for phase in PHASES:
        values = [_mean_over_ranks(ranks, phase) for ranks in columns]
        if any(values):
            _add(table, phase, values, seconds_text)
    table.caption = "phases: means over ranks and steps"
    table.caption_justify = "left"
    return table


def _mean_over_ranks(ranks: Sequence[Mapping[str, Any]], phase: str) -> float:
    return math.fsum(r["phases"][phase]["total"] / r["num_steps"] for r in ranks if phase in r["phases"]) / len(ranks)


def _bytes_table(one: Mapping[str, Any], other: Mapping[str, Any]) -> Table:
    table = _table("bytes", "what", "A", "B", "B / A")
    columns = [report["measured"]["ranks"] for report in (one, other)]
    for kind in EXCHANGE_KINDS:
        values = [
            math.fsum(r["exchanges"].get(kind, {"sent_bytes": 0})["sent_bytes"] / r["num_steps"] for r in ranks)
            for ranks in columns
        ]
        if any(values):
            _add(table, f"sent a step, exchange {kind}", values, bytes_text)
    peaks = [max(rank["peak_memory_bytes"] for rank in ranks) for ranks in columns]
    _add(table, "peak memory of a rank", peaks, bytes_text)
    return table


def _results_table(one: Mapping[str, Any], other: Mapping[str, Any]) -> Table:
    table = _table("results", "what", "A", "B", "B - A", "relative")
    best = [report["best"] or {} for report in (one, other)]
    metric = one["metric"] if one["metric"] == other["metric"] else "score"
    rows: dict[str, list[Any]] = {
        "final loss": [report["losses"][-1] if report["losses"] else None for report in (one, other)],
        f"best validation {metric}": [entry.get("val_score") for entry in best],
        f"test {metric} there": [entry.get("test_score") for entry in best],
    }
    for name, values in rows.items():
        cells = [MISSING, MISSING]
        if None not in values:
            a, b = map(float, values)
            cells = [f"{b - a:+.4g}", share_text((b - a) / abs(a) if a else math.nan)]
        table.add_row(name, *map(figure_text, values), *cells)
    table.add_row("at step", *(str(entry.get("step", MISSING)) for entry in best), "", "")
    return table


def _add(table: Table, name: str, values: Sequence[float], text: Callable[[float], str]) -> None:
    """A row of a quantity of both runs and their ratio."""
    a, b = values
    table.add_row(name, text(a), text(b), f"{b / a:.2f}x" if a else MISSING)
