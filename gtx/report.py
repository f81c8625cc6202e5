"""The strategy report: what a run computed and where, what it cost, and whether the result equals one rank's.

Not here: how figures are measured (`monitor/`) and which are written while the run lasts (`monitor/sinks.py`).

`strategy_report.schema.json` beside this file fixes the format; a change that breaks readers raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtx.words import bytes_text, counted, figure_text, seconds_text, share_text, value_text
from monitor.records import EXCHANGE_KINDS, PHASES, StepRecord, json_number

SCHEMA_VERSION = 3
REPORT_NAME = "strategy-report.json"
EXACTNESS = {
    "exact": "equal to one rank, sums reordered",
    "tolerance": "equal to one rank within the rounding of a low precision",
    "approximate": "stale or dropped edges: not what one rank computes",
}

_SCHEMA_PATH = Path(__file__).with_name("strategy_report.schema.json")
_MAX_RANK_COLUMNS = 4
_MAX_ROWS = 32


# Making it ------------------------------------------------------------------------------------------------------------


def build_report(
    *,
    run: Mapping[str, Any],
    versions: Mapping[str, Any],
    devices: Sequence[Mapping[str, Any]],
    graph: Mapping[str, Any],
    partitions: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    steps: Sequence[StepRecord],
    evaluations: Sequence[Mapping[str, Any]],
    exactness: str,
    share_of_edges_attended: float,
    model: Mapping[str, Any],
    losses: Sequence[float],
    partitioning: Mapping[str, Any] | None = None,
    metric: str = "score",
    scheduler: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of a run as JSON types. The schema describes every block.

    graph: of the graph's summary, any keys.
    partitioning: of the partition facts, any keys; its lists per part are left out, since `partitions` holds them.
    partitions: per partition `mode, ranks, layer_split, rows, edges, halo_rows`.
    steps: the records of all ranks, in any order.
    evaluations: `step, val_score, test_score` each, more is better; the best one with its test nodes `per_class`.
    exactness: a class of `EXACTNESS`, or `class: reason`.
    metric: what the scores are.
    scheduler: what was searched, seen and decided, see `gtx/adapt.py`; None where no run was.
    evaluation: how the scores came about, see `gtx/evaluation.py`; None where no run was.

    Raises ValueError if `steps` do not hold the same steps for every rank of the world, each once, or exactness names
    no known class.
    """
    report = {
        "schema_version": SCHEMA_VERSION,
        "run": run,
        "versions": versions,
        "devices": devices,
        "graph": graph,
        "partitioning": {
            key: value for key, value in (partitioning or {}).items() if key not in ("rows", "edges", "halo_rows")
        },
        "model": model,
        "plan": plan,
        "partitions": partitions,
        "measured": measure(steps, int(run["world_size"])),
        "share_of_edges_attended": share_of_edges_attended,
        "exactness": _exactness(exactness),
        "losses": losses,
        "evaluations": evaluations,
        "metric": metric,
        "best": best_evaluation(evaluations),
        "evaluation": evaluation,
        "scheduler": scheduler,
    }
    plain: dict[str, Any] = _plain(report)
    return plain


def measure(steps: Sequence[StepRecord], world_size: int) -> dict[str, Any]:
    """The report's block `measured`: medians, 95th percentiles and totals per rank.

    Where there are more steps, the first is left out: it pays for compiling and first allocations. A phase that a step
    did not have counts as 0 s there. Percentiles interpolate linearly, as `numpy.percentile` does.
    """
    by_rank: dict[int, list[StepRecord]] = {rank: [] for rank in range(world_size)}
    for record in sorted(steps, key=lambda record: record.step):
        if record.rank not in by_rank:
            raise ValueError(
                f"the records hold rank {record.rank}, the world has {world_size} ranks; pass one run's records"
            )
        by_rank[record.rank].append(record)
    numbers = [record.step for record in by_rank[0]]
    if not numbers:
        raise ValueError("a report needs at least one step of rank 0; nothing was measured")
    for rank, records in by_rank.items():
        if [record.step for record in records] != numbers:
            raise ValueError(
                f"rank {rank} has the records of {len(records)} steps, rank 0 of {len(numbers)}; "
                "gather every step of every rank"
            )
    if len(set(numbers)) != len(numbers):
        twice = next(step for step in numbers if numbers.count(step) > 1)
        raise ValueError(f"the records hold step {twice} twice; pass the records of one run, each step once")
    leave_out = len(numbers) > 1
    ranks = [_measure_rank(rank, records, leave_out) for rank, records in by_rank.items()]
    busy = [entry["busy_s"]["total"] for entry in ranks]
    slowest = int(np.argmax(busy))
    mean = math.fsum(busy) / len(busy)
    return {
        "first_step_left_out": leave_out,
        "plan_fingerprints": list(dict.fromkeys(record.plan_fingerprint for record in by_rank[0])),
        "ranks": ranks,
        "slowest_rank": {"rank": slowest, "busy_over_mean": busy[slowest] / mean if mean else 1.0},
    }


def _measure_rank(rank: int, records: Sequence[StepRecord], leave_out: bool) -> dict[str, Any]:
    kept = records[1:] if leave_out else records
    phases = {name: [record.phases.get(name, 0.0) for record in kept] for name in PHASES}
    exchanges: dict[str, dict[str, Any]] = {}
    for kind in EXCHANGE_KINDS:
        of_kind = [exchange for record in kept for exchange in record.exchanges if exchange.kind == kind]
        if of_kind:
            exchanges[kind] = {
                "sent_bytes": sum(exchange.sent_bytes for exchange in of_kind),
                "received_bytes": sum(exchange.received_bytes for exchange in of_kind),
                "messages": sum(exchange.messages for exchange in of_kind),
                "seconds": math.fsum(exchange.seconds for exchange in of_kind),
                "wait_s": math.fsum(exchange.wait_s for exchange in of_kind),
            }
    return {
        "rank": rank,
        "num_steps": len(kept),
        "step_s": _seconds([record.wall_s for record in kept]),
        "busy_s": _seconds([max(record.busy_s, 0.0) for record in kept]),
        "phases": {name: _seconds(values) for name, values in phases.items() if any(values)},
        "exchanges": exchanges,
        "rows_computed": sum(record.rows_computed for record in kept),
        "edges_computed": sum(record.edges_computed for record in kept),
        "peak_memory_bytes": max(record.peak_memory_bytes for record in records),
        "memory_source": records[-1].memory_source,
    }


def _seconds(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": float(np.median(values)),
        "p95": float(np.percentile(values, 95)),
        "total": math.fsum(values),
    }


def _exactness(text: str) -> dict[str, str]:
    kind, _, reason = (part.strip() for part in text.partition(":"))
    if kind not in EXACTNESS:
        raise ValueError(f"exactness is {text!r}; begin with one of {', '.join(EXACTNESS)}")
    return {"class": kind, "reason": reason or EXACTNESS[kind]}


def best_evaluation(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The evaluation to read the test score at. A score that is no finite number is never the best."""
    scored = [e for e in evaluations if e["val_score"] is not None and math.isfinite(float(e["val_score"]))]
    if not scored:
        return None
    best = max(scored, key=lambda evaluation: (evaluation["val_score"], -evaluation["step"]))
    return {key: best[key] for key in ("step", "val_score", "test_score")}


def _plain(value: Any) -> Any:
    """JSON types: tuples become lists, numpy scalars Python's, and numbers that JSON lacks strings."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return json_number(value) if isinstance(value, float) else value


# Keeping it -----------------------------------------------------------------------------------------------------------


def check_report(report: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first place where a report departs from the schema."""
    error = jsonschema.exceptions.best_match(_validator().iter_errors(report))
    if error is not None:
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
        raise ValueError(f"report{where} does not fit {_SCHEMA_PATH.name}: {error.message}")


def write_report(report: Mapping[str, Any], folder: str | Path) -> Path:
    """Write `strategy-report.json` into the folder, whole or not at all. Raises ValueError if it fails the schema."""
    check_report(report)
    path = Path(folder) / REPORT_NAME
    draft = path.with_name(f".{REPORT_NAME}.{os.getpid()}")
    draft.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path


def add_beside(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put models that ran beside a run's own into its report, each in the place of an earlier run of it."""
    report = load_report(folder)
    kept = {row["model"]: row for row in [*report["evaluation"]["beside"], *_plain(list(rows))]}
    report["evaluation"]["beside"] = list(kept.values())
    write_report(report, folder)
    return report


def load_report(folder: str | Path) -> dict[str, Any]:
    """The report of a run folder. Raises ValueError if it is missing, no report, or of another version."""
    path = Path(folder) / REPORT_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} holds no {REPORT_NAME}; give the folder of a run that has ended (it is written at the end)"
        ) from None
    try:
        report = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    version = report.get("schema_version") if isinstance(report, dict) else None
    if version is None:
        raise ValueError(f"{path} is no strategy report: it has no schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {version!r}, this gtx reads {SCHEMA_VERSION}; "
            "read it with the gtx that wrote it"
        )
    check_report(report)
    loaded: dict[str, Any] = report
    return loaded


@cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(_SCHEMA_PATH.read_text(encoding="utf-8")))


# Showing it -----------------------------------------------------------------------------------------------------------


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print a report as tables that fit 100 columns."""
    run, best = report["run"], report["best"]
    title = (
        f"{run['name']}: {report['model'].get('name', 'model')} on {run['world_size']} rank(s), {run['seconds']:.1f} s"
    )
    console.print(Text(title, style="bold"))
    console.print(_run_table(report))
    console.print(_devices_table(report))
    console.print(_facts_table("graph", report["graph"]))
    if report["partitioning"]:
        console.print(_facts_table("partitioning", report["partitioning"]))
    console.print(_partitions_table(report))
    console.print(_phases_table(report["measured"]))
    if any(entry["exchanges"] for entry in report["measured"]["ranks"]):
        console.print(_exchanges_table(report["measured"]))
    memory = report["plan"].get("memory", {})
    console.print(_ranks_table(report["measured"], memory.get("predicted_bytes", [])))
    for table in _scheduler_tables(report["scheduler"] or {}):
        console.print(table)
    if report["evaluation"] is not None:
        console.print(_evaluation_table(report))
    for evaluation in report["evaluations"]:
        if "per_class" in evaluation:
            console.print(_classes_table(evaluation["step"], evaluation["per_class"]))
    if report["evaluation"] is not None and report["evaluation"]["beside"]:
        console.print(beside_table(report))
    slowest = report["measured"]["slowest_rank"]
    lines = [f"slowest rank      {slowest['rank']}, busy {slowest['busy_over_mean']:.2f}x the mean of all ranks"]
    lines.append(f"edges attended    {100 * report['share_of_edges_attended']:.2f} % of the graph's")
    lines.append(f"exactness         {report['exactness']['class']}: {report['exactness']['reason']}")
    if report["losses"]:
        first, last = figure_text(report["losses"][0]), figure_text(report["losses"][-1])
        lines.append(f"loss              {first} at first, {last} at last, {len(report['losses'])} steps")
    if best is not None:
        lines.append(
            f"best {report['metric']:<12} validation {figure_text(best['val_score'])} at step {best['step']}, "
            f"test {figure_text(best['test_score'])} there ({len(report['evaluations'])} evaluations)"
        )
    console.print(Text("\n".join(lines)))


def evaluation_facts(report: Mapping[str, Any]) -> dict[str, str]:
    """How the scores came about, as names and texts. report: with a block `evaluation`."""
    evaluation, graph = report["evaluation"], report["graph"]
    split, seconds = evaluation["split"], evaluation["seconds"]
    facts = {"split": split["kind"]}
    if split["number"] is not None:
        facts["split"] += f", number {split['number']}"
    if split["seed"] is not None:
        facts["split"] += f", drawn with seed {split['seed']}"
    if "label_rate" in graph:
        facts["label rate"] = (
            f"{graph['label_rate']:.2%} ({graph['num_train']:,} of {graph['num_nodes']:,} nodes train)"
        )
    facts |= {check["question"]: f"{check['answer']}: {check['because']}" for check in evaluation["checks"]}
    preparing = [
        f"{name.replace('_', ' ')} {seconds_text(took)}{' (reused)' if name in seconds['reused'] else ''}"
        for name, took in seconds["preparing"].items()
    ]
    facts["preparing took"] = ", ".join(preparing)
    facts["the steps took"] = ", ".join(
        f"{name} {seconds_text(seconds[name])}" for name in ("training", "compiling", "evaluating")
    )
    return facts


def _evaluation_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="how the scores came about", title_justify="left", title_style="bold", show_header=False)
    table.add_column(max_width=32)
    table.add_column(overflow="fold")
    for name, value in evaluation_facts(report).items():
        table.add_row(name, Text(value))
    return table


def beside_rows(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The run's own scores as an entry of `evaluation.beside`, and those entries."""
    best = report["best"] or {"step": None, "val_score": None, "test_score": None}
    own = {"model": report["model"].get("name", "model"), "parameters": report["model"].get("parameters")}
    return [{**own, "best_step": best["step"], **best, "told": "this run's own"}, *report["evaluation"]["beside"]]


def beside_table(report: Mapping[str, Any]) -> Table:
    """The run's own scores and those of the models that ran beside it."""
    title = f"{report['metric']} beside other models, each at its best validation score"
    table = _table(title, "model", "parameters", "best step", "val", "test", "what was kept")
    table.columns[-1].justify = "left"
    for row in beside_rows(report):
        scores = (figure_text(row[key]) for key in ("val_score", "test_score"))
        step = value_text(row["best_step"])
        table.add_row(Text(str(row["model"])), value_text(row["parameters"]), step, *scores, Text(row["told"]))
    return table


def _classes_table(step: int, classes: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(f"test nodes by class, best step {step}", "class", "nodes", "precision, %", "recall, %", "F1, %")
    for entry in classes[:_MAX_ROWS]:
        figures = (f"{entry[key]:.2f}" for key in ("precision", "recall", "f1"))
        table.add_row(Text(entry["class"]), str(entry["nodes"]), *figures)
    _note_rest(table, len(classes))
    return table


def _table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are words and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _facts_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Names and values, two pairs a line."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    pairs = [(str(name), value_text(value)) for name, value in facts.items()]
    for _ in range(2):
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", max_width=30)
    for index in range(0, len(pairs), 2):
        table.add_row(*(Text(cell) for pair in pairs[index : index + 2] for cell in pair))
    return table


def _run_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="run", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    run, plan, resumed = report["run"], report["plan"], report["run"].get("resumed")
    zero = "" if run["zero_stage"] is None else f", ZeRO {run['zero_stage']}, optimizer offload {run['offload']}"
    rows = {
        "command": run["command"],
        "started": f"{run['started']}, finished {run['finished']}",
        "engine": f"{run['engine']}{zero}, {run['precision']}, collectives {run['collectives']}",
        **({"resumed": f"at step {resumed['step']}, left by {resumed['world_size']} rank(s)"} if resumed else {}),
        "seed, config": f"{run['seed']}, {run['config_hash']}",
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version),
        "model": ", ".join(f"{name} {value_text(value)}" for name, value in report["model"].items()),
        "plan": f"{plan['mode']}, {plan['num_waves']} wave(s) in {plan['num_rounds']} round(s), "
        f"checkpointing {plan['checkpointing']}, fingerprint {plan['fingerprint']}",
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _devices_table(report: Mapping[str, Any]) -> Table:
    table = _table("devices", "rank", "kind", "name", "host", "memory", left=4)
    for device in report["devices"][:_MAX_ROWS]:
        memory = "unknown" if device["memory_bytes"] is None else bytes_text(device["memory_bytes"])
        table.add_row(*(Text(str(device[key])) for key in ("rank", "kind", "name", "host")), memory)
    _note_rest(table, len(report["devices"]))
    return table


def _partitions_table(report: Mapping[str, Any]) -> Table:
    table = _table(
        "plan by partition", "partition", "mode", "ranks", "layer split", "rows", "edges", "halo rows", left=4
    )
    for index, partition in enumerate(report["partitions"][:_MAX_ROWS]):
        table.add_row(
            str(index),
            partition["mode"],
            " ".join(map(str, partition["ranks"])),
            " ".join(map(str, partition["layer_split"])),
            *(f"{partition[key]:,}" for key in ("rows", "edges", "halo_rows")),
        )
    _note_rest(table, len(report["partitions"]))
    return table


def _phases_table(measured: Mapping[str, Any]) -> Table:
    """Median and 95th percentile by phase: a column a rank, or the mean and the highest where there are many."""
    ranks = measured["ranks"]
    few = len(ranks) <= _MAX_RANK_COLUMNS
    columns = [f"rank {entry['rank']}" for entry in ranks] if few else ["mean of ranks", "highest", "on rank"]
    table = _table(f"milliseconds a step, {'median / p95' if few else 'median'}", "phase", *columns)
    left_out = ", the first left out" if measured["first_step_left_out"] else ""
    table.caption = f"{ranks[0]['num_steps']} step(s){left_out}; busy: without waiting"
    table.caption_justify = "left"
    for name in (*PHASES, "step", "busy"):
        values = [entry[f"{name}_s"] if name in ("step", "busy") else entry["phases"].get(name) for entry in ranks]
        if not any(values):
            continue
        if name == "step":
            table.add_section()
        if few:
            cells = ["" if v is None else f"{1e3 * v['median']:.2f} / {1e3 * v['p95']:.2f}" for v in values]
        else:
            medians = [0.0 if v is None else v["median"] for v in values]
            highest = int(np.argmax(medians))
            cells = [f"{1e3 * sum(medians) / len(medians):.2f}", f"{1e3 * medians[highest]:.2f}", str(highest)]
        table.add_row(name, *cells)
    return table


def _scheduler_tables(scheduler: Mapping[str, Any]) -> Iterator[Table]:
    """What was tried and what was decided; nothing of a plan that was given."""
    if scheduler.get("probes"):
        table = _table("plans tried", "plan", "family", "measured", "predicted unseen", "error", left=2)
        for probe in scheduler["probes"][:_MAX_ROWS]:
            unseen = probe["held_out_s"]
            table.add_row(
                probe["plan"],
                probe["family"],
                seconds_text(probe["measured_s"]),
                seconds_text(unseen),
                share_text(None if unseen is None else unseen / probe["measured_s"] - 1.0),
            )
        _note_rest(table, len(scheduler["probes"]))
        yield table
    told = [d for d in scheduler.get("decisions", []) if d["candidates"] or d["verdict"] != "stay"]
    if told:
        table = _table("decisions", "step", "triggers", "verdict", "because", "measured", "promised", "became", left=4)
        for decision in told[:_MAX_ROWS]:
            times = (seconds_text(decision[key]) for key in ("measured_s", "promised_s", "outcome_s"))
            triggers = ", ".join(decision["triggers"])
            table.add_row(str(decision["step"]), triggers, decision["verdict"], Text(decision["rule"]), *times)
        _note_rest(table, len(told))
        spent, regret = scheduler["spent_s"], scheduler["regret"]
        cost = (spent["controller"] + spent["monitor"]) / max(scheduler["seconds"], 1e-9)
        table.caption = (
            f"{counted(len(scheduler['windows']), 'window')}; monitor and controller took {cost:.1%} of the run"
        )
        if regret is not None:
            table.caption += f"; the last plan was {share_text(regret['share'])} off the fastest that ran"
        table.caption_justify = "left"
        yield table


def _exchanges_table(measured: Mapping[str, Any]) -> Table:
    table = _table(
        "exchanges, mean of a step",
        "rank",
        "kind",
        "messages",
        "sent",
        "received",
        "milliseconds",
        "of it waiting",
        left=2,
    )
    rows = [(entry, kind, passed) for entry in measured["ranks"] for kind, passed in entry["exchanges"].items()]
    for entry, kind, passed in rows[:_MAX_ROWS]:
        num_steps = entry["num_steps"]
        table.add_row(
            str(entry["rank"]),
            kind,
            f"{passed['messages'] / num_steps:.1f}",
            bytes_text(passed["sent_bytes"] / num_steps),
            bytes_text(passed["received_bytes"] / num_steps),
            f"{1e3 * passed['seconds'] / num_steps:.2f}",
            f"{1e3 * passed['wait_s'] / num_steps:.2f}",
        )
    _note_rest(table, len(rows))
    return table


def _ranks_table(measured: Mapping[str, Any], predicted: Sequence[int]) -> Table:
    """predicted: peaks by rank, `[]` if there are none; those of a step, while evaluations count in measured ones."""
    columns = ("rank", "rows a step", "edges a step", *(("predicted",) if predicted else ()), "peak memory", "as")
    table = _table("work and memory", *columns)
    table.columns[-1].justify = "left"
    for entry in measured["ranks"][:_MAX_ROWS]:
        table.add_row(
            str(entry["rank"]),
            f"{entry['rows_computed'] / entry['num_steps']:,.0f}",
            f"{entry['edges_computed'] / entry['num_steps']:,.0f}",
            *((bytes_text(predicted[entry["rank"]]),) if predicted else ()),
            bytes_text(entry["peak_memory_bytes"]),
            entry["memory_source"],
        )
    _note_rest(table, len(measured["ranks"]))
    return table


def _note_rest(table: Table, num_rows: int) -> None:
    if num_rows > _MAX_ROWS:
        table.caption = f"{num_rows - _MAX_ROWS} more in {REPORT_NAME}"


def print_run(folder: Path) -> None:
    """Print the report of a run folder. Raises ValueError if it is missing, no report, or of another version."""
    print_report(load_report(folder), Console())
