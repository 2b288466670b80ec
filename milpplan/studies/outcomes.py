"""One cell solved: the task that a worker gets, and the outcome that it returns and that is kept on disk.

``run`` runs tasks on worker processes of this machine.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel

from milpplan.errors import MilpplanError
from milpplan.optimize import PlanResult, SolveOptions
from milpplan.optimize.infeasibility import floor
from milpplan.optimize.solve import solve
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.parallel import run_tasks
from milpplan.problem import Problem
from milpplan.problem.records import Count, Record
from milpplan.reports.documents.plan_file import PlanDocument, plan_document
from milpplan.studies.grid import SolveSettings
from milpplan.units import gib_text
from milpplan.version import __version__

CellStatus = Literal["optimal", "feasible", "infeasible", "no_solution_found", "impossible", "failed"]
PROVED: Final = ("optimal", "infeasible", "impossible")
"""Final statuses: an optimum, a proof that there is none, or parts that cannot be combined."""
FOLDERS: Final = ("problem", "simulation", "optimize")
"""Folders with the code that determines a result."""
KEY_CHARACTERS: Final = 24
OTHER_CODE: Final = (
    "The worker has another milpplan than the program that started the sweep: {}. Install the same one on every "
    "node, start the sweep from a directory without a milpplan of its own, and add --retry-failed."
)
"""Error for Ray's workers, which look for modules in the sweep's directory before the installed ones."""
SHOWN_RULES: Final = 3


@cache
def code_digest() -> str:
    """Hash the cost model and the search as installed, so that an edited formula gives other keys."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path, entry in sorted(
            _sources(resources.files("milpplan") / folder, folder), key=lambda item: item[0]
        ):
            digest.update(f"{path}\n".encode())
            digest.update(entry.read_bytes())
    return digest.hexdigest()


def _sources(directory: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    """List the Python files of a directory and its subdirectories, with their paths."""
    for entry in directory.iterdir():
        inner = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, inner)
        elif entry.name.endswith(".py"):
            yield inner, entry


@dataclass(frozen=True, slots=True)
class Task:
    """A problem with its solve settings.

    ``key`` names both, together with the ``code`` that is to solve them (``code_digest``).
    """

    key: str
    problem: Problem
    settings: SolveSettings
    code: str = field(default_factory=code_digest)


class Outcome(Record):
    """Outcome of a task, as in the file of a cell."""

    schema_version: Literal[1] = 1
    key: str
    milpplan_version: str
    status: CellStatus
    step_time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: Count | None = None
    usable_memory_bytes: int | None = None
    least_memory_bytes: float | None = None
    """Where no plan fits: a proved lower bound on the peak of every plan."""
    plan: PlanDocument | None = None
    message: str = ""
    """Why there is no plan, or what went wrong."""
    wall_time_s: float = 0.0


Solve = Callable[[Task], Outcome]


def settings_options(settings: SolveSettings) -> SolveOptions:
    """Return the options of a solve, which runs beside others."""
    return SolveOptions(**settings.model_dump(), workers=1)


def task_of(problem: Problem, settings: SolveSettings) -> Task:
    """Build the task of a problem, with its key: equal for equal problems, options and code."""
    records = (problem.model, problem.hardware, problem.job, problem.space, *problem.other_hardware)
    parts = {
        "problem": [_digest(part) for part in records],
        "options": settings.model_dump(mode="json"),
        "version": __version__,
        "code": code_digest(),
    }
    text = json.dumps(parts, sort_keys=True)
    return Task(hashlib.sha256(text.encode()).hexdigest()[:KEY_CHARACTERS], problem, settings)


@cache
def _digest(record: BaseModel) -> str:
    """Hash one part of a problem; cells share models and hardware."""
    return hashlib.sha256(json.dumps(record.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def solved(task: Task) -> Outcome:
    """Solve a task; any error becomes a failed outcome with its message."""
    started = time.monotonic()
    if task.code != code_digest():
        return failed(task.key, OTHER_CODE.format(resources.files("milpplan")))
    try:
        # Numbers outside the range of floats raise an error instead of giving a wrong result.
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            outcome = _outcome(task, solve(task.problem, settings_options(task.settings)))
    except MilpplanError as error:
        outcome = failed(task.key, str(error))
    except Exception as error:
        outcome = failed(task.key, f"{type(error).__name__}: {error}")
    return outcome.model_copy(update={"wall_time_s": time.monotonic() - started})


def failed(key: str, message: str) -> Outcome:
    """Build the outcome of a task without a result."""
    return Outcome(key=key, milpplan_version=__version__, status="failed", message=message[:2000])


def impossible(message: str) -> Outcome:
    """Build the outcome of a cell whose parts cannot be combined, so that there was nothing to solve."""
    return Outcome(key="", milpplan_version=__version__, status="impossible", message=message)


def _outcome(task: Task, result: PlanResult) -> Outcome:
    """Build the outcome of a task from the result of its solve."""
    usable = result.details["usable_memory_bytes"]
    empty = Outcome(
        key=task.key,
        milpplan_version=__version__,
        status=result.status,
        lower_bound_s=result.lower_bound_s,
        usable_memory_bytes=usable,
        message=result.message,
    )
    if result.status == "infeasible":
        least_bytes = _least_memory_bytes(result)
        return empty.model_copy(
            update={"lower_bound_s": None, "least_memory_bytes": least_bytes, "message": _why(result, least_bytes)}
        )
    if result.plan is None or result.report is None:
        return empty.model_copy(update={"message": result.message or "Stopped before a plan was found."})
    report = result.report
    return empty.model_copy(
        update={
            "step_time_s": report.step_time_s,
            "gap": result.gap,
            "tokens_per_s": report.tokens_per_s,
            "mfu": report.mfu,
            "peak_memory_bytes": report.peak_memory_bytes,
            "plan": plan_document(result.plan),
        }
    )


def _least_memory_bytes(result: PlanResult) -> float | None:
    """Return a proved lower bound of the peak of any legal layout; None if no layout is legal."""
    bound_bytes: float | None = result.details["least_memory_bytes"]
    if bound_bytes is None:
        bounds = floor(result.problem, layout_space(result.problem))
        bound_bytes = None if bounds is None else bounds.memory_bytes
    return bound_bytes


def _why(result: PlanResult, least_memory: float | None) -> str:
    """Explain in one sentence why there is no plan."""
    if least_memory is None:
        rules = sorted((name for name, count in result.rejected.items() if count), key=result.rejected.__getitem__)
        named = ", ".join(rules[::-1][:SHOWN_RULES])
        reason = f"every one breaks a rule ({named})" if named else "no degrees multiply to the number of GPUs"
        return f"No layout is legal: {reason}."
    usable = result.details["usable_memory_bytes"]
    return f"No plan fits: the least peak is {gib_text(least_memory)}, usable are {gib_text(usable)}."


@dataclass(frozen=True, slots=True)
class CellWorker:
    """Worker that solves cells; also the first message to it, as it has no state."""

    solve: Solve

    def worker(self, gone: threading.Event) -> CellWorker:
        """Return the object that answers the following messages."""
        return self

    def reply(self, task: Task) -> Outcome:
        """Solve a task."""
        return self.solve(task)


def run(tasks: Sequence[Task], num_workers: int, solve: Solve = solved) -> Generator[Outcome]:
    """Return the outcomes of tasks, in the order in which they finish.

    The task of a worker that dies has failed; a new worker takes the next task.

    Args:
        tasks: the tasks.
        num_workers: maximum number of processes; at most one a task is started.
        solve: function of a module that solves a task.
    """
    return run_tasks(tasks, num_workers, CellWorker(solve), _failed_outcome)


def _failed_outcome(task: Task, how: str) -> Outcome:
    """Build the outcome of a task whose worker died."""
    return failed(task.key, f"The process that solved this cell died ({how}).")
