"""Peak memory of a device as this process uses it, and where the figure comes from.

Not here: the estimate of what a plan would need (`scheduler/`).

On CUDA it is what torch's allocator handed out. On the CPU it is the process's resident set, which includes the
interpreter, the libraries and the data, so compare runs by differences.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def peak_memory_bytes(device: str) -> int:
    """The highest use since the last `reset_peak_memory`, or since the process began where it cannot be reset.

    device: `cpu`, `cuda` or `cuda:<index>`; ValueError otherwise.
    """
    if _is_cuda(device):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    peak = _status_bytes("VmHWM")
    return peak if peak is not None else _rusage_peak_bytes()


def current_memory_bytes(device: str) -> int | None:
    """What is in use now; None where the system does not tell."""
    if _is_cuda(device):
        import torch

        return int(torch.cuda.memory_allocated(device))
    return _status_bytes("VmRSS")


def host_memory_bytes() -> int | None:
    """This host's memory, or what its control group allows if that is less; None where the system does not tell."""
    known = []
    if hasattr(os, "sysconf"):
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" where there is no limit
            known.append(int(text))
    return min(known, default=None)


def reset_peak_memory(device: str) -> bool:
    """Let the peak start again from what is in use now. False where the system does not permit it."""
    if _is_cuda(device):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    if _status_bytes("VmHWM") is None:
        return False
    try:
        CLEAR_REFS.write_text("5")  # 5 resets the peak resident set, proc(5)
    except OSError:
        return False
    return True


def memory_source(device: str) -> str:
    """Where `peak_memory_bytes` comes from, in words for a report, and whether it can be reset."""
    if _is_cuda(device):
        return "torch CUDA allocator, since the last reset"
    if _status_bytes("VmHWM") is None:
        return "resident set (getrusage), since the process began"
    if not os.access(CLEAR_REFS, os.W_OK):
        return "resident set (VmHWM), since the process began"
    return "resident set (VmHWM), since the last reset"


def device_utilisation(device: str) -> float | None:
    """The share of time in which the GPU ran kernels lately, 0 to 1, by NVML; None on a CPU or without NVML."""
    if not _is_cuda(device):
        return None
    import torch

    try:
        return float(torch.cuda.utilization(device)) / 100.0
    except (ModuleNotFoundError, RuntimeError):  # pynvml is not installed, or the driver does not tell
        return None


def _is_cuda(device: str) -> bool:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"memory of the device {device!r} cannot be read; use cpu, cuda or cuda:<index>")
    return kind == "cuda"


def _status_bytes(name: str) -> int | None:
    """A size from /proc/self/status, which counts in kiB. None where there is no such line."""
    try:
        text = STATUS.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _rusage_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, Linux in kiB
