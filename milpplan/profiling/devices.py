"""Device to measure. PyTorch is imported here, and only when something is measured."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final, Literal

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.profiling.machine import Machine

Device = Literal["cuda", "cpu"]
DEVICES: Final[tuple[Device, ...]] = ("cuda", "cpu")


def open_machine(wanted: str | None) -> tuple[Machine, Device]:
    """Open the machine of a device; None: a GPU if there is one.

    Raises:
        InvalidInputError: PyTorch is missing, or there is no such device.
    """
    if wanted is not None and wanted not in DEVICES:
        raise UnknownNameError(
            f"--device {wanted!r} does not exist.", f"Expected one of {', '.join(DEVICES)}.", "Correct --device."
        )
    if find_spec("torch") is None:
        raise InvalidInputError(
            "PyTorch is not installed; `milpplan profile` measures with it.",
            "Expected the package torch in the environment that milpplan runs in.",
            "Install it with: pip install 'milpplan[profile]', or give measurements with --from RAW.json.",
        )
    device: Device = "cpu" if wanted == "cpu" else "cuda"
    if device == "cuda":
        _check_gpu()
    try:
        machine: Machine = import_module("milpplan.profiling.pytorch.machine").TorchMachine(device)
    except (RuntimeError, ImportError, OSError) as error:
        raise InvalidInputError(
            f"PyTorch cannot use the device {device}: {' '.join(str(error).split())[:300]}.",
            "Expected a device with free memory, and libraries and a driver that belong together.",
            "Check nvidia-smi and the installation of PyTorch, or try it out with --device cpu.",
        ) from error
    return machine, device


def _check_gpu() -> None:
    torch = import_module("torch")
    if torch.cuda.is_available():
        return
    built = torch.version.cuda or torch.version.hip
    why = "PyTorch sees no GPU" if built else "this PyTorch is built for the CPU only"
    raise InvalidInputError(
        f"There is no GPU to measure: {why} (torch {torch.__version__}).",
        "Expected at least one CUDA (or ROCm) device and a PyTorch built for it.",
        "Check nvidia-smi and the installation of PyTorch, run this on a machine with a GPU, or try it out with "
        "--device cpu.",
    )
