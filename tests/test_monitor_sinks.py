"""Sinks: what is written can be read back, and logs stay readable."""

import io
import sys

import pandas as pd
import pytest
from test_monitor_records import record

from monitor.sinks import METRICS_COLUMNS, CsvSink, JsonlSink, ProgressBar, TensorBoardSink, read_steps


def test_jsonl_round_trip_and_append(tmp_path):
    path = tmp_path / "records.jsonl"
    written = [record(rank=r, step=s) for s in range(3) for r in range(2)]
    for part in (written[:4], written[4:]):
        sink = JsonlSink(path)
        for one in part:
            sink.write(one)
        assert path.read_text().count("\n") == written.index(part[-1]) + 1  # on disk before it is closed
        sink.close()
        sink.close()
    assert read_steps(path) == written


def test_jsonl_takes_mappings_and_refuses_what_json_lacks(tmp_path):
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.write({"event": "switch", "step": 3})
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write({"loss": float("nan")})
    sink.close()
    assert (tmp_path / "events.jsonl").read_text() == '{"event":"switch","step":3}\n'


def test_a_cut_last_line_is_left_out_and_a_foreign_one_named(tmp_path):
    path = tmp_path / "records.jsonl"
    sink = JsonlSink(path)
    sink.write(record())
    sink.close()
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert read_steps(path) == [record()]
    path.write_text(whole + '{"event": 1}\n')
    with pytest.raises(ValueError, match=r"records.jsonl, line 2: the step record lacks 'edges_computed'"):
        read_steps(path)


def test_metrics_csv(tmp_path):
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    sink.write_step(0, 1.5, 0.25)
    sink.write_step(1, 0.1 + 0.2, 0.125, val_score=0.75, test_score=0.5)
    sink.close()
    sink = CsvSink(path)  # as a resumed run does
    sink.write_step(2, float("nan"), 1.0)
    sink.close()
    assert path.read_text().splitlines()[:2] == ["step,loss,step_s,val_score,test_score", "0,1.5,0.25,,"]
    table = pd.read_csv(path)
    assert tuple(table.columns) == METRICS_COLUMNS
    assert table.loss[1] == 0.1 + 0.2  # to the last digit
    assert list(table.step) == [0, 1, 2]
    assert list(table.val_score.notna()) == [False, True, False]
    path.write_text("step,loss\n")
    with pytest.raises(ValueError, match="has the columns step,loss, metrics are"):
        CsvSink(path)


def test_tensorboard_scalars_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in range(2):
        sink.write_steps([record(rank=r, step=step, loss=2.0 - step) for r in range(2)])
    sink.write_evaluation(1, val_score=0.5)
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 2.0), (1, 1.0)]
    assert [e.value for e in events.Scalars("phase_s.rowwise/rank1")] == [1.0, 1.0]
    assert [e.value for e in events.Scalars("sent_bytes.kv/rank0")] == [4096, 4096]
    assert [(e.step, e.value) for e in events.Scalars("val_score")] == [(1, 0.5)]
    assert "test_score" not in events.Tags()["scalars"]


def test_tensorboard_that_is_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"install the extra gtx\[tensorboard\] or turn it off"):
        TensorBoardSink(tmp_path)


class Ticks:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_log_gets_a_plain_line_every_few_seconds_the_first_and_the_last():
    stream, clock = io.StringIO(), Ticks()
    bar = ProgressBar(100, stream=stream, interval_s=5.0, clock=clock)
    for step in range(100):
        if step == 49:
            bar.show_score(0.875)
        bar.update([record(rank=r, step=step, wait_s=0.2 - 0.1 * r) for r in range(2)])
        clock.now_s += 1.0
    bar.close()
    bar.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{n}/100" for n in (*range(1, 100, 5), 100)]
    assert lines[0] == "step 1/100  loss 0.7500  2.000 s a step  slowest rank 1"
    assert lines[-1].endswith("val 0.8750")
    assert "\x1b" not in stream.getvalue()


def test_a_run_that_ends_early_shows_its_last_step():
    stream = io.StringIO()
    bar = ProgressBar(100, first_step=40, stream=stream, clock=Ticks())
    bar.update([record()])
    bar.update([record()])
    bar.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["41/100", "42/100"]


def test_a_terminal_gets_a_live_bar_that_closes_cleanly(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    bar = ProgressBar(2, stream=stream)
    bar.update([record(rank=0), record(rank=1, wait_s=0.0)])
    bar.show_score(0.5, name="accuracy")
    bar.update([record(rank=0), record(rank=1, wait_s=0.0)])
    bar.close()
    text = stream.getvalue()
    for part in ("2/2", "loss 0.7500", "2.000 s a step", "slowest rank 1", "accuracy 0.5000"):
        assert part in text
    assert text.endswith("\x1b[?25h")  # the cursor is shown again
