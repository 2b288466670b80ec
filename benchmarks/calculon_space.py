"""The space of Calculon's search: its tasks, how many executions each holds, and what random ones cost it.

Loops and conditions are those of calculon/llm/optimal_execution.py at caa4b11; its own functions list the degrees.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import numpy as np

from benchmarks.calculon_side import Checkout, Tree

RECOMPUTE = ("full", "attn_only", "none")
COMMUNICATION = ("ar", "p2p_rs_ag", "rs_ag")
NETWORKS = ("tensor_par_net", "pipeline_par_net", "data_par_net")


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

    def networks(self, system: Tree, *, taken: bool) -> list[dict[str, int]]:
        """The choices of networks that Calculon takes, or that it refuses before it estimates anything.

        Source: calculon/llm/llm.py at caa4b11, ``_check_network_assignments``.
        """
        tiers, choices = system["networks"], self.choices(len(system["networks"]), True)
        found = []
        for chosen in product(*(choices[name] for name in NETWORKS)):
            sizes: dict[int, int] = {}
            for degree, tier in zip((self.tp, self.pp, self.dp), chosen, strict=True):
                if degree > 1:
                    sizes[tier] = sizes.get(tier, 1) * degree
            fits = all(size <= tiers[tier]["size"] for tier, size in sizes.items())
            filled = all(
                not tiers[tier]["must_be_filled"] or tiers[tier]["size"] % size == 0
                for tier, size in sizes.items()
            )
            if (fits and filled) == taken:
                found.append(dict(zip(NETWORKS, chosen, strict=True)))
        return found

    def others(self, system: Tree) -> int:
        """Choices of everything but the networks."""
        choices = self.choices(len(system["networks"]), system["mem2"]["GiB"] > 0)
        return math.prod(len(values) for name, values in choices.items() if name not in NETWORKS)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of Calculon for all executions of a space, from random ones: ``number`` [2] of those that it
    estimates and of those whose networks it refuses at once, the mean seconds of each, their standard errors."""

    number: tuple[int, int]
    mean_s: tuple[float, float]
    error_s: tuple[float, float]

    @property
    def executions(self) -> int:
        """All of them."""
        return sum(self.number)

    @property
    def cpu_s(self) -> float:
        """An extrapolation."""
        return sum(number * mean for number, mean in zip(self.number, self.mean_s, strict=True))

    @property
    def standard_error_s(self) -> float:
        """Of ``cpu_s``."""
        return math.hypot(*(n * error for n, error in zip(self.number, self.error_s, strict=True)))


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


def random_executions(
    all_tasks: list[Task], system: Tree, procs: int, rng: np.random.Generator, *, taken: bool = True
) -> Iterator[Tree]:
    """Executions of the space, all equally likely, without end: those whose networks Calculon takes, or others."""
    networks = [task.networks(system, taken=taken) for task in all_tasks]
    numbers = [len(own) * task.others(system) for own, task in zip(networks, all_tasks, strict=True)]
    weights = np.array(numbers, dtype=np.float64)
    while True:
        index = int(rng.choice(len(all_tasks), p=weights / weights.sum()))
        task, own = all_tasks[index], networks[index]
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
            **own[int(rng.integers(len(own)))],
        }


@dataclass(frozen=True, slots=True)
class Drawn:
    """A space of Calculon's: ``number`` [2] of the executions that it estimates and of those whose networks it
    refuses at once, and random ones of each."""

    number: tuple[int, int]
    executions: tuple[tuple[Tree, ...], tuple[Tree, ...]]


def drawn(checkout: Checkout, model: Tree, system: Tree, procs: int, batch: int, sample: int) -> Drawn:
    """Count the space, and draw ``sample`` executions of each sort that there is."""
    found, rng = tasks(checkout, model, procs, batch), np.random.default_rng(1)
    number: list[int] = []
    executions: list[tuple[Tree, ...]] = []
    for taken in (True, False):
        number.append(sum(task.others(system) * len(task.networks(system, taken=taken)) for task in found))
        draws = random_executions(found, system, procs, rng, taken=taken) if number[-1] else iter(())
        executions.append(tuple(islice(draws, sample)))
    return Drawn((number[0], number[1]), (executions[0], executions[1]))


def cost_of(number: tuple[int, int], seconds: Sequence[Sequence[float]]) -> Cost:
    """The cost of a space from the CPU seconds of executions of each sort that were drawn from it."""
    mean = [float(np.mean(own)) if own else 0.0 for own in seconds]
    error = [float(np.std(own, ddof=1) / math.sqrt(len(own))) if own else 0.0 for own in seconds]
    return Cost(number, (mean[0], mean[1]), (error[0], error[1]))


def cost(
    checkout: Checkout, model: Tree, system: Tree, procs: int, batch: int, sample: int, *, talk: bool = True
) -> Cost:
    """CPU seconds of Calculon for its whole space: the numbers of executions times the means of random samples.

    ``talk``: as its search calls it; else with its logger switched off.
    """
    space = drawn(checkout, model, system, procs, batch, sample)
    return cost_of(space.number, [each_s(checkout, model, system, own, talk=talk) for own in space.executions])


def each_s(
    checkout: Checkout, model: Tree, system: Tree, executions: Sequence[Tree], *, talk: bool = True
) -> list[float]:
    """CPU seconds of Calculon for each execution."""
    application, built, seconds = checkout.llm.Application(model), checkout.system(system), []
    for execution in executions:
        started = time.process_time()
        checkout.estimate(application, execution, built, talk=talk)
        seconds.append(time.process_time() - started)
    return seconds
