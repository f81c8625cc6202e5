"""What `launch.py train` runs: one run, or one a seed in the same launched ranks, each with other models beside it.

Not here: a run itself (`train.py`), what another model keeps of the config (`beside.py`), and runs that start ranks of
their own (`ablate.py`).
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from gtx.adapt import read_plan
from gtx.beside import beside_config, beside_row, parse_beside
from gtx.compare import flatten
from gtx.config import Config, load_config
from gtx.parallel.world import World
from gtx.report import REPORT_NAME, add_beside, beside_table, load_report
from gtx.session import Say, joined, silent
from gtx.train import new_run_dir, train_in

SEEDS_CSV, SUMMARY = "seeds.csv", "summary.json"
MAX_SEEDS = 1000
# Settings under which a finished run counts as the one that is asked for.
_MAY_DIFFER = (
    *("name", "monitor", "data.root", "partition.cache", "model.backend"),
    *("engine.device", "engine.threads", "engine.timeout_s"),
)


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds that `0..4`, `0,3,7` or both mixed name, each once, in order. Raises ValueError with one line."""
    seeds: dict[int, None] = {}
    for word in (word.strip() for word in text.split(",")):
        found = re.fullmatch(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?", word)
        if found is None:
            raise ValueError(f"--seeds has {word!r}; give seeds such as 0..4 or 0,3,7, each a whole number from 0 on")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"--seeds has {word!r}, which ends before it begins; write {last}..{first}")
        if last - first >= MAX_SEEDS or len(seeds) + last - first >= MAX_SEEDS:
            raise ValueError(f"--seeds {text} names more than {MAX_SEEDS:,} seeds; give fewer")
        seeds |= dict.fromkeys(range(first, last + 1))
    return tuple(seeds)


def run_training(
    config: Config,
    run_dir: Path | None,
    command: str,
    resume: Path | None = None,
    *,
    seeds: str | None = None,
    beside: str | None = None,
) -> None:
    """Train, and say where the results are. Rank 0 speaks.

    resume: a run folder or a checkpoint to go on from; the results go into that folder unless `run_dir` says otherwise.
    seeds: train once for each of them, see `run_seeds`. beside: models that are trained afterwards in the run's place.
    """
    if config.plan.file is not None:
        read_plan(config.plan.file)  # a wrong file should not wait for the graph
    others = () if beside is None else parse_beside(beside, config)
    if seeds is not None:
        if resume is not None:
            raise ValueError("--seeds and --resume do not go together; resume the run folder of one seed by itself")
        folder = run_dir or Path("runs") / f"{config.name}-seeds"
        run_seeds(config, parse_seeds(seeds), folder, command, beside=others)
        return
    if run_dir is None:
        run_dir = new_run_dir(config) if resume is None or resume.is_file() else resume
    with joined(config) as world:
        loud = tell if world.rank == 0 else silent
        report = train_in(world, config, run_dir, tell, command, resume)
        if report:
            loud(best_line(report))
        if others:
            run_beside(world, config, run_dir, others, loud, command)
        if world.rank == 0 and others:
            Console().print(beside_table(load_report(run_dir)))
        loud(f"run folder: {run_dir}\nstrategy report: python launch.py report {run_dir}")


def tell(line: str) -> None:
    print(line, flush=True)


def best_line(report: Mapping[str, Any]) -> str:
    """The scores of a run in one line."""
    best = report["best"]
    if best is None:
        return f"no validation {report['metric']}: there is no best step"
    test = best["test_score"]
    shown = "not available" if test is None else f"{float(test):.2f}"
    return f"best validation {report['metric']} {best['val_score']:.2f} at step {best['step']}, test {shown}"


def run_beside(
    world: World, config: Config, run_dir: Path, names: Sequence[str], loud: Say, command: str
) -> list[dict[str, Any]]:
    """Train each model in the place of a finished run's own, into `run_dir/beside-<name>`, and tell its report.

    What is done already under the same config is not done again. Returns their reports on rank 0.
    """
    reports, rows = [], []
    for name in names:
        other, told = beside_config(config, name)
        place = run_dir / f"beside-{name.lower()}"
        kept = place in _done_already(world, {place: other}, strict=False)
        loud(f"beside it {name}: {f'done, {place}' if kept else told}")
        if not kept:
            gc.collect()  # an engine and what it refers to
            train_in(world, other, place, loud, command)
        if world.rank == 0:
            reports.append(load_report(place))
            rows.append(beside_row(reports[-1], place.name, told))
            loud(best_line(reports[-1]))
    if rows:
        add_beside(run_dir, rows)
    return reports


# Several seeds --------------------------------------------------------------------------------------------------------


def run_seeds(
    config: Config, seeds: Sequence[int], folder: Path, command: str, say: Say = tell, *, beside: Sequence[str] = ()
) -> None:
    """Train once for each seed, in these ranks, into `folder/seed-<s>`; then `seeds.csv`, `summary.json` and a table.

    A seed whose run has ended is not run again; one that was cut off runs anew. All seeds share one assignment of nodes
    to partitions, that of `partition.seed` or else of the config's seed, so that it is found once. beside: as
    `run_beside`, for every seed.

    Raises ValueError with one line, before anything is trained, where a seed's folder holds another config's run.
    """
    configs = {seed: seed_config(config, seed) for seed in seeds}
    wanted = {folder / f"seed-{seed}": own for seed, own in configs.items()}
    for name in beside:
        wanted |= {
            folder / f"seed-{seed}" / f"beside-{name.lower()}": beside_config(own, name)[0]
            for seed, own in configs.items()
        }
    with joined(config) as world:
        loud = say if world.rank == 0 else silent
        done = _done_already(world, wanted)
        reports = []
        for number, (seed, own) in enumerate(configs.items(), 1):
            place = folder / f"seed-{seed}"
            kept = place in done
            loud(f"seed {seed} ({number} of {len(seeds)})" + (f" is done: {place}" if kept else f": {place}"))
            if not kept:
                gc.collect()  # the engine of the seed before, and what it refers to
                train_in(world, own, place, loud, command)
            if world.rank == 0:
                reports.append(load_report(place))
                loud(best_line(reports[-1]))
            reports += run_beside(world, own, place, beside, loud, command)
            if world.rank == 0:
                _write_seeds(reports, folder)
        if world.rank == 0:
            _print_seeds(reports)
            loud(f"run folders: {folder}/seed-*\nwritten: {folder / SEEDS_CSV} and {SUMMARY} beside it")


def seed_config(config: Config, seed: int) -> Config:
    """The config of one seed: its draws are those of `seed`, the partitions those of the config as it was given."""
    given = config.partition.seed
    partition = config.partition.model_copy(update={"seed": config.seed if given is None else given})
    return config.model_copy(update={"seed": seed, "partition": partition})


def finished(config: Config, folder: Path) -> bool:
    """Whether the folder holds a run of this config that has ended, on however many ranks.

    Raises ValueError with one line if it holds the ended run of another config, or of another version of gtx.
    """
    if not (folder / REPORT_NAME).exists():
        return False
    load_report(folder)
    before, now = (flatten(c.as_dict()) for c in (load_config(folder / "config.yaml"), config))
    picked = [key for key in ("engine.zero_stage", "engine.offload_optimizer") if now[key] == "auto"]
    for key in sorted(before.keys() | now.keys()):
        may = any(key == name or key.startswith(f"{name}.") for name in (*_MAY_DIFFER, *picked))
        if not may and before.get(key) != now.get(key):
            raise ValueError(
                f"{folder} holds a run with {key} {before.get(key)}, the config says {now.get(key)}; give another "
                "--run-dir, or remove that folder"
            )
    return True


def _done_already(world: World, wanted: Mapping[Path, Config], *, strict: bool = True) -> frozenset[Path]:
    """The folders whose runs have ended, as rank 0 sees them. A collective.

    strict: raises on every rank as `finished` does; else a run of another config is as good as none.
    """
    found: frozenset[Path] | str = frozenset()
    if world.rank == 0:
        done = []
        for place, config in wanted.items():
            try:
                done += [place] if finished(config, place) else []
            except ValueError as error:
                if strict:
                    found = str(error)
                    break
        else:
            found = frozenset(done)
    found = world.from_first(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def seed_row(report: Mapping[str, Any]) -> dict[str, Any]:
    """A run as a row of `seeds.csv`; scores are those at the best validation score.

    loss: of the last step. step_s: median step of the slowest rank. seconds: from start to report.
    """
    best = report["best"] or {"step": None, "val_score": None, "test_score": None}
    return {
        "model": report["model"]["name"],
        "seed": report["run"]["seed"],
        "best_step": best["step"],
        "val_score": _number(best["val_score"]),
        "test_score": _number(best["test_score"]),
        "loss": _number(report["losses"][-1]),
        "step_s": max(rank["step_s"]["median"] for rank in report["measured"]["ranks"]),
        "seconds": report["run"]["seconds"],
    }


def summarise(frame: pd.DataFrame, metric: str) -> dict[str, Any]:
    """Mean and sample standard deviation (over n - 1) of the scores of each model in a frame of `seed_row`s.

    A seed without a score is left out of them, and `num_seeds` counts those that have a test score; a figure that is
    not defined is None.
    """
    models = {}
    for model, rows in frame.groupby("model", sort=False):
        entry: dict[str, Any] = {"seeds": rows.seed.tolist(), "num_seeds": int(rows.test_score.notna().sum())}
        for score in ("test_score", "val_score"):
            for name, value in (("mean", rows[score].mean()), ("std", rows[score].std(ddof=1))):
                entry[f"{score}_{name}"] = float(value) if math.isfinite(value) else None
        models[str(model)] = entry
    return {"metric": metric, "read_at": "the best validation score of each run", "models": models}


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _write_seeds(reports: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """`seeds.csv` and `summary.json` of the seeds so far, each whole or not at all."""
    frame = pd.DataFrame([seed_row(report) for report in reports])
    summary = json.dumps(summarise(frame, reports[0]["metric"]), indent=1) + "\n"
    for name, text in ((SEEDS_CSV, frame.to_csv(index=False)), (SUMMARY, summary)):
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, folder / name)


def _print_seeds(reports: Sequence[Mapping[str, Any]]) -> None:
    frame, metric = pd.DataFrame([seed_row(report) for report in reports]), reports[0]["metric"]
    table = Table(title=f"{metric} at the best validation score", title_justify="left", title_style="bold")
    for column in ("model", "seed", "best step", "val", "test", "last loss", "step, ms", "seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in frame.itertuples():
        step = "-" if pd.isna(row.best_step) else f"{row.best_step:.0f}"
        scores = ("-" if math.isnan(score) else f"{score:.2f}" for score in (row.val_score, row.test_score))
        table.add_row(
            str(row.model),
            str(row.seed),
            step,
            *scores,
            f"{row.loss:.4f}",
            f"{row.step_s * 1e3:.1f}",
            f"{row.seconds:.1f}",
        )
    Console().print(table)
    for model, entry in summarise(frame, metric)["models"].items():
        mean, std = entry["test_score_mean"], entry["test_score_std"]
        shown = "not available" if mean is None else f"{mean:.2f}" + ("" if std is None else f" +- {std:.2f}")
        print(f"{model}: test {metric} {shown} over {entry['num_seeds']} seed(s), mean and sample standard deviation")
