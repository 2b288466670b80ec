"""The space of Calculon's search: its tasks, how many executions each holds, and random ones.

Loops and conditions are those of calculon/llm/optimal_execution.py at caa4b11; its own functions list the degrees.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.calculon_side import Checkout, Tree

RECOMPUTE = ("full", "attn_only", "none")
COMMUNICATION = ("ar", "p2p_rs_ag", "rs_ag")


@dataclass(frozen=True, slots=True)
class Task:
    """What one call of Calculon's ``search`` goes through."""

    tp: int
    pp: int
    dp: int
    vpp: int
    batch: int
    recompute: str
    sharding: bool
    communication: str
    micro_batches: tuple[int, ...]

    def choices(self, num_networks: int, second_memory: bool) -> dict[str, tuple[Any, ...]]:
        """The values that it tries of every other field."""
        switch = (True, False)
        redo = self.communication == "rs_ag" and self.recompute != "full"
        networks = tuple(range(num_networks))
        return {
            "seq_par_ag_redo": switch if redo else (False,),
            "data_par_overlap": switch if self.dp > 1 else (False,),
            "tensor_par_overlap": ("none", "ring", "pipe") if self.tp > 1 else ("none",),
            "weight_offload": switch if second_memory else (False,),
            "activations_offload": switch if second_memory and self.recompute != "full" else (False,),
            "optimizer_offload": switch if second_memory else (False,),
            "microbatch_size": self.micro_batches,
            "tensor_par_net": networks if self.tp > 1 else (0,),
            "pipeline_par_net": networks if self.pp > 1 else (0,),
            "data_par_net": networks if self.dp > 1 else (0,),
        }

    def count(self, num_networks: int, second_memory: bool) -> int:
        """Executions of the task."""
        return int(np.prod([len(values) for values in self.choices(num_networks, second_memory).values()]))


@dataclass(frozen=True, slots=True)
class Searched:
    """A search that was stopped: executions gone through, seconds, and the best step time found."""

    executions: int
    tasks: int
    cpu_s: float
    wall_s: float
    best_step_s: float | None


def tasks(checkout: Checkout, model: Tree, procs: int, batch: int) -> list[Task]:
    """All calls that Calculon's driver makes for one problem."""
    llm, found = checkout.llm, []
    for tp in llm.get_all_tensor_parallelisms(procs, model["hidden"], model["attn_heads"]):
        for pp in llm.get_all_pipeline_parallelisms(procs, tp, model["num_blocks"]):
            dp = llm.get_data_parallelism(procs, tp, pp)
            size = checkout.search.get_batch_size(dp, batch)
            if size is None:
                continue
            micro = tuple(llm.get_valid_microbatch_sizes(model["seq_size"], tp, dp, size, pp))
            found += [
                Task(tp, pp, dp, vpp, size, recompute, sharding, communication, micro)
                for vpp in llm.get_valid_pipeline_interleavings(model["num_blocks"], pp)
                for recompute in RECOMPUTE
                for sharding in ((True, False) if dp > 1 else (False,))
                for communication in COMMUNICATION
            ]
    return found


def size(all_tasks: list[Task], system: Tree) -> int:
    """Executions of the whole space."""
    return sum(_count(task, system) for task in all_tasks)


def _count(task: Task, system: Tree) -> int:
    return task.count(len(system["networks"]), system["mem2"]["GiB"] > 0)


def random_executions(all_tasks: list[Task], system: Tree, procs: int, rng: np.random.Generator) -> Iterator[Tree]:
    """Executions of the space, all equally likely, without end."""
    weights = np.array([_count(task, system) for task in all_tasks], dtype=np.float64)
    while True:
        task = all_tasks[int(rng.choice(len(all_tasks), p=weights / weights.sum()))]
        choices = task.choices(len(system["networks"]), system["mem2"]["GiB"] > 0)
        yield {
            "num_procs": procs,
            "tensor_par": task.tp,
            "pipeline_par": task.pp,
            "data_par": task.dp,
            "batch_size": task.batch,
            "datatype": "float16",
            "fused_activation": True,
            "attention_type": "multihead",
            "activation_recompute": task.recompute,
            "pipeline_interleaving": task.vpp,
            "optimizer_sharding": task.sharding,
            "tensor_par_comm_type": task.communication,
            "training": True,
            **{name: values[int(rng.integers(len(values)))] for name, values in choices.items()},
        }


def seconds_an_execution(
    checkout: Checkout, model: Tree, system: Tree, procs: int, batch: int, sample: int, seed: int
) -> float:
    """CPU seconds of Calculon for an execution of its space, as its search calls it: mean of a random sample."""
    draws = random_executions(tasks(checkout, model, procs, batch), system, procs, np.random.default_rng(seed))
    picked = [next(draws) for _ in range(sample)]
    return cpu_s(checkout, model, system, picked) / sample


def cpu_s(checkout: Checkout, model: Tree, system: Tree, executions: list[Tree]) -> float:
    """CPU seconds of Calculon for executions, one by one, as its search calls it."""
    application, built = checkout.llm.Application(model), checkout.system(system)
    started = time.process_time()
    for execution in executions:
        checkout.estimate(application, execution, built, talk=True)
    return time.process_time() - started


def search(
    checkout: Checkout, model: Tree, system: Tree, procs: int, batch: int, limit_s: float, seed: int
) -> Searched:
    """Calculon's own search, in one process, its tasks in random order, until ``limit_s`` of wall time have passed
    (the last task runs to its end)."""
    listed = tasks(checkout, model, procs, batch)
    order = np.random.default_rng(seed).permutation(len(listed))
    application, built = checkout.llm.Application(model), checkout.system(system)
    best, executions, done = None, 0, 0
    cpu, wall = time.process_time(), time.monotonic()
    for index in order:
        task = listed[int(index)]
        degrees = (
            task.tp,
            task.pp,
            task.dp,
            task.vpp,
            task.batch,
            task.recompute,
            task.sharding,
            task.communication,
        )
        words = (False, 1, False, procs, batch, "float16", application, built)
        found, count, *_ = checkout.search.search(*words, *degrees, [True], False, True, True)
        executions, done = executions + count, done + 1
        if found:
            step = found[0][1]["batch_size"] / found[0][0]
            best = step if best is None else min(best, step)
        if time.monotonic() - wall > limit_s:
            break
    return Searched(executions, done, time.process_time() - cpu, time.monotonic() - wall, best)
