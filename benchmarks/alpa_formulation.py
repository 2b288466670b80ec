"""Alpa's integer program in PuLP and CBC, stated anew: what strategy graphs are measured with.

Binaries s[i][k] and e[edge][k, l]; one per node and edge; sums of e at most the s of either end; memory of the
nodes alive at each step; forbidden alias pairs as s + s <= 1. Nodes that follow share variables. Source: Alpa
(Zheng et al., OSDI 2022), section 4.2, and the arguments of alpa/shard_parallel/auto_sharding.py.

As a program it reads pickled arguments and a time limit, and prints the objective (see ``strategy_graphs``).
"""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pulp


def solve(arguments: tuple[Any, ...], time_limit_s: float) -> tuple[float | None, list[int]]:
    """Objective of what CBC found (None if nothing) and the strategies; building counts towards the limit."""
    with warnings.catch_warnings():
        # PuLP 3.3 warns of its next version at every variable.
        warnings.simplefilter("ignore")
        return _solve(arguments, time_limit_s)


def _solve(arguments: tuple[Any, ...], time_limit_s: float) -> tuple[float | None, list[int]]:
    start = time.perf_counter()
    count, limit, s_len, follow, pairs, aliases, liveness, compute, communication, memory, moves, apart = arguments
    ends = np.cumsum(s_len)
    problem = pulp.LpProblem("alpa", pulp.LpMinimize)
    own = [[pulp.LpVariable(f"s_{i}_{k}", cat="Binary") for k in range(n)] for i, n in enumerate(s_len)]
    chosen = [own[int(follow[i])] if follow[i] >= 0 else own[i] for i in range(count)]
    terms = []
    for i in range(count):
        costs = (compute + communication)[ends[i] - s_len[i] : ends[i]]
        terms += [(variable, float(c)) for variable, c in zip(chosen[i], costs, strict=True)]
        if follow[i] < 0:
            problem += pulp.lpSum(own[i]) == 1
    at = 0
    for index, (i, j) in enumerate(np.reshape(pairs, (-1, 2)).tolist()):
        rows, columns = len(chosen[i]), len(chosen[j])
        e = [[pulp.LpVariable(f"e_{index}_{k}_{m}", cat="Binary") for m in range(columns)] for k in range(rows)]
        flat = [variable for row in e for variable in row]
        terms += [(v, float(r)) for v, r in zip(flat, moves[at : at + rows * columns], strict=True)]
        at += rows * columns
        problem += pulp.lpSum(flat) == 1
        for k in range(rows):
            problem += pulp.lpSum(e[k]) <= chosen[i][k]
        for m in range(columns):
            problem += pulp.lpSum(row[m] for row in e) <= chosen[j][m]
    problem.setObjective(pulp.LpAffineExpression(_summed(terms)))
    _limits(problem, chosen, count, limit, liveness, memory, ends)
    _aliases(problem, chosen, aliases, apart)
    left_s = max(0.1, time_limit_s - (time.perf_counter() - start))
    problem.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=left_s, threads=1, gapRel=0.0))
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None, []
    strategies = [int(np.argmax([v.value() or 0.0 for v in variables])) for variables in chosen]
    return float(pulp.value(problem.objective)), strategies


def _summed(terms: list[tuple[Any, float]]) -> dict[Any, float]:
    total: dict[Any, float] = {}
    for variable, cost in terms:
        total[variable] = total.get(variable, 0.0) + cost
    return total


def _limits(problem: Any, chosen: Any, count: int, limit: float, liveness: Any, memory: Any, ends: Any) -> None:
    if limit <= 0:
        return
    at = count
    for length in liveness[:count]:
        alive = liveness[at : at + length]
        at += length
        parts = []
        for i in alive:
            loads = memory[ends[i] - len(chosen[i]) : ends[i]]
            parts += [float(m) * variable for m, variable in zip(loads, chosen[i], strict=True)]
        if parts:
            problem += pulp.lpSum(parts) <= limit


def _aliases(problem: Any, chosen: Any, aliases: Any, apart: Any) -> None:
    at = 0
    for i, j in np.reshape(aliases, (-1, 2)).tolist():
        for first in chosen[i]:
            for second in chosen[j]:
                if apart[at] > 0.5:
                    problem += first + second <= 1
                at += 1


if __name__ == "__main__":
    found, _ = solve(pickle.loads(Path(sys.argv[1]).read_bytes()), float(sys.argv[2]))
    print("none" if found is None else repr(found))
