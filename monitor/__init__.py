"""Measures: the seconds of a step by phase, bytes by kind of exchange, memory, and where the figures are written.

Knows nothing above it: no plan, no process group. To see all ranks it is handed a `gather`.
"""

from monitor.memory import (
    current_memory_bytes,
    device_utilisation,
    host_memory_bytes,
    memory_source,
    peak_memory_bytes,
    reset_peak_memory,
)
from monitor.records import (
    EXCHANGE_KINDS,
    PHASES,
    ExchangeRecord,
    Gather,
    PeerRecord,
    StepRecord,
    gather_steps,
    gathering_s,
    json_number,
    slowest_rank,
)
from monitor.sinks import METRICS_COLUMNS, CsvSink, JsonlSink, ProgressBar, TensorBoardSink, read_steps
from monitor.timers import PhaseTimer
from monitor.windows import RankWindow, Window, reduce_window

__all__ = [
    "EXCHANGE_KINDS",
    "METRICS_COLUMNS",
    "PHASES",
    "CsvSink",
    "ExchangeRecord",
    "Gather",
    "JsonlSink",
    "PeerRecord",
    "PhaseTimer",
    "ProgressBar",
    "RankWindow",
    "StepRecord",
    "TensorBoardSink",
    "Window",
    "current_memory_bytes",
    "device_utilisation",
    "gather_steps",
    "gathering_s",
    "host_memory_bytes",
    "json_number",
    "memory_source",
    "peak_memory_bytes",
    "read_steps",
    "reduce_window",
    "reset_peak_memory",
    "slowest_rank",
]
