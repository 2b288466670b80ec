"""Solve one case once and print what happened as JSON; ``benchmarks.planning`` runs it in a fresh process."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.problems import Case, Kind
from benchmarks.tables import layout_text
from milpplan import PlanResult, solve
from milpplan.optimize.search.closed_layouts import FATES

RU_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of getrusage's ru_maxrss."""


def summary(result: PlanResult, peak_bytes: int) -> dict[str, Any]:
    """What the tables need of a result, as plain data.

    ``bounded_fraction``: layouts that closed-form bounds on memory or time decided, without a simulation, a
    linear or an integer program.
    """
    fates = {} if result.layouts is None else {fate: result.layouts.count(fate) for fate in FATES}
    legal = sum(fates.values())
    bounded = fates.get("does_not_fit", 0) + fates.get("bounded", 0)
    return {
        "status": result.status,
        "step_time_s": result.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "mfu": None if result.report is None else result.report.mfu,
        "layout": None if result.plan is None else layout_text(result.plan),
        "legal": legal,
        "fates": fates,
        "bounded_fraction": bounded / legal if legal else 1.0,
        "pruned_fraction": 1.0 if result.layouts is None else result.layouts.pruned_fraction,
        "integer_programs": result.work.integer_programs,
        "relaxations": result.work.relaxations,
        "simulations": result.work.simulations,
        "proof": result.work.proof,
        "peak_bytes": peak_bytes,
    }


@contextmanager
def watched() -> Iterator[Callable[[], int]]:
    """Gives a function that says the most memory so far: of this process, or of it and its children together as
    seen ten times a second (Linux; a child's own ``ru_maxrss`` begins with what its parent held)."""
    seen, ended = [0], Event()

    def look() -> None:
        while not ended.wait(0.1):
            # A process or thread that ends meanwhile is gone.
            with suppress(OSError):
                seen[0] = max(seen[0], sum(_resident_bytes(pid) for pid in ("self", *_children())))

    watcher = Thread(target=look, daemon=True)
    watcher.start()
    yield lambda: max(seen[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RU_MAXRSS_BYTES)
    ended.set()
    watcher.join()


def _children() -> list[str]:
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def _resident_bytes(pid: str) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def run(case: Case, kind: Kind, time_limit_s: float) -> dict[str, Any]:
    """Solve a case in this process."""
    with watched() as peak_bytes:
        return summary(solve(case.problem(kind), time_limit_s=time_limit_s, gap=1e-4), peak_bytes())


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump(run(Case(**request["case"]), request["space"], request["time_limit_s"]), sys.stdout)
