"""Step times and memory in the logs of training programs.

Formats, each read off the program's source:

- Megatron-LM and Megatron Bridge: ``training_log`` and ``report_memory`` (NVIDIA/Megatron-LM
  megatron/training/training.py, utils.py); MB are 2**20 bytes.
- NeMo: ``train_step_timing in s`` of its progress printer (NVIDIA/NeMo nemo/lightning/pytorch/callbacks).
- torchtitan: ``log`` of its metrics processor (pytorch/torchtitan torchtitan/components/metrics.py): tokens/s of a
  GPU and the memory that the allocator reserved.
- DeepSpeed: ``ThroughputTimer`` (microsoft/DeepSpeed deepspeed/utils/timer.py) with samples/s of the job, and the
  pipeline engine's ``iter time`` (runtime/pipe/engine.py); GB are 2**30 bytes.
- Transformers' Trainer: ``speed_metrics`` at the end (huggingface/transformers trainer_utils.py), which includes
  the first steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from milpplan.calibration.fitting.least_squares import MAD_TO_SIGMA
from milpplan.errors import InvalidInputError
from milpplan.problem import Plan, Problem
from milpplan.units import GIB, MIB

WARM: Final = 1.1
"""Ratio to the median of the last half of the steps up to which the first steps count as warmed up."""
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER: Final = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """Steps that a log prints, after the warm-up.

    Attributes:
        program: name of the program that wrote the log.
        steps_s: seconds a step, one entry a line of the log.
        num_warm_up: number of lines at the start that were left out.
        peak_bytes: largest peak of the log's ranks by kind, ``allocated`` or ``reserved``; empty where none is
            printed.
    """

    program: str
    steps_s: tuple[float, ...]
    num_warm_up: int
    peak_bytes: dict[str, int]

    @property
    def step_s(self) -> float:
        """Median seconds a step."""
        return median(self.steps_s)

    @property
    def scatter(self) -> float | None:
        """Robust one sigma of a line's seconds over the median; None for fewer than three lines."""
        if len(self.steps_s) < 3:
            return None
        return MAD_TO_SIGMA * median(abs(step - self.step_s) for step in self.steps_s) / self.step_s


Unit = Literal["ms", "s", "tokens/s of a GPU", "samples/s"]


@dataclass(frozen=True, slots=True)
class _Format:
    """Line of a program: its pattern with a value, the value's unit, and the pattern of the global batch."""

    program: str
    pattern: re.Pattern[str]
    unit: Unit
    batch: re.Pattern[str] | None = None


TRAINER: Final = "Transformers' Trainer"
_FORMATS: Final = (
    _Format(
        "Megatron-LM",
        re.compile(rf"\biteration\s+\d+/\s*\w+ \|.*?elapsed time per iteration \(ms\): *{_NUMBER}"),
        "ms",
        re.compile(r"\bglobal batch size: *(\d+) \|"),
    ),
    _Format(
        "NeMo",
        re.compile(rf"\biteration \d+/\d+ \|.*?train_step_timing in s: *{_NUMBER}"),
        "s",
        re.compile(r"\bglobal_batch_size: *(\d+)\b"),
    ),
    _Format("torchtitan", re.compile(rf"\bstep: *\d+ .*?\b(?:tps|wps): *{_NUMBER}"), "tokens/s of a GPU"),
    _Format("DeepSpeed", re.compile(rf"\bCurrSamplesPerSec={_NUMBER}"), "samples/s"),
    _Format("DeepSpeed", re.compile(rf"\bsteps: *\d+ .*?iter time \(s\): *{_NUMBER}"), "s"),
    _Format(TRAINER, re.compile(rf"'train_runtime':.*?'train_samples_per_second': *'?{_NUMBER}"), "samples/s"),
)
_MEMORY: Final = (
    ("allocated", re.compile(rf"\bmemory \(MB\) \|.*?max allocated: *{_NUMBER}"), MIB),
    ("reserved", re.compile(rf"\bmemory \(MB\) \|.*?max reserved: *{_NUMBER}"), MIB),
    ("reserved", re.compile(rf"\bstep: *\d+ .*?\bmemory: *{_NUMBER}GiB"), GIB),
    ("allocated", re.compile(rf"\bMaxMemAllocated={_NUMBER}GB"), GIB),
)

_MEGATRON_DEGREES: Final = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "micro_batch_size",
    "world_size": "num_gpus",
}
"""Fields of a layout by the names in Megatron's list of arguments (``_print_args`` of its arguments.py)."""
_MEGATRON_ARGUMENT: Final = re.compile(rf"(?<![\w-])({'|'.join(_MEGATRON_DEGREES)}) \.{{3,}} (\d+)\b")
_TORCHTITAN_MESH: Final = re.compile(r"\bdevice mesh with parallelism: ((?:\w+=\d+(?:, )?)+)")
_TORCHTITAN_DEGREES: Final = ("tp", "pp", "cp", "ep")


def program_of(text: str) -> str | None:
    """Return the program that wrote a log; None for other texts."""
    plain = _ESCAPES.sub("", text)
    return next((form.program for form in _FORMATS if form.pattern.search(plain)), None)


def logged_steps(text: str, source: str, problem: Problem, plan: Plan) -> LoggedSteps:
    """Read the steps and the memory of a log.

    Args:
        text: the log.
        source: its name, for errors.
        problem: what was trained; tokens/s and samples/s are turned into seconds with it.
        plan: the plan of the launch script.

    Returns:
        Steps after the warm-up, and peaks of memory.

    Raises:
        InvalidInputError: no line of a known program, every line has another global batch, or the program prints
            other degrees.
    """
    plain = _ESCAPES.sub("", text)
    _check_degrees(plain, source, plan)
    form = next((form for form in _FORMATS if form.pattern.search(plain)), None)
    if form is None:
        raise InvalidInputError(
            f"{source} has no line with the time of a step.",
            f"Expected the output of {', '.join(dict.fromkeys(one.program for one in _FORMATS))}.",
            "Give what the program printed on its logging rank.",
        )
    steps, others = [], set()
    for line in plain.splitlines():
        match = form.pattern.search(line)
        if match is None:
            continue
        batch = None if form.batch is None else form.batch.search(line)
        if batch is not None and int(batch[1]) != plan.layout.global_batch_size:
            others.add(int(batch[1]))
        elif (value := _value(match[1])) > 0:
            steps.append(_seconds(value, form.unit, problem, plan))
    if not steps:
        seen = f"a global batch of {', '.join(map(str, sorted(others)))}" if others else "no step that took time"
        raise InvalidInputError(
            f"{source} prints {seen}.",
            f"Expected steps of the script's global batch, {plan.layout.global_batch_size}.",
            "Give the log of this script.",
        )
    first = 0 if form.program == TRAINER else num_warm_up(steps)
    return LoggedSteps(form.program, tuple(steps[first:]), first, _peaks(plain))


def _check_degrees(text: str, source: str, plan: Plan) -> None:
    """Compare the degrees that Megatron-LM and torchtitan print at the start with the plan's.

    Raises:
        InvalidInputError: a degree differs.
    """
    printed = {_MEGATRON_DEGREES[name]: int(value) for name, value in _MEGATRON_ARGUMENT.findall(text)}
    for mesh in _TORCHTITAN_MESH.findall(text):
        pairs = dict(pair.split("=") for pair in mesh.split(", ") if pair)
        printed |= {name: int(pairs[name]) for name in _TORCHTITAN_DEGREES if name in pairs}
    expected = {name: getattr(plan.layout, name) for name in printed}
    if others := [name for name in printed if printed[name] != expected[name]]:
        raise InvalidInputError(
            f"{source} prints {', '.join(f'{name} {printed[name]}' for name in others)}.",
            f"Expected the log of a run with {', '.join(f'{name} {expected[name]}' for name in others)}.",
            "Give the log of this layout.",
        )


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def num_warm_up(steps_s: Sequence[float]) -> int:
    """Count the first lines whose steps are longer than those of the last half; the first line always counts."""
    if len(steps_s) < 3:
        return len(steps_s) - 1
    limit = WARM * median(steps_s[len(steps_s) // 2 :])
    return next((index for index in range(1, len(steps_s)) if steps_s[index] <= limit), 0)


def _seconds(value: float, unit: Unit, problem: Problem, plan: Plan) -> float:
    """Turn a printed value into seconds a step."""
    batch = plan.layout.global_batch_size
    if unit == "tokens/s of a GPU":
        return batch * problem.job.sequence_length / plan.layout.num_gpus / value
    return {"ms": value / 1e3, "s": value, "samples/s": batch / value}[unit]


def _peaks(text: str) -> dict[str, int]:
    """Return the largest printed peak of each kind, in bytes."""
    peaks: dict[str, int] = {}
    for kind, pattern, unit in _MEMORY:
        for match in pattern.finditer(text):
            peaks[kind] = max(peaks.get(kind, 0), round(_value(match[1]) * unit))
    return peaks
