"""AutoParallel's integer program, stated here once more for CBC, to hold its adapter to.

    x[i, a, o, j] in {0, 1}    argument a of operation i: output placement o, input placement j
    sum_(o, j) x[i, a] = 1                              one placement for every argument
    sum_j x[i, a, o] = sum_j x[i, 0, o]                 all arguments of an operation agree on its output
    sum_o x[i, a, o, j] = sum_k x[p, 0, j, k]           an argument comes as its producer p leaves it
    sum_j x[i, 0, o] = sum_j x[l, 0, o]                 linked operations are placed alike
    sum_(i, o) memory[i][o] sum_j x[i, 0, o] <= limit

Source: github.com/meta-pytorch/autoparallel, optimize_sharding.py at a54c252 (variables and rows).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pulp

Key = tuple[int, int, int, int]


def solve(
    costs: Mapping[Key, float],
    producers: Mapping[tuple[int, int], int],
    memory: Mapping[int, Any],
    limit: float,
    links: Mapping[int, int],
) -> float | None:
    """The least cost; None where there is no choice."""
    program = pulp.LpProblem("autoparallel", pulp.LpMinimize)
    x = {key: program.add_variable("x_" + "_".join(map(str, key)), cat="Binary") for key in costs}
    program += pulp.lpSum(cost * x[key] for key, cost in costs.items() if cost < math.inf)
    outputs: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
    inputs: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
    whole: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for (i, a, o, j), one in x.items():
        outputs[i, a, o].append(one)
        inputs[i, a, j].append(one)
        whole[i, a].append(one)
    for key, cost in costs.items():
        if cost == math.inf:
            program += x[key] == 0
    for one in whole.values():
        program += pulp.lpSum(one) == 1
    for (i, a, o), one in outputs.items():
        if a:
            program += pulp.lpSum(one) == pulp.lpSum(outputs[i, 0, o])
        elif i in links:
            program += pulp.lpSum(one) == pulp.lpSum(outputs[links[i], 0, o])
    for (i, a, j), one in inputs.items():
        if (i, a) in producers:
            program += pulp.lpSum(one) == pulp.lpSum(outputs[producers[i, a], 0, j])
    held = [(size, i, o) for i, sizes in memory.items() for o, size in enumerate(sizes)]
    program += pulp.lpSum(size * one for size, i, o in held for one in outputs[i, 0, o]) <= limit
    program.solve(pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False))
    return float(pulp.value(program.objective)) if program.status == pulp.LpStatusOptimal else None
