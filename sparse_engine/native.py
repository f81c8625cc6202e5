"""Builds and loads the compiled code of `csrc/`: once for each kind of CPU, at first use, cached.

Not here: what the code does and how tensors get there (`cpu_backend.py`, `cpu_sampler.py`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi")
_LEVELS = {  # what torch calls a CPU's vectors, and the compiler's flags for it
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "DEFAULT": (),
}


class NativeError(RuntimeError):
    """The compiled code cannot be had here: says why in one line."""


def level() -> str:
    """The vectors to compile for: those of this CPU, or of the environment variable `GTX_CPU` (avx512, avx2, default).

    Raises:
        ValueError: if `GTX_CPU` is none of them.
    """
    wanted = os.environ.get("GTX_CPU", "").upper()
    if wanted:
        if wanted not in _LEVELS:
            raise ValueError(f"GTX_CPU is {wanted.lower()!r}; use {', '.join(name.lower() for name in _LEVELS)}")
        return wanted
    found = torch.backends.cpu.get_cpu_capability()
    return found if found in _LEVELS else "DEFAULT"


def library() -> ctypes.CDLL:
    """The compiled code for this process's CPU; built if it was not yet. Several processes may ask at once.

    Raises:
        NativeError: if there is no compiler, it fails, or what it made cannot be kept or loaded.
    """
    loaded = _load(level(), os.environ.get("CXX", "g++"), _cache_dir())
    if isinstance(loaded, NativeError):
        raise loaded
    return loaded


@cache
def _load(level: str, compiler: str, folder: Path) -> ctypes.CDLL | NativeError:
    command = [compiler, *_FLAGS, *_LEVELS[level], *map(str, sorted(_SOURCES.glob("*.cpp")))]
    built = folder / f"sparse_engine-{level.lower()}-{_fingerprint(level, compiler)}.so"
    try:
        _ensure(built, command)
        return ctypes.CDLL(str(built))
    except NativeError as error:
        return error
    except OSError as error:
        return NativeError(f"cannot keep the compiled sparse engine as {built}: {error}; set GTX_CACHE")


def _fingerprint(level: str, compiler: str) -> str:
    """16 hex digits of what is compiled, headers included, and how."""
    read = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    content = [compiler, *_FLAGS, *_LEVELS[level], *(path.read_text(encoding="utf-8") for path in read)]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _ensure(built: Path, command: list[str]) -> None:
    if not built.exists():
        if shutil.which(command[0]) is None:
            raise NativeError(f"there is no C++ compiler {command[0]!r}; install g++ or set CXX")
        built.parent.mkdir(parents=True, exist_ok=True)
        with open(built.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait for the one that builds
            if not built.exists():
                _build(command, built)


def _build(command: list[str], built: Path) -> None:
    print(f"compiling the sparse engine for this CPU, once (to {built}) ...", file=sys.stderr, flush=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:300])
            raise NativeError(f"{command[0]} cannot compile the sparse engine: {reason}")
        os.replace(made, built)
    print(f"compiled in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def _cache_dir() -> Path:
    """`GTX_CACHE`, or gtx under the user's cache folder."""
    if "GTX_CACHE" in os.environ:
        return Path(os.environ["GTX_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gtx"
