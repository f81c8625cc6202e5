"""Ablations: which runs a command line means, that they are run once, and what is said of them.

One fixture trains; the ranks of other tests are scripts that stand in for `launch.py`. Not here: what a run measures
(`test_gtx_report.py`, `test_monitor_*.py`) and how plans are searched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import launch
from gtx.ablate import (
    FIXED,
    SCHEDULERS,
    TERMS,
    Combination,
    as_markdown,
    check_losses,
    combine,
    has_run,
    kept_records,
    make_settings,
    make_worlds,
    parse_setting,
    run_ablation,
)
from gtx.config import load_config, parse_config
from gtx.report import REPORT_NAME

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "sbm_gt.yaml"
TINY = (
    "train.steps=4",
    "engine.name=torch",
    "partition.parts=4",
    "model.width=16",
    "data.options={num_nodes: 200, num_edges: 1000, num_blocks: 4, num_features: 8}",
)
RUNS = ("graph-w1-s0", "graph-w2-s0", "model-w1-s0", "model-w2-s0")


# What is run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mixed", ["plan.mode=mixed"]),
        ("auto", ["plan.mode=auto"]),
        ("auto:greedy", ["plan.mode=auto", "scheduler.setting=greedy"]),
        ("auto-exchange-visits", ["plan.mode=auto", "scheduler.without=[exchange, visits]"]),
        ("adaptive-hysteresis", ["plan.mode=adaptive", "scheduler.hysteresis=false"]),
    ],
)
def test_a_setting_is_a_mode_or_a_variation_of_one(name: str, overrides: list[str]) -> None:
    setting = parse_setting(name)
    assert (setting.name, list(setting.overrides)) == (name, overrides)


def test_every_setting_that_can_be_named_is_a_config_in_which_all_has_effect() -> None:
    names = [*FIXED, *(f"{m}:{s}" for m in ("auto", "adaptive") for s in SCHEDULERS), "adaptive-hysteresis"]
    for name in names + [f"auto-{term}" for term in TERMS]:
        assert parse_config({}, parse_setting(name).overrides).without_effect() == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensor", "unknown mode 'tensor'; known are graph, model, pipeline, data, mixed, auto, adaptive"),
        ("", "unknown mode ''"),
        ("graph:greedy", "graph searches nothing; vary auto or adaptive"),
        ("auto:", "unknown scheduler ''; known are cost_model, greedy, oracle"),
        ("auto:best", "unknown scheduler 'best'"),
        ("auto-bubble", "leaves out 'bubble'; known are rowwise, "),
        ("auto-hysteresis", "auto does not switch; use adaptive-hysteresis"),
    ],
)
def test_a_wrong_setting_is_one_line(name: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_setting(name)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_options_vary_the_searched_modes() -> None:
    def names(modes: str, *options: str | None, no_hysteresis: bool = False) -> list[str]:
        return [setting.name for setting in make_settings(modes, *options, no_hysteresis=no_hysteresis)]

    assert names("graph, auto,graph") == ["graph", "auto"]
    assert names("graph,auto", "fixed,greedy,oracle") == ["graph", "auto:greedy", "auto:oracle"]
    assert names("graph,auto,adaptive", "greedy") == ["auto:greedy", "adaptive:greedy"]
    assert names("graph,auto", None, "exchange,visits") == ["graph", "auto", "auto-exchange", "auto-visits"]
    assert names("adaptive", no_hysteresis=True) == ["adaptive", "adaptive-hysteresis"]


def test_wrong_options_are_one_line() -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: make_settings(","), "--modes ',' names nothing"),
        (lambda: make_settings("graph", "greedy"), "--modes graph searches nothing to vary; add auto or adaptive"),
        (lambda: make_settings("auto", "best"), "known are fixed, cost_model, greedy, oracle"),
        (lambda: make_settings("auto", None, "bubble"), "leaves out 'bubble'"),
        (lambda: make_settings("auto", no_hysteresis=True), "no effect with --modes auto; add adaptive"),
        (lambda: make_worlds("2,0"), "--worlds has '0'"),
        (lambda: make_worlds("two"), "--worlds has 'two'"),
        (lambda: combine(CONFIG, (), make_settings("graph"), (1,), 0), "--repeats is 0; give at least 1"),
        (lambda: combine(CONFIG, ("plan.file=a",), make_settings("graph"), (1,), 1), "plan.file a decides"),
    ]
    for call, said in cases:
        with pytest.raises(ValueError) as caught:
            call()
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_repeats_come_one_after_the_other_and_count_up_the_seed() -> None:
    found = combine(CONFIG, ("seed=5",), make_settings("graph,auto:greedy"), (1, 2), 2)
    first = ["graph-w1-s5", "auto:greedy-w1-s5", "graph-w2-s5", "auto:greedy-w2-s5"]
    assert [combination.name for combination in found] == [*first, *(name.replace("s5", "s6") for name in first)]
    assert {combination.config.seed for combination in found[4:]} == {6}


def test_launched_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="starts ranks itself, and 2 were launched"):
        run_ablation(CONFIG, TINY, ROOT / "launch.py", modes="graph", worlds="1", repeats=1, out=tmp_path)


# Trained once, and not again ------------------------------------------------------------------------------------------


def own(out: Path) -> list[str]:
    return [*TINY, f"partition.cache={out.parent / 'partitions'}"]


@pytest.fixture(scope="module")
def ablation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ablation that has ended."""
    out = tmp_path_factory.mktemp("ablate") / "out"
    options = ["--modes=graph,model", "--worlds=1,2", "--repeats=1", f"--out={out}"]
    assert launch.main(["ablate", str(CONFIG), *own(out), *options]) == 0
    return out


def report_times(out: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob(f"runs/*/{REPORT_NAME}")}


def test_every_combination_is_a_row_and_all_end_with_one_loss(ablation: Path) -> None:
    assert sorted(report_times(ablation)) == list(RUNS)
    frame = pd.read_csv(ablation / "ablation.csv", keep_default_na=False, na_values=["nan"])
    assert list(frame.setting) == ["graph", "model"] * 2 and list(frame.world) == [1, 1, 2, 2]
    columns = "seed engine plan family step_s run_step_s seconds sent_bytes peak_memory_bytes loss val_score test_score"
    assert {*columns.split(), "switches", "phase.rowwise", "phase.edgewise", "sent_bytes.kv"} <= set(frame.columns)
    assert list(frame.family) == list(frame.setting) and set(frame.steps) == {3} and set(frame.switches) == {0}
    assert (frame.step_s > 0).all() and (frame.run_step_s > 0).all() and (frame.peak_memory_bytes > 2**20).all()
    assert frame.loss.max() - frame.loss.min() < 1e-4 * frame.loss.max()
    kinds = frame[[column for column in frame if column.startswith("sent_bytes.")]].astype(float)
    assert kinds.sum(axis=1).tolist() == pytest.approx(frame.sent_bytes.tolist())
    assert (frame.sent_bytes > 0).tolist() == [False, False, True, True]
    text = (ablation / "ablation.md").read_text(encoding="utf-8")
    assert "3 comparisons within a seed, all equal" in text and "WARNING" not in text
    assert all((ablation / f"ablation.{ending}").stat().st_size > 1000 for ending in ("svg", "png"))


def test_only_what_is_missing_is_run_again(ablation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands in for `launch.py` brings back the run folder that was there, less its half of a run."""
    out = tmp_path / "out"
    shutil.copytree(ablation, out)
    name = "model-w1-s0"
    (out / "runs" / name / REPORT_NAME).unlink()
    (out / "runs" / name / "half a run").touch()
    before = report_times(out)
    script = tmp_path / "brings_back.py"
    whole = str(ablation / "runs" / name)
    script.write_text(
        f"import shutil, sys; shutil.copytree({whole!r}, sys.argv[-1], dirs_exist_ok=True, copy_function=shutil.copy)",
        encoding="utf-8",
    )
    assert run_ablation(CONFIG, own(ablation), script, modes="graph,model", worlds="1,2", repeats=1, out=out) == 0
    after = report_times(out)
    assert {run for run in RUNS if after[run] != before.get(run)} == {name}
    assert not (out / "runs" / name / "half a run").exists()
    assert capsys.readouterr().out.count("(kept)") == 3


def test_a_run_under_another_config_does_not_count(ablation: Path) -> None:
    config = load_config(ablation / "runs" / "graph-w2-s0" / "config.yaml")
    folder = ablation / "runs" / "graph-w2-s0"
    assert has_run(Combination(parse_setting("graph"), 2, config, ()), folder)
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    assert not has_run(Combination(parse_setting("graph"), 2, other, ()), folder)
    assert not has_run(Combination(parse_setting("graph"), 1, config, ()), folder)


def test_a_failure_is_noted_and_the_others_go_on(
    ablation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs are missing; what stands in for `launch.py` fails."""
    out = tmp_path / "out"
    shutil.copytree(ablation, out)
    for name in ("graph-w1-s0", "model-w2-s0"):
        (out / "runs" / name / REPORT_NAME).unlink()
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit('something | else\\ngtx: a mishap | here')", encoding="utf-8")
    status = run_ablation(CONFIG, own(ablation), script, modes="graph,model", worlds="1,2", repeats=1, out=out)
    assert status == 1
    frame = pd.read_csv(out / "ablation.csv", keep_default_na=False)
    failed = frame[frame.error != ""]
    assert set(failed.setting + failed.world.astype(str)) == {"graph1", "model2"}
    assert set(failed.error) == {"gtx: a mishap | here"}
    text = (out / "ablation.md").read_text(encoding="utf-8")
    assert text.count("1 failed: gtx: a mishap \\| here |") == 2 and "| 2 | graph | graph |" in text
    assert capsys.readouterr().out.count("failed: gtx: a mishap | here\n") == 2


# What is said ---------------------------------------------------------------------------------------------------------


def test_measured_are_the_steps_under_the_last_plan_without_its_first(tmp_path: Path) -> None:
    def kept(plans: str) -> list[int]:
        lines = [
            json.dumps({"rank": rank, "step": step, "plan_fingerprint": plan})
            for step, plan in enumerate(plans)
            for rank in range(2)
        ]
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = kept_records(path)
        assert list(found[0]) == list(found[1])
        return list(found[0])

    assert kept("aaaa") == [1, 2, 3]
    assert kept("aabbaaa") == [5, 6]
    assert kept("aab") == [2]
    assert kept("a") == [0]


def frame_of(*rows: tuple[str, int, int, float, float]) -> pd.DataFrame:
    """Rows of (setting, world, seed, step_s, loss); a step of the whole run takes twice as long for searched ones."""
    same = {"error": "", "sent_bytes": 2.0**20, "peak_memory_bytes": 2**20, "test_score": float("nan"), "switches": 0}
    frame = pd.DataFrame(rows, columns=["setting", "world", "seed", "step_s", "loss"]).assign(**same)
    searched = ~frame.setting.isin(FIXED)
    family = frame.setting.where(~searched, "model")
    return frame.assign(family=family, plan=family, run_step_s=frame.step_s * (1 + searched))


def test_a_loss_that_differs_is_named() -> None:
    same = [("graph", 2, 0, 1.0, 0.5), ("model", 1, 0, 1.0, 0.50004), ("model", 1, 1, 1.0, 0.7)]
    assert "1 comparisons within a seed, all equal" in check_losses(frame_of(*same))
    line = check_losses(frame_of(*same, ("data", 2, 0, 1.0, 0.501), ("auto", 2, 1, 1.0, float("nan"))))
    assert line.startswith("WARNING") and "data-w2-s0 (0.501, model-w1 has 0.50004)" in line and "auto-w2-s1" in line
    assert "graph-w2-s0" not in line


def test_the_table_has_medians_spread_and_the_regret_against_the_best_fixed_mode() -> None:
    rows = [("graph", 2, seed, 0.3, 1.0) for seed in range(3)]
    rows += [("model", 2, seed, step_s, 1.0) for seed, step_s in enumerate((0.1, 0.2, 0.9))]
    rows += [("auto", 2, seed, 0.25, 1.0) for seed in range(3)]
    text = as_markdown(frame_of(*rows, ("auto", 4, 0, 0.1, 1.0)))
    assert "| 2 | graph | graph | 300.0 (300.0 to 300.0) | 1.50 |" in text
    assert "| 2 | model | model | 200.0 (100.0 to 900.0) | 1.00 |" in text
    assert "| 2 | auto | model | 250.0 (250.0 to 250.0) | 1.25 | 500.0 | 1.00 | 1 | 1 | - | 0 |  |" in text
    assert "| 2 | model | auto | model, the same plan | +25.0% | +150.0% |" in text
    assert "| 4 | auto | model | 100.0 (100.0 to 100.0) | - |" in text  # nothing fixed to compare with
