"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtx.words import bytes_text, counted, figure_text, seconds_text, share_text, value_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (4.5e-5, "45.0 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (123.4, "123 s"),
        (2345.6, "2,346 s"),
        (-0.002, "-2.00 ms"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (1010 * 1024, "1,010 KiB"), (2**50, "1,024 TiB")]
)
def test_bytes(size: float, text: str) -> None:
    assert bytes_text(size) == text


@given(st.floats(1e-6, 1e6))
def test_a_text_of_seconds_is_within_its_last_digit(seconds: float) -> None:
    number, unit = seconds_text(seconds).replace(",", "").split()
    assert float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=0.0051)


def test_the_rest() -> None:
    assert (share_text(0.125), share_text(-0.5), share_text(math.inf)) == ("+12.5 %", "-50.0 %", "–")
    assert (figure_text("nan"), figure_text(0.5), figure_text(None)) == ("nan", "0.5000", "–")
    assert value_text({"a": [1, 2.5, None], "b": True, "c": {}}) == "a 1 2.5 none, b yes, c none"
    assert (counted(1, "step"), counted(2000, "step")) == ("1 step", "2,000 steps")
