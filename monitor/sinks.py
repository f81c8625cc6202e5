"""Where measurements go while a run lasts: JSON lines, a CSV of metrics, TensorBoard and a progress bar.

Not here: the strategy report, which is made once at the end (`gtx/report.py`), and what is measured (`records.py`).

A sink is opened by one rank and closed by `close`, more than once if need be; `contextlib.closing` makes it a context.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from monitor.records import StepRecord, slowest_rank

if TYPE_CHECKING:
    from rich.progress import Progress

METRICS_COLUMNS = ("step", "loss", "step_s", "val_score", "test_score")


class JsonlSink:
    """One JSON object a line, appended to `path`; each line reaches the file when it is written."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, record: StepRecord | Mapping[str, Any]) -> None:
        """Append one record. Raises ValueError for a mapping with a number JSON does not have."""
        data = record.as_dict() if isinstance(record, StepRecord) else dict(record)
        self._file.write(json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def read_steps(path: str | Path) -> list[StepRecord]:
    """The step records of a file that `JsonlSink` wrote.

    Raises ValueError naming the line that is no step record; a last line that a crash cut short is left out.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(StepRecord.from_dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return records


class CsvSink:
    """`metrics.csv`: one row a step, with the columns `METRICS_COLUMNS`; scores are blank where nothing was evaluated.

    Appends to a file that is there, as a resumed run does. Raises ValueError if that file has other columns.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        header = ""
        if path.exists():
            with path.open(encoding="utf-8", newline="") as existing:
                header = existing.readline().rstrip("\r\n")
        if header and header != ",".join(METRICS_COLUMNS):
            raise ValueError(
                f"{path} has the columns {header}, metrics are {','.join(METRICS_COLUMNS)}; "
                "move it or choose another folder"
            )
        self._file = path.open("a", buffering=1, encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if not header:
            self._rows.writerow(METRICS_COLUMNS)

    def write_step(
        self,
        step: int,
        loss: float,
        step_s: float,
        *,
        val_score: float | None = None,
        test_score: float | None = None,
    ) -> None:
        """Append the row of one step; the scores where it ended with an evaluation."""
        self._rows.writerow(
            [step, float(loss), float(step_s), *("" if s is None else float(s) for s in (val_score, test_score))]
        )

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Scalars for TensorBoard: loss, step and phase seconds of each rank, bytes by kind of exchange, memory, scores.

    Raises ValueError where the tensorboard package is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"TensorBoard was asked for and cannot be used ({error}); "
                "install the extra gtx[tensorboard] or turn it off"
            ) from None
        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def write_steps(self, records: Sequence[StepRecord]) -> None:
        """Write one step: the records of all ranks."""
        for record in records:
            rank = f"rank{record.rank}"
            if record.rank == 0:
                self._writer.add_scalar("loss", record.loss, record.step)
            self._writer.add_scalar(f"step_s/{rank}", record.wall_s, record.step)
            self._writer.add_scalar(f"busy_s/{rank}", record.busy_s, record.step)
            self._writer.add_scalar(f"peak_memory_bytes/{rank}", record.peak_memory_bytes, record.step)
            for name, seconds in record.phases.items():
                self._writer.add_scalar(f"phase_s.{name}/{rank}", seconds, record.step)
            for exchange in record.exchanges:
                self._writer.add_scalar(f"sent_bytes.{exchange.kind}/{rank}", exchange.sent_bytes, record.step)

    def write_evaluation(self, step: int, *, val_score: float | None = None, test_score: float | None = None) -> None:
        for name, score in (("val_score", val_score), ("test_score", test_score)):
            if score is not None:
                self._writer.add_scalar(name, score, step)

    def close(self) -> None:
        self._writer.close()


class ProgressBar:
    """Shows how far a run is, its loss, step time, slowest rank and last validation score.

    On a terminal it is a live bar. Elsewhere it is a plain line at the first and the last step, and between them at
    most one every `interval_s` seconds, so that a log file stays readable.

    num_steps: of the whole run.
    first_step: steps that were done before, in a resumed run.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        stream: TextIO | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._done = first_step
        self._stream = sys.stdout if stream is None else stream
        self._interval_s = interval_s
        self._clock = clock
        self._shown_at_s: float | None = None
        self._shown = first_step
        self._figures = "starting"
        self._score = ""
        self._live: Progress | None = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._live = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._live.add_task(self._figures, total=num_steps, completed=first_step)
            self._live.start()

    def update(self, records: Sequence[StepRecord]) -> None:
        """Show the step that just ended: the records of all ranks. The bar counts calls, from `first_step`."""
        self._done += 1
        first = records[0]
        self._figures = f"loss {first.loss:.4f}  {max(r.wall_s for r in records):.3f} s a step"
        if len(records) > 1:
            self._figures += f"  slowest rank {slowest_rank(records)}"
        if self._live is not None:
            self._live.update(self._task, description=self._figures + self._score, completed=self._done)
            return
        now_s = self._clock()
        due = self._shown_at_s is None or now_s - self._shown_at_s >= self._interval_s
        if due or self._done >= self._num_steps:
            self._shown_at_s = now_s
            self._print_line()

    def show_score(self, val_score: float, *, name: str = "val") -> None:
        """Show a validation score from now on."""
        self._score = f"  {name} {val_score:.4f}"
        if self._live is not None:
            self._live.update(self._task, description=self._figures + self._score)

    def close(self) -> None:
        """End the bar where it stands; a plain log gets the last step if it was not shown."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._done > self._shown:
            self._print_line()
        self._shown = self._done

    def _print_line(self) -> None:
        self._shown = self._done
        print(f"step {self._done}/{self._num_steps}  {self._figures}{self._score}", file=self._stream, flush=True)
