"""Two runs side by side: what differs, what it cost, and whether the losses are what they should be."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from made_runs import CONFIG, PLANS, given, make_records, make_run
from rich.console import Console

import launch
from gtx.compare import compare_runs, flatten, losses_line
from gtx.report import load_report

STEPS = 20


def compared(a: Path, b: Path, width: int = 100) -> str:
    stream = io.StringIO()
    compare_runs(a, b, Console(file=stream, width=width))
    assert max(map(len, stream.getvalue().splitlines())) <= width
    return stream.getvalue()


def config(**changes: Any) -> dict[str, Any]:
    """The config with keys of sections changed: `plan={"mode": "graph"}`."""
    made = copy.deepcopy(CONFIG)
    for section, values in changes.items():
        made[section] = {**made[section], **values}
    return made


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("compare") / "first", STEPS, keep=("config",))


def last_line(text: str) -> str:
    """The line on losses, which may have been wrapped."""
    return " ".join(text[text.rindex("losses: ") :].split())


def test_a_run_equals_itself(first: Path) -> None:
    text = compared(first, first)
    assert "the configs are the same" in text
    expected = (
        "losses: equal to the last digit over 20 steps, as they should be: the configs ask for the same mathematics"
    )
    assert last_line(text) == expected
    ratios = [line.split("│")[-2].strip() for line in text.splitlines() if line.count("│") == 5 and "x" in line[-9:]]
    assert set(ratios) == {"1.00x"} and len(ratios) > 10


def test_it_shows_what_differs_and_only_that(first: Path, tmp_path: Path) -> None:
    base = load_report(first)
    graph = make_run(
        tmp_path / "graph",
        STEPS,
        num_ranks=2,
        keep=("config",),
        config=config(plan={"mode": "graph"}),
        partitions=[{**base["partitions"][0], "ranks": [0]}] * 16,
        plan={**base["plan"], "fingerprint": PLANS["graph"], "mode": "graph"},
        scheduler=given("graph"),
    )
    text = compared(first, graph)
    config_table = text[text.index("config, where") : text.index("asked for")]
    assert [line for line in config_table.splitlines() if "." in line] == [
        line for line in config_table.splitlines() if "plan.mode" in line
    ]
    for part in (
        "2 graph, 1 pipeline",
        "16 graph",
        PLANS["mixed"],
        PLANS["graph"],
        "adaptive",
        "rowwise",
        "exchange.kv",
    ):
        assert part in text, part
    assert "as they should be" in last_line(text)


def test_ratios_and_differences_are_of_the_second_to_the_first(first: Path, tmp_path: Path) -> None:
    one, base = make_records(STEPS), load_report(first)
    half = make_run(
        tmp_path / "half",
        STEPS,
        steps=[type(r).from_dict({**r.as_dict(), "peak_memory_bytes": r.peak_memory_bytes // 2}) for r in one],
        losses=[*base["losses"][:-1], 2 * base["losses"][-1]],
        evaluations=[{"step": 19, "val_score": 0.5, "test_score": 0.25}],
    )
    text = compared(first, half)
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert rows["peak memory of a rank"][2] == "0.50x"
    assert rows["median of the slowest rank"][2] == "1.00x"
    assert rows["final loss"][3] == "+100.0 %"
    assert rows["test accuracy there"][1] == "0.2500"
    assert rows["sent a step, exchange fetch"] == ["16.0 KiB", "16.0 KiB", "1.00x"]  # 4 ranks of 4 KiB


LOSSES = [2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("others", "mathematics", "line"),
    [
        (LOSSES, [], "equal to the last digit over 3 steps, as they should be"),
        (
            [2.0, 1.0 + 1e-6, 0.5],
            [],
            "difference 1e-06 over 3 steps, at step 1, equal but for rounding, as they should",
        ),
        ([2.0, 1.5, 0.5], [], "difference 0.33 over 3 steps, at step 1, not equal, and they should be"),
        ([2.0, 1.5, 0.5], ["model.width"], "not equal; the configs ask for different mathematics: model.width"),
        ([2.0, 1.5, 0.5], list("abcde"), "different mathematics: a, b, c and 2 more"),
        ([2.0, "nan", 0.5], [], "difference inf over 3 steps, at step 1, not equal"),
        ([2.0, 1.0], [], "over the first 2 steps (A has 3, B 2)"),
        ([2.0, 1.5, 0.5], None, "at step 1, not equal"),
        ([], [], "one of the runs has none"),
    ],
)
def test_the_line_on_losses(others: list[float | str], mathematics: list[str] | None, line: str) -> None:
    reports = [{"losses": losses, "run": {"precision": "float32"}} for losses in (LOSSES, others)]
    assert line in losses_line(*reports, mathematics)


def test_a_low_precision_rounds_more_and_a_nan_equals_a_nan() -> None:
    def line(precision: str, losses: list[float | str]) -> str:
        reports = [{"losses": entry, "run": {"precision": precision}} for entry in (["nan", 1.0], losses)]
        return losses_line(*reports, [])

    assert "equal to the last digit" in line("float32", ["nan", 1.0])
    assert "equal but for rounding" in line("bf16", ["nan", 1.01])
    assert "not equal" in line("float64", ["nan", 1.00001])


@pytest.mark.parametrize(
    ("changes", "mathematics"),
    [
        ({"plan": {"mode": "model", "allow": ["graph"]}, "engine": {"threads": 4}}, None),
        ({"partition": {"parts": 8}}, None),
        ({"partition": {"parts": 8}, "batch": {"kind": "cluster"}}, "batch.kind, partition.parts"),
        ({"engine": {"lr": 0.1}}, "engine.lr"),
    ],
    ids=["placement", "partition", "cluster", "lr"],
)
def test_it_knows_placement_from_mathematics(
    first: Path, tmp_path: Path, changes: dict[str, Any], mathematics: str | None
) -> None:
    other = make_run(tmp_path / "other", STEPS, keep=("config",), config=config(**changes))
    line = last_line(compared(first, other))
    if mathematics is None:
        assert line.endswith("as they should be: the configs ask for the same mathematics")
    else:
        assert line.endswith(f"the configs ask for different mathematics: {mathematics}")


def test_without_a_config_the_rest_is_compared(first: Path, tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", STEPS, keep=(), losses=[], evaluations=[], scheduler=None)
    text = " ".join(compared(first, bare).split())
    assert "configs are not compared: cannot read" in text and "No such file" in text
    assert "losses: one of the runs has none" in text
    (bare / "config.yaml").write_text("a: [", encoding="utf-8")
    assert "configs are not compared" in compared(first, bare)


def test_long_values_fold(first: Path, tmp_path: Path) -> None:
    made = config(plan={"file": "a/folder/" * 20}, model={"a_setting_with_quite_a_long_name_" * 3: "value " * 30})
    other = make_run(tmp_path / ("long" * 30), STEPS, keep=("config",), name="n[b]" * 40, config=made)
    assert "a/folder/" in compared(first, other)


def test_a_folder_that_is_no_run_is_one_line(first: Path, tmp_path: Path) -> None:
    for pair in ((first, tmp_path), (tmp_path, first)):
        with pytest.raises(ValueError, match=r"holds no strategy-report\.json; give the folder of a run") as error:
            compared(*pair)
        assert "\n" not in str(error.value)


def test_the_command_compares_two_folders(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["report", str(first), str(first)]) == 0
    assert "losses: equal to the last digit" in capsys.readouterr().out


def test_flatten_keeps_what_is_empty() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}
