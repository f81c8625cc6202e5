"""What cannot be replayed is one line; what can is replayed in `test_gtx_adapt.py`, from a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import given, make_run

from gtx.replay import replay_run


def test_a_run_that_did_not_watch_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no windows to replay: give a run of plan.mode=adaptive"):
        replay_run(make_run(tmp_path / "run", scheduler=given("graph")))
    with pytest.raises(ValueError, match="holds no strategy-report.json"):
        replay_run(tmp_path)


def test_settings_and_files_that_are_wrong_are_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="unknown key 'scheduler.colour'"):
        replay_run(run, ["scheduler.colour=1"])
    (run / "config.yaml").unlink()
    with pytest.raises(ValueError, match="cannot read the config"):
        replay_run(run)
