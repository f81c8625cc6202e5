"""Folders of arrays on disk that several processes may make at once: whole or not there, memory-mapped when read.

Not here: what is in them and whether it is the right thing (`partition.py`, `neighbor_lists.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MANIFEST = "manifest.json"


def write_beside(folder: Path, arrays: Mapping[str, npt.NDArray[Any]], manifest: Mapping[str, Any]) -> Path:
    """Write one `.npy` per array and `manifest.json`, which describes them, into a new folder next to `folder`."""
    written = _aside(folder, "writing")
    written.mkdir(parents=True)
    try:
        for name, array in arrays.items():
            np.save(written / f"{name}.npy", array, allow_pickle=False)
        described = {name: {"shape": a.shape, "dtype": a.dtype.name} for name, a in arrays.items()}
        text = json.dumps({**manifest, "arrays": described}, indent=1)
        (written / MANIFEST).write_text(text + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    return written


def replace(written: Path, folder: Path) -> None:
    """Put `written` in the place of `folder`, whatever is there."""
    try:
        while not _moved(written, folder):
            _discard(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def settle(written: Path, folder: Path, is_right: Callable[[], bool]) -> None:
    """Put `written` in the place of `folder` unless another process was first with what is right."""
    try:
        for _ in range(8):
            if _moved(written, folder) or is_right():
                break
            _discard(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)


def read_manifest(folder: Path, kind: str, version: int) -> dict[str, Any]:
    """What `write_beside` was given. Raises ValueError if it is of another kind or version."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != kind or manifest["format_version"] != version:
        raise ValueError(
            f"its format is {manifest['format']!r} version {manifest['format_version']!r}, "
            f"this program reads {kind!r} version {version}"
        )
    return manifest


def open_array(folder: Path, name: str, described: Mapping[str, Any], dtypes: tuple[str, ...]) -> npt.NDArray[Any]:
    """An array, memory-mapped copy-on-write (torch warns of read-only ones): files never change.

    Raises ValueError if it is not what the manifest says, or of none of `dtypes`.
    """
    path = folder / f"{name}.npy"
    is_empty = 0 in described["shape"]  # a file without content cannot be mapped
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode=None if is_empty else "c", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if array.dtype.name != described["dtype"] or array.dtype.name not in dtypes:
        raise ValueError(f"{path.name} is {array.dtype.name}; the manifest says {described['dtype']}")
    if list(array.shape) != described["shape"]:
        raise ValueError(f"{path.name} has shape {list(array.shape)}; the manifest says {described['shape']}")
    if isinstance(array, np.memmap) and array.offset + array.nbytes != path.stat().st_size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes instead of {array.offset + array.nbytes}")
    return array


def _aside(folder: Path, purpose: str) -> Path:
    """A path next to `folder` that no other process uses; hidden, so that it is not taken for a kept one."""
    return folder.parent / f".{folder.name}.{purpose}-{uuid.uuid4().hex}"


def _moved(written: Path, folder: Path) -> bool:
    """Rename `written` to `folder`; False if something is there already."""
    try:
        os.rename(written, folder)
    except OSError:
        if not os.path.lexists(folder):
            raise
        return False
    return True


def _discard(folder: Path) -> None:
    """Take `folder` out of the way in one step, then delete it. Fine if another process has just done so."""
    unwanted = _aside(folder, "unwanted")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, unwanted)
        if unwanted.is_dir() and not unwanted.is_symlink():
            shutil.rmtree(unwanted, ignore_errors=True)
        else:
            unwanted.unlink()
