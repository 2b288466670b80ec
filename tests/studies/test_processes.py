"""Workers: outcomes of every task, whatever becomes of the processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from milpplan.studies import outcomes
from milpplan.studies.outcomes import Outcome, Task, failed
from tests.studies.cases import study, sweep

TASKS = sweep(study()).open_tasks[:4]


def told(task: Task) -> Outcome:
    """An outcome that says which process made it; the second task kills its process, as the system does."""
    if task.key == TASKS[1].key:
        os.kill(os.getpid(), signal.SIGKILL)
    return failed(task.key, str(os.getpid()))


def test_a_worker_that_dies_costs_its_task_alone() -> None:
    """Four tasks on one worker: the second one's process is killed; it has failed, and a new one does the
    rest. Nothing is left running."""
    found = {outcome.key: outcome for outcome in outcomes.run(TASKS, 1, told)}
    assert list(found) == [task.key for task in TASKS]
    assert "signal 9" in found[TASKS[1].key].message
    first, third, fourth = (found[TASKS[i].key].message for i in (0, 2, 3))
    assert first != third == fourth
    for number in {first, third}:
        assert not Path(f"/proc/{number}").exists() or not Path("/proc/self").exists()
