"""Fixtures that several files ask for by name, and one that compiles what every test would compile first."""

from collections.abc import Iterator

import pytest
import torch

from sparse_engine import resolve_backend


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """The fused attention, which its first use compiles: not inside tests that wait for ranks or read what they say."""
    assert resolve_backend("cpu", "cpu", torch.float32) == "cpu"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The parent process computes on one thread, as the ranks do: tiny graphs gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
