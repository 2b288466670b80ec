"""Tasks solved by Ray: on a connected cluster, or on this machine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.studies.outcomes import Outcome, Solve, Task, failed, solved


def run(tasks: Sequence[Task], num_workers: int | None = None, solve: Solve = solved) -> Generator[Outcome]:
    """Yield the outcomes of tasks, in the order in which they finish.

    Args:
        tasks: the tasks.
        num_workers: maximum number of tasks at once; None: the CPUs of the cluster.
        solve: function that solves a task, of a module that every node has.

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
    """Yield the outcomes from Ray, with a bounded number of tasks at once."""
    # If a worker dies, Ray tries the task once more before it counts as failed.
    remote = ray.remote(num_cpus=1, max_retries=1)(solve)
    open_tasks, running = list(reversed(tasks)), dict[Any, Task]()
    try:
        while open_tasks or running:
            while open_tasks and len(running) < (num_workers or _slots(ray)):
                task = open_tasks.pop()
                running[remote.remote(task)] = task
            for reference in ray.wait(list(running), num_returns=1)[0]:
                yield _outcome(ray, reference, running.pop(reference))
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _outcome(ray: Any, reference: Any, task: Task) -> Outcome:
    """Return the outcome of a task, or a failed one if Ray has an error."""
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [""]
        return failed(task.key, f"Ray gave no result for this cell ({type(error).__name__}: {lines[-1]}).")
    return outcome


def _slots(ray: Any) -> int:
    """Return the number of tasks that run at once: CPUs of the cluster, which may grow and shrink."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _ray() -> Any:
    """Import Ray, or explain how to install it."""
    try:
        import ray
    except ImportError as error:
        raise InvalidInputError(
            "--ray needs Ray, which is not installed.",
            "Expected the Python package ray, on this machine and on the cluster.",
            "Install it with pip install -e '.[ray]', or leave --ray out to use this machine's processes.",
        ) from error
    return ray


def _connect(ray: Any, num_workers: int | None) -> None:
    """Connect to the cluster that RAY_ADDRESS names; without it, start a cluster on this machine."""
    import os

    address_options: dict[str, Any] = {}
    if not os.environ.get("RAY_ADDRESS"):
        # Without an address Ray would join any cluster that once ran here and left its address in a file.
        address_options = {"address": "local", "num_cpus": num_workers}
    try:
        ray.init(
            log_to_driver=False,
            logging_level="ERROR",
            include_dashboard=False if address_options else None,
            **address_options,
        )
    except Exception as error:
        raise InvalidInputError(
            f"Ray cannot be reached: {type(error).__name__}: {error}.",
            "Expected a running cluster at RAY_ADDRESS, or none there to start one on this machine.",
            "Check RAY_ADDRESS, `ray status`, and the token (RAY_AUTH_TOKEN) if the cluster asks for one.",
        ) from error
