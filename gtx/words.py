"""Numbers as people read them: sizes, seconds, ratios and values of unknown kind, each as a short text.

Not here: the tables that hold them (`report.py`, `compare.py`, `page.py`).
"""

from __future__ import annotations

import math
from typing import Any

MISSING = "–"


def bytes_text(size: float | None) -> str:
    """A size with its unit, three digits or all of those before the point: `512 B`, `1.50 MiB`, `1,010 KiB`."""
    if size is None or not math.isfinite(size):
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:,.0f} B" if unit == "B" else f"{_three(size)} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def seconds_text(seconds: float | None) -> str:
    """Seconds with the unit that leaves few zeros: `45 µs`, `12.3 ms`, `1.23 s`, `2,345 s`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 0.9995:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds * 1e6)} µs" if seconds else "0 s"


def _three(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def share_text(share: float | None) -> str:
    """A signed share in percent: `+12.5 %`."""
    return MISSING if share is None or not math.isfinite(share) else f"{100 * share:+.1f} %"


def figure_text(value: float | str | None) -> str:
    """A loss or a score with four decimals; `nan` and `inf` as they stand."""
    if value is None:
        return MISSING
    return f"{float(value):.4f}"


def value_text(value: Any) -> str:
    """A value of any kind of a config or of facts."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value)) if value else "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {value_text(entry)}" for key, entry in value.items()) if value else "none"
    return str(value)


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """`1 step`, `2 steps`, `1,000 steps`."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
