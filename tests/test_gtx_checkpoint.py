"""A checkpoint is read as it was written or not at all; what is damaged, foreign or of another job is one line."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gtx.checkpoint import (
    FOLDER,
    LATEST,
    EngineState,
    Progress,
    changes,
    check_fits,
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from gtx.config import parse_config
from gtx.run_writer import keep_until

CONFIG = parse_config({"train": {"steps": 9}}).as_dict()
GRAPH = {"num_nodes": 10, "num_edges": 30}
PROGRESS = Progress(3, 2, CONFIG, GRAPH, "ab12", [1.5, 0.1 + 0.2, 1e-9], [{"step": 2, "val_score": 50.0}])
WEIGHTS = {"a.weight": torch.randn(3, 2, dtype=torch.float64), "b": torch.tensor(2.5)}
MOMENTS = {kind: {name: torch.randn_like(w) for name, w in WEIGHTS.items()} for kind in ("exp_avg", "exp_avg_sq")}
STATE = EngineState(WEIGHTS, {"norm.running_mean": torch.rand(4)}, MOMENTS, 3)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / FOLDER / LATEST
    write_checkpoint(path, PROGRESS, STATE)
    assert [p.name for p in path.parent.iterdir()] == [LATEST]  # nothing aside is left
    assert find_checkpoint(tmp_path) == find_checkpoint(path) == path
    progress, state = read_checkpoint(path)
    assert progress == PROGRESS
    assert state.optimizer_steps == 3
    for mine, read in (
        (STATE.weights, state.weights),
        (STATE.buffers, state.buffers),
        *((STATE.moments[kind], state.moments[kind]) for kind in MOMENTS),
    ):
        assert mine.keys() == read.keys()
        assert all(torch.equal(mine[name], read[name]) and mine[name].dtype == read[name].dtype for name in mine)


def test_a_write_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LATEST
    write_checkpoint(path, PROGRESS, STATE)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(path, replace(PROGRESS, step=4), STATE)
    assert [p.name for p in tmp_path.iterdir()] == [LATEST]
    assert read_checkpoint(path)[0].step == 3


def test_whatever_byte_is_damaged_it_is_one_line(tmp_path: Path) -> None:
    """Cut off or changed at a hundred places, in the header and in the tensors."""
    path = tmp_path / LATEST
    write_checkpoint(path, PROGRESS, STATE)
    whole, draw = path.read_bytes(), random.Random(0)
    names_end = 8 + int.from_bytes(whole[:8], "little")
    damaged = [whole[: draw.randrange(len(whole))] for _ in range(40)]
    for place in (draw.randrange(names_end, len(whole)) for _ in range(60)):
        damaged.append(whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :])
    damaged += [b"", b"step: 3\n", whole + b"x", b"\xff" * 64]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^the checkpoint .* cannot be resumed: .*; give another one") as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_a_damaged_header_is_one_line(tmp_path: Path) -> None:
    """Every byte of what the header says, but for losses and the like, which are not checked."""
    path = tmp_path / LATEST
    write_checkpoint(path, PROGRESS, STATE)
    whole, draw = path.read_bytes(), random.Random(1)
    names_end = 8 + int.from_bytes(whole[:8], "little")
    for place in (draw.randrange(names_end - 8) for _ in range(60)):
        path.write_bytes(whole[:place] + b"\x00" + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"^the checkpoint [^\n]* cannot be resumed: [^\n]*$"):
            read_checkpoint(path)


def test_another_programs_file_is_named_so(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}, {"gtx": '{"format": "something", "version": 1}'}):
        save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors", metadata)
        with pytest.raises(ValueError, match="it is a safetensors file of another program"):
            read_checkpoint(tmp_path / "w.safetensors")


def test_a_folder_without_a_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder .* holds no checkpoints/latest.safetensors; give"):
        find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="there is no checkpoint .*; give a run folder"):
        find_checkpoint(tmp_path / "none")


@pytest.mark.parametrize(
    ("overrides", "graph", "steps", "message"),
    [
        (["seed=5"], {}, 9, "the checkpoint is of seed 0, the config says 5; make them agree"),
        (["model.width=32"], {}, 9, "the checkpoint is of model.width 64, the config says 32"),
        (["engine.optimizer=sgd"], {}, 9, "the checkpoint is of engine.optimizer adamw, the config says sgd"),
        ([], {"num_edges": 31}, 9, "of a graph with num_edges 30, this one has 31; give the same data"),
        (
            [],
            {},
            3,
            "the checkpoint is of 3 steps and the config asks for 3 in all; nothing is left, raise train.steps",
        ),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(
    overrides: list[str], graph: dict[str, int], steps: int, message: str
) -> None:
    config = parse_config({"train": {"steps": 9}}, overrides).as_dict()
    with pytest.raises(ValueError) as caught:
        check_fits(PROGRESS, config, {**GRAPH, **graph}, steps)
    assert message in str(caught.value)


def test_what_changes_the_numbers_is_told_and_the_plan_is_not() -> None:
    config = parse_config(
        {"train": {"steps": 9}}, ["engine.lr=0.5", "plan.mode=model", "engine.zero_stage=2"]
    ).as_dict()
    check_fits(PROGRESS, config, GRAPH, 9)
    before = CONFIG["engine"]["lr"]
    assert changes(PROGRESS, config) == [f"engine.lr is 0.5 from here on, the checkpoint had {before}"]


def test_later_metrics_are_dropped_and_records_are_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n0,1\n1,2\n2,3\n3,", encoding="utf-8")
    (tmp_path / "records.jsonl").write_text("{}\n", encoding="utf-8")
    keep_until(tmp_path, 2)
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "step,loss\n0,1\n1,2\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "records-to-2.jsonl"]
