"""Galvatron's layer-wise problem as strategy graphs, solved to a proof.

Galvatron (github.com/PKU-DAIR/Hetu-Galvatron, main at cea12ff) picks a strategy for every layer: tensor or
sequence parallel, data parallel with ZeRO-2 or ZeRO-3, checkpointing or not; by dynamic programming over whole MB
of memory, once per number of chunks, of stages, largest degree and embedding strategy. Here each of these is a
graph with one node per layer, one memory limit per stage, and its final cost as two peaks:

    max(sum_i C_i + (m - 1) C_last, q C_0 + w C_0, sum_(i > 0) C_i + w C_0) + max(0, R_i - sum_(j <= i) C_j)

with C_i a stage's time without and R_i its layers' time with the gradients' reduction, m chunks, p stages,
q = min(p, m) - 1 and w = max(0, m + 1 - p). Source: galvatron/core/cost_model and core/search_engine. Sequence
boundaries between layers cost nothing in that final cost, so equal layers fold into counts.

    python examples/adapters/galvatron.py [case [backend]]
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milpplan.graph import Peak, StrategyGraph

CASES = Path(__file__).with_name("galvatron_cases.json")
CONTEXT_MB = 1024
RESERVED_FRACTION = 0.2


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """Degrees of one layer (or of embedding and head)."""

    pp: int
    tp: int
    sp: int
    dp: int
    zero3: bool
    checkpoint: bool = False

    @property
    def sharing(self) -> int:
        """Ranks that share the work of a micro-batch."""
        return max(self.tp, self.sp)

    @property
    def sharded(self) -> int:
        """Ranks over which optimizer states are sharded."""
        return self.dp * self.sp


@dataclass(frozen=True, slots=True)
class Task:
    """What Galvatron searches in one go."""

    chunks: int
    pp: int
    mode: str
    max_degree: int
    embedding: Strategy


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The best plan, its time, the bound over the whole space, and what that took."""

    time_s: float
    bound_s: float
    task: Task
    layers: tuple[Strategy, ...]
    programs: int
    cpu_s: float
    wall_s: float


def strategies(inputs: dict[str, Any]) -> list[Strategy]:
    """All layer strategies: powers of two whose product is the number of GPUs."""
    world = inputs["num_nodes"] * inputs["gpus_per_node"]
    degrees = [2**k for k in range(world.bit_length()) if 2**k <= world]
    found = set()
    for pp in degrees:
        for share in [d for d in degrees if d * pp <= world]:
            dp = world // pp // share
            for zero3 in (False, True) if dp > 1 else (False,):
                for checkpoint in (False, True):
                    found.add(Strategy(pp, share, 1, dp, zero3, checkpoint))
                    found.add(Strategy(pp, 1, share, dp, zero3, checkpoint))
    return sorted(found)


def tasks(inputs: dict[str, Any]) -> Iterator[Task]:
    """Chunks, stages, mode, largest degree and embedding; no mode inside another of equal memory."""
    world = inputs["num_nodes"] * inputs["gpus_per_node"]
    batch, fixed = inputs["bsz"]["settle_bsz"], inputs["bsz"]["settle_chunk"]
    everything = strategies(inputs)
    for chunks in [fixed] if fixed != -1 else [m for m in range(1, batch + 1) if batch % m == 0]:
        for pp in sorted({s.pp for s in everything if s.pp <= chunks and s.pp <= inputs["layers"][0]}):
            top = world // pp
            bottom = max(1, top // max(1, min(batch // chunks, top)))
            degrees = [2**k for k in range(top.bit_length()) if bottom <= 2**k <= top]
            for mode, largest in [("sp_only", top), *(("tp_with_sp", degree) for degree in degrees)]:
                embeddings = {Strategy(s.pp, s.tp, s.sp, s.dp, s.zero3) for s in everything}
                for embedding in sorted(embeddings):
                    task = Task(chunks, pp, mode, largest, embedding)
                    if _allowed(inputs, task, embedding):
                        yield task


def _allowed(inputs: dict[str, Any], task: Task, strategy: Strategy) -> bool:
    batch = inputs["bsz"]["settle_bsz"] // task.chunks
    widest = max(1, min(batch, inputs["num_nodes"] * inputs["gpus_per_node"] // task.pp))
    within = strategy.pp == task.pp and strategy.sharing <= task.max_degree and strategy.dp <= widest
    return within and (task.mode != "sp_only" or strategy.tp == 1)


def _line(size: float, fit: Any) -> float:
    return float(fit[0] * size + fit[1]) if isinstance(fit, list) else float(fit * size)


def _latency(table: dict[str, Any], size_mb: float) -> float:
    exact = {float(k): v for k, v in table.items() if k != "popt"}
    return float(exact[size_mb]) if size_mb in exact else _line(size_mb, table["popt"])


def _local_batch(inputs: dict[str, Any], task: Task, strategy: Strategy) -> int:
    return int(inputs["bsz"]["settle_bsz"] // task.chunks // strategy.dp)


def _reduction_coefficient(inputs: dict[str, Any], strategy: Strategy) -> float:
    return float(inputs["allreduce_coe_ms_per_MB"][f"{strategy.sharded}_{0 if strategy.tp != 1 else 1}"])


def layer_time_s(inputs: dict[str, Any], task: Task, s: Strategy, reduces: bool) -> float:
    """Forward and backward of one layer and chunk (layer_cost.py); ``reduces``: with the gradients' reduction."""
    layers, slow, batch = inputs["layers"][0], inputs["overlap_coe"], _local_batch(inputs, task, s)
    forward = _line(batch / s.sharing, inputs["forward_time_ms"][0])
    backward = (3 if s.checkpoint else 2) * forward
    message_mb = (s.sharded - 1) / s.sharded * inputs["param_size_MB"][0] / s.tp
    coefficient = _reduction_coefficient(inputs, s)
    total = forward + backward
    if s.dp > 1:
        reduction = message_mb * coefficient * reduces
        # Whatever overlaps is slowed down; the longer of the two ends alone.
        hidden = min(reduction, backward)
        total = forward + hidden * slow + (reduction - hidden) + (backward - hidden)
    if s.sharing > 1:
        size_mb = batch * inputs["seqlen"][0] * inputs["hidden"][0] * 2 / 2**20
        table = inputs["allgather_latency"][str(s.tp)] if s.tp > 1 else inputs["all2all_latency"][str(s.sp)]
        total += _latency(table, size_mb) * (6 if s.tp > 1 else 4) * (1.5 if s.checkpoint else 1.0)
    if s.zero3:
        total += message_mb / 2 * coefficient
    if s.pp > 1:
        size_mb = s.pp * 2 * batch * inputs["seqlen"][0] * inputs["hidden"][0] * 2 / 2**20
        # One transfer a stage, spread over the layers of the model.
        total += size_mb * inputs["p2p_coe"][str(s.pp)] / layers
    return total / 1000


def _state_ratio(inputs: dict[str, Any], task: Task, s: Strategy) -> float:
    """What is left of four times the parameters under ZeRO (bf16)."""
    if s.dp == 1:
        return 1.0
    share = 1 / s.sharded + 0.003
    if task.chunks == 1:
        return share if s.zero3 else 7 / 8 * share + 1 / 8
    if inputs["async_grad_reduce"]:
        return 7 / 8 * share + 1 / 8 if s.zero3 else 6 / 8 * share + 2 / 8
    return (share if s.zero3 else 7 / 8 * share + 1 / 8) * 5 / 4


def layer_memory_mb(inputs: dict[str, Any], task: Task, s: Strategy, stage: int) -> int:
    """States and activations of one layer, rounded up as Galvatron does."""
    states = 4 * inputs["param_size_MB"][0] / s.tp * _state_ratio(inputs, task, s)
    live = (task.pp - stage if task.pp > 1 else 1) * _local_batch(inputs, task, s)
    kept = inputs["act_MB_per_bsz"][0]
    activations = kept["checkpoint"] * live / s.sharing if s.checkpoint else kept[str(s.sharing)] * live
    return math.ceil(states + activations)


def ends_time_s(inputs: dict[str, Any], task: Task) -> list[float]:
    """Embedding and head by stage, without the gradients' reduction (embedding_lmhead_cost.py)."""
    e, slow = task.embedding, inputs["overlap_coe"]
    batch = _local_batch(inputs, task, e)
    compute = _line(batch / e.sharing, inputs["other_time_ms"][0])
    coefficient = _reduction_coefficient(inputs, e) * (e.sharded - 1) / e.sharded
    gather = 0.0
    if e.tp > 1:
        size_mb = batch * inputs["seqlen"][0] * inputs["hidden"][0] * 2 / 2**20
        gather = _latency(inputs["allgather_latency"][str(e.tp)], size_mb)
    where = {0: "first_stage", task.pp - 1: "last_stage"}
    times = [0.0] * task.pp
    for stage, name in where.items():
        table = inputs["other_memory_pp_off"] if task.pp == 1 else inputs["other_memory_pp_on"][name]
        message = table["model_states"][str(e.tp)] / 4 * 0.5 * coefficient * (0.5 if e.zero3 else 0.0)
        part = compute if task.pp == 1 else compute / 2
        times[stage] = sum(_overlapped(message, work, slow) for work in (part, 2 * part))
        times[stage] += gather * (2 if task.pp == 1 else 1)
    return [t / 1000 for t in times]


def _overlapped(message: float, work: float, slow: float) -> float:
    return message + (work * slow - message) / slow if work * slow > message else message


def ends_memory_mb(inputs: dict[str, Any], task: Task) -> list[int]:
    """Embedding, head, context and the shared buffer, by stage."""
    e = task.embedding
    batch = _local_batch(inputs, task, e)
    found = []
    for stage in range(task.pp):
        total = float(CONTEXT_MB)
        if stage in (0, task.pp - 1):
            name = "first_stage" if stage == 0 else "last_stage"
            table = inputs["other_memory_pp_off"] if task.pp == 1 else inputs["other_memory_pp_on"][name]
            live = task.pp if stage == 0 and task.pp > 1 else 1
            total += table["model_states"][str(e.tp)] * _state_ratio(inputs, task, e)
            total += table["activation"][str(e.sharing)] * live * batch
        found.append(math.ceil(total) + _buffer_mb(inputs, task))
    return found


def _buffer_mb(inputs: dict[str, Any], task: Task) -> int:
    if task.mode == "sp_only" or not (inputs["sequence_parallel"] and inputs["global_memory_buffer"]):
        return 0
    ranks = inputs["num_nodes"] * inputs["gpus_per_node"] // task.pp // task.max_degree
    batch = inputs["bsz"]["settle_bsz"] / task.chunks / ranks
    return int(batch * inputs["hidden"][0] * max(inputs["seqlen"]) * 2 / 2**20)


def budget_mb(inputs: dict[str, Any]) -> int:
    """The limit of a GPU, less what Galvatron reserves above 20 GB."""
    limit = inputs["memory_constraint_GB"] * 1024
    return limit - int(limit * RESERVED_FRACTION) if limit // 1024 > 20 else limit


def graph_of(inputs: dict[str, Any], task: Task) -> tuple[StrategyGraph, list[Strategy]] | None:
    """The task as a strategy graph; None where embedding and head alone do not fit."""
    choices = [s for s in strategies(inputs) if _allowed(inputs, task, s)]
    room = [budget_mb(inputs) - m for m in ends_memory_mb(inputs, task)]
    if not choices or min(room) < 0:
        return None
    n, p, m = inputs["layers"][0], task.pp, task.chunks
    stage_of = [min(layer // (n // p), p - 1) for layer in range(n)]
    plain = np.array([layer_time_s(inputs, task, s, False) for s in choices])
    synced = np.array([layer_time_s(inputs, task, s, True) for s in choices])
    memory = [np.zeros((len(choices), p)) for _ in range(n)]
    for layer, stage in enumerate(stage_of):
        memory[layer][:, stage] = [layer_memory_mb(inputs, task, s, stage) for s in choices]
    ends, q, w = ends_time_s(inputs, task), min(p, m) - 1, max(0, m + 1 - p)

    def peak(stage_weights: list[float], reduced: int | None = None) -> Peak:
        costs = [a * plain + (synced if stage == reduced else 0.0) for stage, a in enumerate(stage_weights)]
        terms = {layer: costs[stage] for layer, stage in enumerate(stage_of)}
        return Peak(sum(a * b for a, b in zip(stage_weights, ends, strict=True)), terms)

    one = [1.0] * p
    time_of = [
        peak([*one[:-1], float(m)]),
        peak([float(q + w), *([0.0] * (p - 1))]),
        peak([float(w), *one[1:]]),
    ]
    late = [Peak(0.0, {})] + [peak([-1.0] * (i + 1) + [0.0] * (p - 1 - i), i) for i in range(p)]
    graph = StrategyGraph(
        [np.zeros(len(choices))] * n, node_memory=memory, memory_limit=room, peaks=[time_of, late]
    )
    return graph, choices


def _least_time_s(graph: StrategyGraph) -> float:
    """A bound without solving: every alternative by itself, each layer at its best."""
    best = 0.0
    for group in graph.peaks:
        best += max(one.constant + sum(float(np.min(t)) for t in one.terms.values()) for one in group)
    return best


def search(inputs: dict[str, Any], backend: str = "auto") -> Answer:
    """The proved best over all tasks: by rising bound, until no task can be better."""
    start, cpu = time.perf_counter(), time.process_time()
    open_tasks = []
    for task in tasks(inputs):
        made = graph_of(inputs, task)
        if made is not None:
            open_tasks.append((_least_time_s(made[0]), task, *made))
    open_tasks.sort(key=lambda one: one[0])
    best: tuple[float, Task, tuple[Strategy, ...]] | None = None
    proved, programs = math.inf, 0
    for least, task, graph, choices in open_tasks:
        if best is not None and least >= best[0]:
            break
        solution = graph.solve(backend)
        programs += 1
        if solution.lower_bound is not None:
            proved = min(proved, solution.lower_bound)
        if solution.objective is not None and (best is None or solution.objective < best[0]):
            assert solution.choice is not None
            best = (solution.objective, task, tuple(choices[s] for s in solution.choice))
    if best is None:
        raise SystemExit("No plan fits the memory of a GPU.")
    took = (time.process_time() - cpu, time.perf_counter() - start)
    return Answer(best[0], min(proved, best[0]), best[1], best[2], programs, *took)


def cases() -> dict[str, Any]:
    """The cases by name."""
    return {case["case"]: case for case in json.loads(CASES.read_text(encoding="utf-8"))["cases"]}


def main() -> None:
    """Solve the cases (or those whose names begin with the first argument) and print one line each."""
    backend = sys.argv[2] if len(sys.argv) > 2 else "auto"
    for name, case in cases().items():
        if name.startswith(sys.argv[1] if len(sys.argv) > 1 else ""):
            answer, theirs = search(case["inputs"], backend), case["galvatron"]
            print(f"{name}: {answer.time_s:.5f} s a step, bound {answer.bound_s:.5f};", end=" ")
            print(
                f"{answer.cpu_s:.1f} s of CPU ({answer.wall_s:.1f} s wall), {answer.programs} programs;", end=" "
            )
            print(f"Galvatron {theirs['time_s']:.5f} s in {theirs['search_s']:.0f} s")


if __name__ == "__main__":
    main()
