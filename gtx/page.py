"""A run as one HTML page to read offline and send on: the strategy report, the records and the traces, with figures.

Not here: how a run folder is read (`run_folder.py`), how figures are drawn (`figures.py`), how texts become HTML
(`markup.py`), and tables for a terminal (`report.py`). A section without data says why it has none.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gtx import figures
from gtx.figures import Mark, Ran, Words
from gtx.markup import document, drawn, empty, folded, say, table, tiles
from gtx.report import beside_rows, evaluation_facts
from gtx.run_folder import Run, read_run
from gtx.words import bytes_text, counted, figure_text, seconds_text, share_text, value_text
from monitor import StepRecord, Window, reduce_window

PAGE_NAME = "strategy-report.html"

_MAX_WINDOWS = 100  # where the run kept none and they are made here


def write_page(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder, whole or not at all; returns its path, `strategy-report.html` there unless given.

    Raises ValueError with one line if the folder is no run's, or `out` cannot be written.
    """
    run = read_run(run_dir)
    text = document(str(run.report["run"]["name"]), {heading: make(run) for heading, make in SECTIONS.items()})
    path = run_dir / PAGE_NAME if out is None else out
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
    return path


# Sections -------------------------------------------------------------------------------------------------------------


def _summary(run: Run) -> str:
    report, best = run.report, run.report["best"]
    facts, plan, ranks = report["run"], report["plan"], report["measured"]["ranks"]
    slowest = max(entry["step_s"]["median"] for entry in ranks)
    switches = max(len(run.scheduler.get("plans", [])) - 1, 0)
    figures_of_it = {
        "steps": f"{run.num_steps:,}",
        "median step, slowest rank": seconds_text(slowest),
        "final loss": figure_text(report["losses"][-1] if report["losses"] else None),
        f"best {report['metric']}, test": figure_text(best["test_score"] if best else None),
        "peak memory of a rank": bytes_text(max(entry["peak_memory_bytes"] for entry in ranks)),
        "changes of plan": f"{switches:,}",
    }
    zero = "" if facts["zero_stage"] is None else f", ZeRO {facts['zero_stage']}, optimizer offload {facts['offload']}"
    modes = Counter(partition["mode"] for partition in report["partitions"])
    hosts = Counter(f"{device['kind']} {device['name']} on {device['host']}" for device in report["devices"])
    of_model = {k: v for k, v in report["model"].items() if v is not None}
    of_graph = {k: v for k, v in report["graph"].items() if v is not None}
    rows = {
        "command": facts["command"],
        "started, finished": f"{facts['started']}, {facts['finished']} ({seconds_text(facts['seconds'])})",
        "ranks": f"{facts['world_size']} over {facts['collectives']}: "
        + ", ".join(f"{number} x {name}" for name, number in hosts.items()),
        "engine": f"{facts['engine']}{zero}, {facts['precision']}",
        "seed, config": f"{facts['seed']}, {facts['config_hash']}",
        "model": ", ".join(f"{name} {value_text(value)}" for name, value in of_model.items()),
        "graph": ", ".join(f"{name} {value_text(value)}" for name, value in of_graph.items()),
        "partitioning": ", ".join(f"{name} {value_text(value)}" for name, value in report["partitioning"].items()),
        "plan": f"{run.plan(plan['fingerprint'])}, asked for {run.setting}: "
        + ", ".join(f"{counted(number, 'partition')} {mode}" for mode, number in modes.items())
        + f"; {counted(plan['num_waves'], 'wave')} in {counted(plan['num_rounds'], 'round')}, "
        f"checkpointing {plan['checkpointing']}",
        "edges attended": f"{100 * report['share_of_edges_attended']:.2f} % of the graph's",
        "exactness": f"{report['exactness']['class']}: {report['exactness']['reason']}",
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version),
    }
    partitions = [
        [
            str(index),
            entry["mode"],
            " ".join(map(str, entry["ranks"])),
            " ".join(map(str, entry["layer_split"])),
            *(f"{entry[key]:,}" for key in ("rows", "edges", "halo_rows")),
        ]
        for index, entry in enumerate(report["partitions"])
    ]
    columns = ("partition", "mode", "ranks", "layer split", "rows", "edges", "halo rows")
    if report["evaluation"] is not None:
        rows |= evaluation_facts(report)
    beside = "" if report["evaluation"] is None or not report["evaluation"]["beside"] else _beside(report)
    return (
        tiles(figures_of_it)
        + table("The run", ("what*", "value*"), [[k, v] for k, v in rows.items() if v], 2)
        + beside
        + folded("The last plan by partition", table("The last plan by partition", columns, partitions, 4))
    )


def _beside(report: Mapping[str, Any]) -> str:
    """The models that ran beside the run's own."""
    rows = [
        [
            str(entry["model"]),
            entry["told"],
            *(value_text(entry[key]) for key in ("parameters", "best_step")),
            *(figure_text(entry[key]) for key in ("val_score", "test_score")),
        ]
        for entry in beside_rows(report)
    ]
    columns = ("model", "what was kept", "parameters", "best step", "validation", "test")
    return table(f"Beside other models, {report['metric']}", columns, rows, 2)


def _trace(run: Run) -> str:
    if not run.traces:
        return empty("no step was traced: the run folder holds no trace-<step>.json that has spans") + (
            say(run.traces_note) if run.traces_note else ""
        )
    parts = [say(run.traces_note)] if run.traces_note else []
    for index, trace in enumerate(run.traces):
        ends = {rank: max(span.end_s for span in spans) for rank, spans in trace.spans.items()}
        title = f"Step {trace.step} under {run.plan(trace.plan)}"
        totals: dict[int, dict[str, float]] = {rank: {} for rank in sorted(trace.spans)}
        for rank, spans in trace.spans.items():
            for span in spans:
                totals[rank][span.phase] = totals[rank].get(span.phase, 0.0) + span.end_s - span.begin_s
        last = max(ends, key=lambda rank: ends[rank])
        said = f"{title}: {seconds_text(ends[last])} on rank {last}, the last to end"
        svg = figures.gantt(Words(f"trace-{index}", title, f"{said}. The table below has the seconds."), trace.spans)
        phases = list(dict.fromkeys(phase for total in totals.values() for phase in total))
        rows = [[phase, *(seconds_text(total.get(phase)) for total in totals.values())] for phase in phases]
        shown = f"{said}. Each rank's clock starts with its step; spans under 0.1 % of it are merged."
        parts.append(drawn(svg, shown))
        parts.append(folded("Seconds", table(title, ("phase", *(f"rank {rank}" for rank in totals)), rows)))
    return "\n".join(parts)


def _changes(run: Run) -> list[dict[str, Any]]:
    """The plans in order: `from_step`, `end`, `plan`, `why`, and the switch that led there, if one was told."""
    scheduler = run.scheduler
    entries = scheduler.get("plans") or [{"from_step": 0, "fingerprint": run.report["plan"]["fingerprint"]}]
    decided = {d["step"] + 1: d for d in scheduler.get("decisions", []) if d["verdict"] in ("switch", "return")}
    switches = {switch["step"]: switch for switch in scheduler.get("switches", [])}
    num_probes = len(scheduler.get("probes", []))
    changes = []
    for index, entry in enumerate(entries):
        step = entry["from_step"]
        decision = decided.get(step)
        if decision is not None:
            why = f"{decision['verdict']} for {', '.join(decision['triggers']) or 'no trigger'}: {decision['rule']}"
        elif index < num_probes:
            why = "tried in the first steps"
        elif index:
            why = f"the fastest of {counted(num_probes, 'plan')} tried"
        else:
            why = "searched at the start" if run.setting in ("auto", "adaptive") else f"given: {run.setting}"
        end = entries[index + 1]["from_step"] if index + 1 < len(entries) else max(run.num_steps, step + 1)
        changes.append({
            "from_step": step, "end": end, "plan": run.plan(entry["fingerprint"]), "why": why,
            "switch": switches.get(step) if index else None,
        })  # fmt: skip
    return changes


def _plans(run: Run) -> str:
    changes = _changes(run)
    numbers = {change["from_step"]: index for index, change in enumerate(changes)}
    decisions = run.scheduler.get("decisions", [])
    marks = [
        Mark(
            d["step"],
            run.plan(d["plan_fingerprint"]),
            d["verdict"],
            numbers.get(d["step"] + 1) if d["verdict"] in ("switch", "return") else None,
        )
        for d in decisions
    ]
    costs_s = {c["from_step"]: c["switch"]["seconds"] for c in changes if c["switch"]}
    said = f"{counted(len(changes) - 1, 'change')} of plan in {counted(run.num_steps, 'step')}"
    if costs_s:
        said += f", which took {seconds_text(math.fsum(costs_s.values()))} together"
    svg = figures.plans(
        Words("plans", "Plan over time", f"{said}. The table below lists them."),
        [Ran(change["plan"], change["from_step"], change["end"]) for change in changes],
        marks,
        costs_s,
    )
    rows = [
        [
            str(index),
            change["plan"],
            f"{change['from_step']:,}",
            f"{change['end'] - 1:,}",
            change["why"],
            *(
                (seconds_text(change["switch"]["seconds"]), bytes_text(change["switch"]["sent_bytes"]))
                if change["switch"]
                else ("", "")
            ),
        ]
        for index, change in enumerate(changes)
    ]
    columns = ("change", "plan*", "from step", "to step", "trigger and rule*", "switch", "rows sent")
    note = "Marks are decisions" if marks else ""
    if any(mark.number is not None for mark in marks):
        note += "; those with a number led to the change of that number"
    return drawn(svg, f"{said}. {note}." if note else f"{said}.") + table("Plans that ran", columns, rows)


def _predicted(run: Run) -> str:
    probes, decisions = run.scheduler.get("probes", []), run.scheduler.get("decisions", [])
    tried = [("tried plan", p["plan"], None, p["predicted_s"], p["measured_s"]) for p in probes]
    promised = [
        ("promise of a switch", d["chosen_fingerprint"], d["step"], d["promised_s"], d["outcome_s"])
        for d in decisions
        if d["promised_s"] is not None and d["outcome_s"] is not None
    ]
    running = [("running plan", d["plan_fingerprint"], d["step"], d["predicted_s"], d["measured_s"]) for d in decisions]
    every = [entry for entry in (*tried, *promised, *running) if entry[3] > 0 and entry[4] > 0]
    if not every:
        return empty(_nothing(run, "predicted"))
    points: dict[str, list[tuple[float, float]]] = {}
    for kind, _, _, predicted_s, measured_s in every:
        points.setdefault(kind, []).append((predicted_s, measured_s))
    errors = {kind: median(abs(p / m - 1) for p, m in of_kind) for kind, of_kind in points.items()}
    said = "Median relative error: " + ", ".join(
        f"{kind} {100 * error:.1f} % of {len(points[kind])}" for kind, error in errors.items()
    )
    svg = figures.predictions(Words("predicted", "Predicted against measured seconds of a step", said), points)
    rows = [
        [
            kind,
            run.plan(plan),
            "" if step is None else f"{step:,}",
            seconds_text(predicted_s),
            seconds_text(measured_s),
            share_text(predicted_s / measured_s - 1),
        ]
        for kind, plan, step, predicted_s, measured_s in every
    ]
    columns = ("prediction", "plan*", "after step", "predicted", "measured", "relative error")
    waiting = sum(d["promised_s"] is not None and d["outcome_s"] is None for d in decisions)
    more = say(f"{counted(waiting, 'promise')} without an outcome yet.") if waiting else ""
    return drawn(svg, f"{said}. On the line both are equal.") + more + table("Predictions", columns, rows)


def _candidates(run: Run) -> str:
    candidates = run.scheduler.get("candidates", [])
    if not candidates:
        return empty(_nothing(run, "searched"))
    rows = []
    for entry in candidates:
        cost = entry["predicted"] or {}
        rows.append(
            [
                entry["family"],
                (entry["fingerprint"] or "")[:8],
                seconds_text(cost.get("step_s")),
                seconds_text(cost.get("wait_s")),
                bytes_text(cost.get("sent_bytes")),
                bytes_text(cost.get("memory_bytes")),
                entry["verdict"],
                entry["reason"],
            ]
        )
    columns = ("family", "plan*", "predicted step", "waiting", "sent a step", "memory", "verdict*", "reason*")
    return table("The best plan of every family, as last searched at the start", columns, rows)


def _step_times(run: Run) -> str:
    windows = [Window.from_dict(entry["window"]) for entry in run.scheduler.get("windows", [])]
    kept = bool(windows)
    if not windows:
        windows = _windows(run.records)
    if not windows:
        return empty(f"no windows and no records: {run.records_note}")
    steps = np.array([step.first_step for step in run.steps], np.float64)
    step_s = np.array([step.step_s for step in run.steps], np.float64)
    worst = max(windows, key=lambda window: window.imbalance)
    said = (
        f"{counted(len(windows), 'window')} {'that the controller saw' if kept else 'of the records'}, step "
        f"{seconds_text(windows[0].step_s)} in the first and {seconds_text(windows[-1].step_s)} in the last; imbalance "
        f"at most {worst.imbalance:.2f}, around step {worst.first_step}"
    )
    svg = figures.step_times(Words("steps", "Step time and imbalance", said), steps, step_s, windows)
    note = "Without sampling, compiling and evaluation; single steps far above the windows are cut off. "
    if len(steps):
        note += f"The longest step took {seconds_text(float(step_s.max()))}, step {int(steps[step_s.argmax()])}."
    else:
        note += f"Single steps are not shown: {run.records_note}."
    rows = [
        [
            f"{w.first_step:,} to {w.last_step:,}",
            run.plan(w.plan_fingerprint),
            seconds_text(w.step_s),
            seconds_text(w.step_sigma_s),
            f"{w.imbalance:.2f}",
            f"{max(r.wait_s for r in w.ranks) / w.step_s:.0%}" if w.step_s else "",
        ]
        for w in windows
    ]
    columns = ("steps", "plan*", "step", "spread", "imbalance", "longest wait")
    return drawn(svg, f"{said}. {note}") + folded("The windows", table("Windows", columns, rows))


def _windows(records: Sequence[Sequence[StepRecord]]) -> list[Window]:
    """Windows over all records, none across a change of plan. The first step is left out, as in the report."""
    size = max(10, math.ceil(len(records) / _MAX_WINDOWS))
    windows: list[Window] = []
    group: list[Sequence[StepRecord]] = []
    for step in [*(records[1:] if len(records) > 1 else records), None]:
        full = len(group) == size or (group and (step is None or _under(step) != _under(group[0])))
        if full:
            windows.append(reduce_window(group))
            group = []
        if step is not None:
            group.append(step)
    return windows


def _under(step: Sequence[StepRecord]) -> str:
    return step[0].plan_fingerprint


def _phases(run: Run) -> str:
    measured = run.report["measured"]
    means = [
        {name: values["total"] / entry["num_steps"] for name, values in entry["phases"].items()}
        for entry in measured["ranks"]
    ]
    slowest = measured["slowest_rank"]
    left_out = ", the first left out" if measured["first_step_left_out"] else ""
    said = (
        f"Means of {counted(measured['ranks'][0]['num_steps'], 'step')}{left_out}. Slowest is rank {slowest['rank']}, "
        f"busy {slowest['busy_over_mean']:.2f} times the mean of all ranks"
    )
    svg = figures.phases_by_rank(Words("phases", "Phases by rank", f"{said}. The table below has the numbers."), means)
    names = [name for name in figures.PHASES if any(name in rank for rank in means)]
    rows = [
        [
            f"rank {entry['rank']}",
            *(seconds_text(rank.get(name)) for name in names),
            seconds_text(entry["step_s"]["median"]),
            seconds_text(entry["busy_s"]["median"]),
        ]
        for entry, rank in zip(measured["ranks"], means, strict=True)
    ]
    columns = ("rank", *names, "median step", "of it busy")
    return drawn(svg, f"{said}.") + folded("The numbers", table("Phases by rank", columns, rows))


def _memory(run: Run) -> str:
    peaks = [
        [
            f"rank {entry['rank']}",
            bytes_text(entry["peak_memory_bytes"]),
            "unknown" if device["memory_bytes"] is None else bytes_text(device["memory_bytes"]),
            entry["memory_source"],
        ]
        for entry, device in zip(run.report["measured"]["ranks"], run.report["devices"], strict=False)
    ]
    peak_table = table("Highest of all steps", ("rank", "peak", "the device has", "measured as*"), peaks)
    if not run.steps:
        return empty(f"memory over steps is not known: {run.records_note}") + peak_table
    steps = [step.first_step for step in run.steps]
    by_rank = [[step.ranks[r].peak_memory_bytes for step in run.steps] for r in range(len(run.steps[0].ranks))]
    highest = max(range(len(by_rank)), key=lambda rank: max(by_rank[rank]))
    said = f"Rank {highest} uses the most, {bytes_text(max(by_rank[highest]))}"
    svg = figures.memory(Words("memory", "Peak memory of each rank", said), steps, by_rank)
    return drawn(svg, f"{said}. Each point is the peak of its step.") + peak_table


def _pairs(run: Run) -> str:
    if not run.records:
        return empty(f"bytes by pair of ranks are not known: {run.records_note}")
    size = len(run.records[0])
    sent = np.zeros((size, size))
    for step in run.records:
        for record in step:
            for peer in record.peers:
                if peer.peer < size:
                    sent[record.rank, peer.peer] += peer.sent_bytes / len(run.records)
    if not sent.any():
        return empty(
            "one rank has nobody to send to"
            if size == 1
            else "no bytes passed between ranks, or peers were not recorded"
        )
    i, j = np.unravel_index(int(sent.argmax()), sent.shape)
    said = f"{bytes_text(float(sent.sum()))} a step in all, most from rank {i} to rank {j}: {bytes_text(sent[i, j])}"
    svg = figures.pairs(Words("pairs", "Bytes of a step by pair of ranks", said), sent)
    columns = ("from", *(f"to rank {rank}" for rank in range(size)))
    rows = [[f"rank {a}", *(bytes_text(sent[a, b]) if a != b else "" for b in range(size))] for a in range(size)]
    return drawn(svg, f"{said}. Means over {counted(len(run.records), 'step')}, all exchanges of rows.") + folded(
        "The numbers", table("Bytes a step", columns, rows)
    )


def _losses(run: Run) -> str:
    loss = [float(value) for value in run.report["losses"]]
    if not loss:
        return empty("the report holds no losses")
    scores: dict[str, tuple[list[float], list[float]]] = {}
    for name, key in (("validation", "val_score"), ("test", "test_score")):
        pairs = [(e["step"], float(e[key])) for e in run.report["evaluations"] if e[key] is not None]
        if pairs:
            scores[name] = ([float(step) for step, _ in pairs], [value for _, value in pairs])
    best, metric = run.report["best"], str(run.report["metric"])
    said = f"Loss {figure_text(loss[0])} at first, {figure_text(loss[-1])} at last"
    bad = sum(not math.isfinite(value) for value in loss)
    if bad:
        said += f", no finite number in {counted(bad, 'step')}"
    if best:
        said += (
            f"; best validation {metric} {figure_text(best['val_score'])} at step {best['step']}, "
            f"test {figure_text(best['test_score'])} there"
        )
    svg = figures.losses(Words("losses", "Loss and scores over steps", said), loss, scores, metric)
    note = "" if scores else " Nothing was evaluated."
    if len(loss) > figures.MAX_POINTS:
        note += f" Lines have {figures.MAX_POINTS} points, each the mean of its neighbours."
    return drawn(svg, f"{said}.{note}")


def _decisions(run: Run) -> str:
    decisions = run.scheduler.get("decisions", [])
    if not decisions:
        return empty(_nothing(run, "decided"))
    kept = {True: ", kept", False: ", broken", None: ""}

    def row(d: Mapping[str, Any]) -> list[str]:
        chosen = d["chosen_fingerprint"]
        return [
            f"{d['step']:,}",
            ", ".join(d["triggers"]) or "none",
            d["verdict"],
            run.plan(d["plan_fingerprint"]) + (f" → {run.plan(chosen)}" if chosen != d["plan_fingerprint"] else ""),
            d["rule"],
            seconds_text(d["gain_s"]) if d["gain_s"] else "",
            seconds_text(d["cost_s"]),
            "" if d["promised_s"] is None else seconds_text(d["promised_s"]),
            "" if d["outcome_s"] is None else seconds_text(d["outcome_s"]) + kept[d["kept"]],
        ]

    columns = (
        *("after step", "triggers*", "verdict*", "plan*", "rule*"),
        *("gain a step", "a switch costs", "promise", "outcome"),
    )
    changes = [d for d in decisions if d["verdict"] in ("switch", "return")]
    stays = [d for d in decisions if d["triggers"] and d["verdict"] not in ("switch", "return")]
    verdicts = Counter(d["verdict"] for d in decisions)
    said = f"{counted(len(decisions), 'decision')}: " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items())
    parts = [say(f"{said}. {len(decisions) - len(changes) - len(stays)} had no trigger.")]
    for caption, chosen in (("Changes of plan", changes), ("Triggers that changed nothing", stays)):
        if chosen:
            parts.append(table(caption, columns, [row(d) for d in chosen]))
    parts.append(folded("All decisions", table("All decisions", columns, [row(d) for d in decisions])))
    return "".join(parts)


def _regret(run: Run) -> str:
    regret = run.scheduler.get("regret")
    if not regret:
        return empty(_nothing(run, "compared in hindsight") if not run.scheduler.get("plans", [])[1:] else
                      "fewer than two plans were measured, so there is nothing to compare")  # fmt: skip
    rows = [
        ["kept", run.plan(regret["kept_plan"]), seconds_text(regret["kept_s"])],
        ["fastest measured", run.plan(regret["best_plan"]), seconds_text(regret["best_s"])],
    ]
    share = share_text(regret["share"])
    said = f"A step of the plan kept took {share} against the fastest plan that this run measured."
    if regret["best_plan"] == regret["kept_plan"]:
        said = f"The plan kept is the fastest that this run measured; its last window is {share} off its best."
    return say(said) + table("In hindsight", ("plan", "which*", "step"), rows)


def _spent(run: Run) -> str:
    spent, seconds = run.scheduler.get("spent_s", {}), run.scheduler.get("seconds", 0.0)
    if not spent or not seconds:
        return empty("the report does not tell what the monitor and the controller took")
    within = {name: value for name, value in spent.items() if name != "start"}
    rows = [[name, seconds_text(value), f"{100 * value / seconds:.2f} %"] for name, value in within.items()]
    rows.append(["all steps", seconds_text(seconds), "100 %"])
    start = spent.get("start", 0.0)
    before = f" The search at the start took {seconds_text(start)} besides." if start else ""
    said = f"{100 * math.fsum(within.values()) / seconds:.2f} % of the seconds of all steps, on rank 0.{before}"
    return say(said) + table("Seconds of rank 0", ("where", "seconds", "share"), rows)


def _nothing(run: Run, done: str) -> str:
    """Why the scheduler left nothing of a kind."""
    if not run.scheduler:
        return f"nothing was {done}: the report has no block scheduler"
    if run.setting in ("auto", "adaptive"):
        watched = " (only adaptive decides while it runs)" if run.setting == "auto" else " and the run ended before"
        return f"nothing was {done}: plan.mode is {run.setting}{watched}"
    given = "plan.file is given" if run.setting == "file" else f"plan.mode is {run.setting}"
    return f"nothing was {done}: {given}"


SECTIONS: Mapping[str, Callable[[Run], str]] = {
    "Summary": _summary,
    "A step rank by rank": _trace,
    "Plan over time": _plans,
    "Predicted against measured": _predicted,
    "Candidates": _candidates,
    "Step time and imbalance": _step_times,
    "Phases by rank": _phases,
    "Memory by rank": _memory,
    "Bytes by pair of ranks": _pairs,
    "Loss and scores": _losses,
    "Decisions": _decisions,
    "Regret": _regret,
    "Time in monitor and controller": _spent,
}
