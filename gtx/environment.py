"""Facts about a run that are not measured: versions, devices, exactness class.

Not here: the report they go into (`report.py`) and what is measured (`monitor/`).
"""

from __future__ import annotations

import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gtx import __version__
from gtx.config import Config
from gtx.parallel.world import World
from monitor import host_memory_bytes


def exactness(config: Config) -> str:
    """How the result relates to one rank's, with the reason."""
    if config.engine.precision in ("bf16", "fp16"):
        return f"tolerance: equal to one rank within the rounding of {config.engine.precision}"
    return "exact: the plan only reorders sums"


def versions() -> dict[str, Any]:
    """Versions of what computed, and the commit where the code is under version control."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        commit = found.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "dgl": version("dgl"),
        "gtx": __version__,
        "commit": commit,
    }


def device_facts(world: World) -> dict[str, Any]:
    """This rank's device for the report; what the system does not tell is `unknown`."""
    name, memory = "unknown", None
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        name, memory = properties.name, int(properties.total_memory)
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
        except OSError:
            pass
        memory = host_memory_bytes()
    host = socket.gethostname()
    return {"rank": world.rank, "kind": world.device.type, "name": name, "host": host, "memory_bytes": memory}
