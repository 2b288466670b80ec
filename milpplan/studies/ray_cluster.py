"""Tasks solved by Ray: on the cluster that it is connected to, or on this machine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.studies.outcomes import Outcome, Solve, Task, failed, solved


def run(tasks: Sequence[Task], num_workers: int | None = None, solve: Solve = solved) -> Generator[Outcome]:
    """The outcomes of tasks, in the order in which they are finished.

    Args:
        tasks: what to solve.
        num_workers: most tasks at once; None: as many as the cluster has CPUs.
        solve: what is done with a task; a function of a module that every node has.

    Raises:
        InvalidInputError: Ray is not installed, or its cluster cannot be reached.
    """
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        _connect(ray, num_workers)
    try:
        yield from _outcomes(ray, tasks, num_workers, solve)
    finally:
        if ours:
            ray.shutdown()


def _outcomes(ray: Any, tasks: Sequence[Task], num_workers: int | None, solve: Solve) -> Generator[Outcome]:
    # A worker that dies is tried again by Ray itself before its task has failed.
    remote = ray.remote(num_cpus=1, max_retries=1)(solve)
    waiting, running = list(reversed(tasks)), dict[Any, Task]()
    try:
        while waiting or running:
            while waiting and len(running) < (num_workers or _slots(ray)):
                task = waiting.pop()
                running[remote.remote(task)] = task
            for done in ray.wait(list(running), num_returns=1)[0]:
                yield _outcome(ray, done, running.pop(done))
    finally:
        for left in running:
            ray.cancel(left, force=True)


def _outcome(ray: Any, done: Any, task: Task) -> Outcome:
    try:
        outcome: Outcome = ray.get(done)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [""]
        return failed(task.key, f"Ray gave no result for this cell ({type(error).__name__}: {lines[-1]}).")
    return outcome


def _slots(ray: Any) -> int:
    """Tasks that run at once: CPUs of the cluster, which may grow and shrink."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InvalidInputError(
            "--ray needs Ray, which is not installed.",
            "Expected the Python package ray, on this machine and on the cluster.",
            "Install it with pip install 'milpplan[ray]', or leave --ray out to use this machine's processes.",
        ) from error
    return ray


def _connect(ray: Any, num_workers: int | None) -> None:
    """To the cluster that RAY_ADDRESS names; without, a cluster of this machine is started."""
    import os

    own: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # Without an address Ray would join any cluster that once ran here and left its address in a file.
        own = {"address": "local", "num_cpus": num_workers}
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False if own else None, **own)
    except Exception as error:
        raise InvalidInputError(
            f"Ray cannot be reached: {type(error).__name__}: {error}.",
            "Expected a running cluster at RAY_ADDRESS, or none there to start one on this machine.",
            "Check RAY_ADDRESS, `ray status`, and the token (RAY_AUTH_TOKEN) if the cluster asks for one.",
        ) from error
