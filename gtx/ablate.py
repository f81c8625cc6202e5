"""Runs every combination of setting, world size and seed, and puts them side by side as a frame, a table and plots.

Not here: what a run measures (`monitor/`, `report.py`), how plans are searched (`adapt.py`), how ranks are started
(`processes.py`), options (`launch.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from gtx.config import Config, PlanConfig, SchedulerConfig, load_config
from gtx.processes import cores_to_pin_to, run_ranks
from gtx.report import REPORT_NAME, load_report

SEARCHED = ("auto", "adaptive")
FIXED = tuple(mode for mode in get_args(PlanConfig.model_fields["mode"].annotation) if mode not in SEARCHED)
SCHEDULERS: tuple[str, ...] = get_args(SchedulerConfig.model_fields["setting"].annotation)
TERMS: tuple[str, ...] = get_args(get_args(SchedulerConfig.model_fields["without"].annotation)[0])
LOSS_TOLERANCE = 1e-4  # relative

_MIB = 2**20

Say = Callable[[str], None]


# What is run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A mode, or a variation of one that searches. overrides: what it sets in the config."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """One run. config: resolved. overrides: what turns the config file into it."""

    setting: Setting
    world_size: int
    config: Config
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its run folder."""
        return f"{self.setting.name}-w{self.world_size}-s{self.config.seed}"


def parse_setting(name: str) -> Setting:
    """A setting by its name.

    A mode: `graph`, `auto`. Under another scheduler: `auto:greedy`. With a cost term left out: `auto-exchange`. Without
    what holds switches back: `adaptive-hysteresis`. Raises ValueError with one line that lists what is known.
    """
    head, *left_out = name.split("-")
    mode, colon, scheduler = head.partition(":")
    if mode not in (*FIXED, *SEARCHED):
        raise ValueError(f"--modes has the unknown mode {mode!r}; known are {', '.join((*FIXED, *SEARCHED))}")
    if mode in FIXED and name != mode:
        raise ValueError(f"--modes has {name!r}, but {mode} searches nothing; vary {' or '.join(SEARCHED)}")
    if colon and scheduler not in SCHEDULERS:
        raise ValueError(f"{name!r} has the unknown scheduler {scheduler!r}; known are {', '.join(SCHEDULERS)}")
    for part in left_out:
        if part not in (*TERMS, "hysteresis"):
            raise ValueError(f"{name!r} leaves out {part!r}; known are {', '.join((*TERMS, 'hysteresis'))}")
    if "hysteresis" in left_out and mode != "adaptive":
        raise ValueError(f"{name!r} leaves out hysteresis, but {mode} does not switch; use adaptive-hysteresis")
    overrides = [f"plan.mode={mode}"]
    if colon:
        overrides.append(f"scheduler.setting={scheduler}")
    terms = [part for part in left_out if part != "hysteresis"]
    if terms:
        overrides.append(f"scheduler.without=[{', '.join(terms)}]")
    if "hysteresis" in left_out:
        overrides.append("scheduler.hysteresis=false")
    return Setting(name, tuple(overrides))


def make_settings(
    modes: str, schedulers: str | None = None, without_terms: str | None = None, no_hysteresis: bool = False
) -> tuple[Setting, ...]:
    """The settings that the options name, each once, in order.

    schedulers: every searched mode runs under each of these in its place; `fixed` stands for the fixed modes.
    without_terms, no_hysteresis: further variations of the searched modes. Raises ValueError for one without effect.
    """
    named = [parse_setting(name) for name in _words("--modes", modes)]
    searched = [setting.name for setting in named if setting.name in SEARCHED]
    if (schedulers or without_terms) and not searched:
        raise ValueError(f"--modes {modes} searches nothing to vary; add {' or '.join(SEARCHED)}")
    if no_hysteresis and "adaptive" not in searched:
        raise ValueError(f"--no-hysteresis has no effect with --modes {modes}; add adaptive")
    names = [setting.name for setting in named]
    if schedulers is not None:
        wanted = _words("--scheduler", schedulers)
        for scheduler in wanted:
            if scheduler not in ("fixed", *SCHEDULERS):
                known = ", ".join(("fixed", *SCHEDULERS))
                raise ValueError(f"--scheduler has the unknown {scheduler!r}; known are {known}")
        names = [name for name in names if name not in SEARCHED and (name not in FIXED or "fixed" in wanted)]
        names += [f"{mode}:{scheduler}" for mode in searched for scheduler in wanted if scheduler != "fixed"]
    if without_terms is not None:
        names += [f"{mode}-{term}" for mode in searched for term in _words("--without-terms", without_terms)]
    if no_hysteresis:
        names.append("adaptive-hysteresis")
    return tuple(parse_setting(name) for name in dict.fromkeys(names))


def make_worlds(text: str) -> tuple[int, ...]:
    """World sizes from `1,2,4`, each once. Raises ValueError with one line."""
    worlds = []
    for word in _words("--worlds", text):
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"--worlds has {word!r}; give numbers of ranks, each at least 1, such as 1,2,4")
        worlds.append(int(word))
    return tuple(dict.fromkeys(worlds))


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError(f"{option} {text!r} names nothing; give a list such as a,b")
    return words


def combine(
    config_file: Path, overrides: Sequence[str], settings: Sequence[Setting], worlds: Sequence[int], repeats: int
) -> list[Combination]:
    """All combinations, repeat by repeat, so that a slow phase of the machine hits all alike.

    Raises ValueError with one line where a config is wrong or decides the plan by itself.
    """
    if repeats < 1:
        raise ValueError(f"--repeats is {repeats}; give at least 1")
    base = load_config(config_file, overrides)
    if base.plan.file is not None:
        raise ValueError(f"plan.file {base.plan.file} decides the plan of every run; leave it out of an ablation")
    found = []
    for repeat in range(repeats):
        for world_size in worlds:
            for setting in settings:
                own = ("monitor.progress=false", "monitor.records=true", f"seed={base.seed + repeat}")
                every = (*overrides, *own, *setting.overrides)
                found.append(Combination(setting, world_size, load_config(config_file, every), every))
    return found


def run_ablation(
    config_file: Path,
    overrides: Sequence[str],
    script: Path,
    *,
    modes: str,
    worlds: str,
    repeats: int,
    out: Path | None = None,
    schedulers: str | None = None,
    without_terms: str | None = None,
    no_hysteresis: bool = False,
    say: Say = lambda line: print(line, flush=True),
) -> int:
    """Run what has not been run, then write `ablation.csv`, `.md`, `.svg` and `.png` into `out`.

    script: what a rank runs: `launch.py`. out: `runs/<name>-ablation` unless given. Returns the exit status: 1 if a
    combination failed, else 0. Raises ValueError with one line for what the user can mend.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"ablate starts ranks itself, and {os.environ['WORLD_SIZE']} were launched; use plain python")
    settings = make_settings(modes, schedulers, without_terms, no_hysteresis)
    todo = combine(config_file, overrides, settings, make_worlds(worlds), repeats)
    out = out or Path("runs") / f"{todo[0].config.name}-ablation"
    cores = cores_to_pin_to(todo[0].config.engine.device)
    threads = max(1, todo[0].config.engine.threads)
    rows = []
    for number, combination in enumerate(todo, 1):
        folder = out / "runs" / combination.name
        error, kept = None, has_run(combination, folder)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, str(script), "train", str(config_file), *combination.overrides]
            try:
                command += ["--run-dir", str(folder)]
                error = run_ranks(command, combination.world_size, folder, cores, threads)
            except KeyboardInterrupt:
                say(f"interrupted in {combination.name}; the same command goes on from there")
                return 128 + signal.SIGINT
        if error is not None:
            (folder / REPORT_NAME).unlink(missing_ok=True)  # a rank may have failed after it was written
        row = make_row(combination, folder, error)
        rows.append(row)
        result = f"failed: {error}" if error else f"{row['step_s'] * 1e3:.1f} ms a step, {row['seconds']:.1f} s in all"
        say(f"{number}/{len(todo)}  {combination.name}  {result}{'  (kept)' if kept else ''}")
    frame = pd.DataFrame(rows)
    frame.to_csv(out / "ablation.csv", index=False)
    command_line = f"Config `{config_file}`{''.join(f' `{o}`' for o in overrides)}, {repeats} repeat(s)."
    text = f"# Ablation of {todo[0].config.name}\n\n{command_line}\n\n{as_markdown(frame)}"
    (out / "ablation.md").write_text(text, encoding="utf-8")
    say(f"\n{text}")
    plot(frame, out, say)
    say(f"written: {out / 'ablation.md'}, .csv, plots beside it")
    return int((frame.error != "").any())


def has_run(combination: Combination, folder: Path) -> bool:
    """Whether the folder holds the whole run of this combination, made under the same config."""
    try:
        run = load_report(folder)["run"]
    except ValueError:
        return False
    same = (run["config_hash"], run["world_size"]) == (combination.config.hash, combination.world_size)
    return same and (folder / "records.jsonl").exists()


# The frame ------------------------------------------------------------------------------------------------------------


def make_row(combination: Combination, folder: Path, error: str | None) -> dict[str, Any]:
    """What a run gave, as a row of `ablation.csv`; only the first columns where it failed.

    step_s, phase.*, sent_bytes: of the steps under the plan that was kept at the end, without the first of them (it
    pays for allocations); with a fixed mode that is every step but the first. step_s: median of the slowest rank, less
    evaluation and compiling. phase.*: mean over ranks of medians. sent_bytes: of all ranks, mean of a step.
    run_step_s: all of the loop and of a search at the start, over its steps. seconds: from start to report.
    switches: changes of plan, those for trying plans with them.
    """
    row: dict[str, Any] = {
        "setting": combination.setting.name,
        "world": combination.world_size,
        "seed": combination.config.seed,
        "engine": combination.config.engine.name,
        "error": error or "",
    }
    if error:
        return row
    report = load_report(folder)
    scheduler = report["scheduler"]
    families = {partition["mode"] for partition in report["partitions"]}
    best = report["best"] or {"val_score": None, "test_score": None}
    records = kept_records(folder / "records.jsonl")
    steps = list(records[0])
    slowest = [max(_own_seconds(by_step[step]) for by_step in records.values()) for step in steps]
    row |= {
        "plan": report["plan"]["fingerprint"],
        "family": families.pop() if len(families) == 1 else "mixed",
        "steps": len(steps),
        "step_s": float(np.median(slowest)),
        "run_step_s": (scheduler["seconds"] + scheduler["spent_s"]["start"]) / len(report["losses"]),
        "seconds": report["run"]["seconds"],
        "sent_bytes": 0.0,
        "peak_memory_bytes": max(rank["peak_memory_bytes"] for rank in report["measured"]["ranks"]),
        "loss": float(report["losses"][-1]),
        "val_score": math.nan if best["val_score"] is None else float(best["val_score"]),
        "test_score": math.nan if best["test_score"] is None else float(best["test_score"]),
        "switches": len(scheduler["switches"]),
        "commit": report["versions"]["commit"] or "",
    }
    every = [by_step[step] for by_step in records.values() for step in steps]
    for record in every:
        for exchange in record["exchanges"]:
            key, sent = f"sent_bytes.{exchange['kind']}", exchange["sent_bytes"] / len(steps)
            row[key] = row.get(key, 0.0) + sent
            row["sent_bytes"] += sent
    for name in sorted({name for record in every for name in record["phases"]}):
        medians = [
            np.median([by_step[step]["phases"].get(name, 0.0) for step in steps]) for by_step in records.values()
        ]
        row[f"phase.{name}"] = float(np.mean(medians))
    return row


def kept_records(path: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """The records of the last steps under one plan, the first left out where there are more, by rank and step."""
    by_rank: dict[int, dict[int, dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        by_rank.setdefault(record["rank"], {})[record["step"]] = record
    steps = sorted(by_rank[0])
    plan = by_rank[0][steps[-1]]["plan_fingerprint"]
    first = next((s + 1 for s in reversed(steps) if by_rank[0][s]["plan_fingerprint"] != plan), steps[0])
    kept = [step for step in steps if step > first] or steps[-1:]
    return {rank: {step: by_step[step] for step in kept} for rank, by_step in by_rank.items()}


def _own_seconds(record: dict[str, Any]) -> float:
    phases = record["phases"]
    return float(record["wall_s"] - phases.get("evaluate", 0.0) - phases.get("compiling", 0.0))


# The table and the plots ----------------------------------------------------------------------------------------------


def check_losses(frame: pd.DataFrame) -> str:
    """A line that says whether all runs of a seed end with the loss of the smallest world's first, as any plan must."""
    apart, compared = [], 0
    for _, runs in frame[frame.error == ""].sort_values("world", kind="stable").groupby("seed", sort=True):
        first = runs.iloc[0]
        for run in runs.iloc[1:].itertuples():
            compared += 1
            if not abs(run.loss - first.loss) <= LOSS_TOLERANCE * abs(first.loss):
                apart.append(
                    f"{run.setting}-w{run.world}-s{run.seed} ({run.loss:.6g}, {first.setting}-w{first.world} has "
                    f"{first.loss:.6g})"
                )
    if apart:
        return f"WARNING: last losses differ by more than {LOSS_TOLERANCE:g} relative: {', '.join(apart)}"
    return f"Losses: {compared} comparisons within a seed, all equal to {LOSS_TOLERANCE:g} relative."


def as_markdown(frame: pd.DataFrame) -> str:
    """The table of settings, the regret of searched ones, and what to know about both."""
    table, regrets = [], []
    for world_size, ranks in frame.groupby("world", sort=True):
        done = ranks[ranks.error == ""]
        steps_s = done.groupby("setting").step_s.median() if len(done) else pd.Series(dtype=float)
        fixed = steps_s[steps_s.index.isin(FIXED)]
        oracle, oracle_s = (fixed.idxmin(), fixed.min()) if len(fixed) else ("", math.nan)
        for name in dict.fromkeys(ranks.setting):
            runs = done[done.setting == name]
            failures = ranks[(ranks.setting == name) & (ranks.error != "")]
            note = f"{len(failures)} failed: {failures.error.iloc[-1]}" if len(failures) else ""
            if not len(runs):
                table.append([str(world_size), name, *["-"] * 9, note])
                continue
            middle = runs.median(numeric_only=True)
            family = "/".join(dict.fromkeys(runs.family))
            table.append(
                [
                    str(world_size),
                    name,
                    family,
                    f"{middle.step_s * 1e3:.1f} ({runs.step_s.min() * 1e3:.1f} to {runs.step_s.max() * 1e3:.1f})",
                    _number(middle.step_s / oracle_s, ".2f"),
                    f"{middle.run_step_s * 1e3:.1f}",
                    f"{middle.sent_bytes / _MIB:.2f}",
                    f"{middle.peak_memory_bytes / _MIB:.0f}",
                    f"{middle.loss:.5g}",
                    _number(middle.test_score, ".2f"),
                    f"{middle.switches:.0f}",
                    note,
                ]
            )
            if name not in FIXED and oracle:
                best = done[done.setting == oracle]
                same = ", the same plan" if set(runs.plan) <= set(best.plan) else ""
                kept, whole = middle.step_s / oracle_s - 1, middle.run_step_s / best.run_step_s.median() - 1
                regrets.append([str(world_size), oracle, name, f"{family}{same}", f"{kept:+.1%}", f"{whole:+.1%}"])
    header = "ranks, setting, ran, step ms (min to max), of fastest fixed, whole run ms a step, sent MiB a step"
    header += ", peak of a rank MiB, loss, test, switches, note"
    text = _table(header.split(", "), table)
    text += (
        "\nMedians over seeds. Step: median of the slowest rank without evaluation and compiling, under the plan kept "
        "at the end, its first step left out. Whole run: all of it, search and switches too, over all steps.\n"
    )
    if frame.world.max() > 1 and not frame.get("sent_bytes.reduce", pd.Series(dtype=float)).sum():
        text += "Sent: rows only, the engine does not tell the bytes of gradients.\n"
    if regrets:
        text += "\n## Regret\n\nAgainst the oracle, the fixed mode that was measured fastest with as many ranks.\n\n"
        text += _table(["ranks", "oracle", "setting", "ran", "of the plan kept", "of the whole run"], regrets)
    text += f"\n{check_losses(frame)}\n"
    commits = [commit for commit in frame.get("commit", pd.Series(dtype=str)).dropna().unique() if commit]
    if len(commits) > 1:
        text += f"\nWARNING: runs of {len(commits)} commits stand side by side; remove the folders of the older ones.\n"
    return text


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def plot(frame: pd.DataFrame, out: Path, say: Say) -> None:
    """`ablation.svg` and `.png`: step time with its spread, bytes and memory, by setting and world size."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no plots: matplotlib is not installed; pip install matplotlib and run the same command again")
        return
    done = frame[frame.error == ""]
    if not len(done):
        return
    settings, worlds = list(dict.fromkeys(done.setting)), sorted(done.world.unique())
    panels = (
        ("step_s", 1e3, "step, ms"),
        ("sent_bytes", 1 / _MIB, "sent by all ranks\nin a step, MiB"),
        ("peak_memory_bytes", 1 / _MIB, "peak memory\nof a rank, MiB"),
    )
    figure = Figure(figsize=(2.5 + 0.9 * len(settings), 9), layout="constrained")
    width = 0.8 / len(worlds)
    for axis, (column, factor, label) in zip(figure.subplots(len(panels), 1, sharex=True), panels, strict=True):
        for index, world_size in enumerate(worlds):
            values = done[done.world == world_size].groupby("setting")[column].agg(["median", "min", "max"])
            values = values.reindex(settings) * factor
            spread = [values["median"] - values["min"], values["max"] - values["median"]]
            places = np.arange(len(settings)) + (index - (len(worlds) - 1) / 2) * width
            axis.bar(places, values["median"], width, yerr=spread, capsize=2, label=f"{world_size} rank(s)")
        axis.set_ylabel(label)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axis.set_xticks(range(len(settings)), settings, rotation=30, ha="right")
    figure.axes[0].legend()
    figure.axes[0].set_title("bars: median over seeds, whiskers: min to max", fontsize="medium")
    for ending in ("svg", "png"):
        figure.savefig(out / f"ablation.{ending}", dpi=150)
