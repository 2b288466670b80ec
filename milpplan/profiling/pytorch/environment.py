"""Description of the measured device, and of the versions of its software."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from contextlib import suppress
from typing import Any, Final

import torch

from milpplan.profiling.records import Environment
from milpplan.version import __version__

WAIT_S: Final = 10.0


def environment_of(device: Any, notes: tuple[str, ...]) -> Environment:
    """Describe date, device, driver and libraries."""
    libraries = {"torch": str(torch.__version__), "python": platform.python_version(), "milpplan": __version__}
    date = datetime.date.today().isoformat()
    if device.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Environment(
            date=date,
            device="cpu",
            device_name=platform.processor() or platform.machine(),
            num_devices=1,
            memory_bytes=memory,
            num_processors=os.cpu_count() or 0,
            driver="none",
            libraries=libraries,
            notes=notes,
        )
    properties = torch.cuda.get_device_properties(device)
    return Environment(
        date=date,
        device="cuda",
        device_name=properties.name,
        num_devices=torch.cuda.device_count(),
        memory_bytes=int(properties.total_memory),
        num_processors=int(properties.multi_processor_count),
        driver=_driver(),
        libraries=libraries | _of_cuda(),
        notes=notes,
    )


def _of_cuda() -> dict[str, str]:
    """Return the versions of CUDA (or HIP), cuDNN and NCCL."""
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    with suppress(AttributeError, RuntimeError, TypeError):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: str(version) for name, version in versions.items() if version}


def _driver() -> str:
    """Return the driver's version from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = done.stdout.split()
    return lines[0] if lines else "unknown"
