"""Memory: the peak follows what is touched, and the report can say where the figure comes from."""

import numpy as np
import pytest

from monitor import memory

MIB = 2**20


def test_the_peak_moves_when_a_large_array_is_touched():
    memory.reset_peak_memory("cpu")
    before = memory.peak_memory_bytes("cpu")
    # Higher than any peak that could not be reset.
    size = 64 * MIB + max(0, before - (memory.current_memory_bytes("cpu") or before))
    array = np.ones(size, dtype=np.uint8)
    risen = memory.peak_memory_bytes("cpu") - before
    assert 60 * MIB < risen < size + 64 * MIB
    assert array[-1] == 1


def test_a_reset_forgets_what_was_freed():
    array = np.ones(128 * MIB, dtype=np.uint8)
    high = memory.peak_memory_bytes("cpu")
    del array
    assert memory.peak_memory_bytes("cpu") > high - 8 * MIB  # the kernel counts in batches, so about
    if not memory.reset_peak_memory("cpu"):
        pytest.skip("this system does not permit resetting the peak resident set")
    assert memory.peak_memory_bytes("cpu") < high - 100 * MIB


def test_the_source_says_what_the_system_permits(monkeypatch, tmp_path):
    if memory.reset_peak_memory("cpu"):
        assert memory.memory_source("cpu") == "resident set (VmHWM), since the last reset"
    status = tmp_path / "status"
    status.write_text("VmPeak:\t 9 kB\nVmHWM:\t    2020 kB\nVmRSS:\t 1000 kB\n")
    monkeypatch.setattr(memory, "STATUS", status)
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    assert memory.memory_source("cpu") == "resident set (VmHWM), since the process began"
    assert memory.peak_memory_bytes("cpu") == 2020 * 1024
    assert memory.current_memory_bytes("cpu") == 1000 * 1024
    assert not memory.reset_peak_memory("cpu")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "absent")
    assert memory.memory_source("cpu") == "resident set (getrusage), since the process began"
    assert memory.peak_memory_bytes("cpu") > MIB
    assert memory.current_memory_bytes("cpu") is None
    assert not memory.reset_peak_memory("cpu")


def test_an_unknown_device_is_told():
    for function in (memory.peak_memory_bytes, memory.reset_peak_memory, memory.memory_source):
        with pytest.raises(ValueError, match="device 'tpu:0' cannot be read; use cpu, cuda"):
            function("tpu:0")


def test_cuda_peaks_come_from_the_allocator():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    memory.reset_peak_memory("cuda:0")
    before = memory.peak_memory_bytes("cuda:0")
    array = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda:0")
    assert memory.peak_memory_bytes("cuda:0") - before >= 64 * MIB
    del array
    memory.reset_peak_memory("cuda:0")
    assert memory.peak_memory_bytes("cuda:0") == before
