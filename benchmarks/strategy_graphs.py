"""Time to proof of strategy graphs, 100 to 10,000 nodes, beside Alpa's formulation in PuLP and CBC.

Random graphs shaped like a model's operators: a chain with a skip over some nodes every few; costs, resharding and
memory drawn at random (seeded); with a limit, memory grows where cost falls, and the limit is half-way between the
least possible and what the cheapest choice takes. CBC gets the wall time that milpplan took, at least
``--least-s``, building included, on the same problem right after it. CPU seconds count building and all processes.

    python -m benchmarks.strategy_graphs --nodes 100 1000 10000 --strategies 8
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from milpplan.graph import StrategyGraph

Arguments = tuple[Any, ...]


def alpa_arguments(num_nodes: int, strategies: int, limited: bool, seed: int) -> Arguments:
    """A random problem in Alpa's arrays; one alive set, at the first step, if limited."""
    rng = np.random.default_rng(seed)
    pairs = [(i, i + 1) for i in range(num_nodes - 1)] + [(i, i + 4) for i in range(0, num_nodes - 4, 8)]
    cost = rng.random((num_nodes, strategies)) * 10
    memory = (11 - cost) * rng.random((num_nodes, strategies))
    cheapest = memory[np.arange(num_nodes), cost.argmin(axis=1)].sum()
    limit = (memory.min(axis=1).sum() + cheapest) / 2 if limited else -1.0
    alive = [num_nodes, *[0] * (num_nodes - 1), *range(num_nodes)]
    moves = rng.random((len(pairs), strategies, strategies)) * 4
    moves[:, np.arange(strategies), np.arange(strategies)] = 0.0
    none = np.zeros(0, np.int64)
    return (
        num_nodes,
        limit,
        np.full(num_nodes, strategies),
        np.full(num_nodes, -1),
        np.array(pairs).ravel(),
        none,
        np.array(alive),
        cost.ravel(),
        np.zeros(cost.size),
        memory.ravel(),
        moves.ravel(),
        none,
    )


def graph_of(arguments: Arguments) -> StrategyGraph:
    """The same problem as a strategy graph."""
    count, limit, s_len, _, pairs, _, _, cost, _, memory, moves, _ = arguments
    k = int(s_len[0])
    matrices = moves.reshape(-1, k, k)
    edges = {(int(i), int(j)): m for (i, j), m in zip(pairs.reshape(-1, 2), matrices, strict=True)}
    more = {"node_memory": list(memory.reshape(count, k)), "memory_limit": limit} if limit > 0 else {}
    return StrategyGraph(list(cost.reshape(count, k)), edges, **more)


def cbc_in(arguments: Arguments, time_limit_s: float) -> float | None:
    """What CBC finds in its own process within the limit; None if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.pickle"
        path.write_bytes(pickle.dumps(arguments))
        command = [sys.executable, "-m", "benchmarks.alpa_formulation", str(path), str(time_limit_s)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=2 * time_limit_s + 60
            )
        except subprocess.TimeoutExpired:
            return None
    words = done.stdout.split()
    return float(words[-1]) if words and words[-1] != "none" else None


def row(num_nodes: int, strategies: int, limited: bool, seed: int, limit_s: float, least_s: float) -> str:
    """One line of the table."""
    arguments = alpa_arguments(num_nodes, strategies, limited, seed)
    graph = graph_of(arguments)
    start, cpu = time.perf_counter(), _cpu_s()
    solution = graph.solve(time_limit_s=limit_s)
    seconds, worked = time.perf_counter() - start, _cpu_s() - cpu
    start, cpu = time.perf_counter(), _cpu_s()
    theirs = cbc_in(arguments, max(seconds, least_s))
    theirs_s, theirs_cpu = time.perf_counter() - start, _cpu_s() - cpu
    gap = "none" if solution.gap is None else f"{solution.gap:.1e}"
    beaten = "no answer" if theirs is None else f"{theirs:.4f}"
    excess = "" if theirs is None or not solution.objective else f"{theirs / solution.objective - 1:+.1e}"
    return (
        f"| {num_nodes:,} | {strategies} | {'yes' if limited else 'no'} | {solution.status} "
        f"| {solution.objective} | {gap} | {worked:.1f} ({seconds:.1f}) | {beaten} "
        f"| {excess} | {theirs_cpu:.1f} ({theirs_s:.1f}) |"
    )


def _cpu_s() -> float:
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--strategies", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--least-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(
        "| nodes | strategies | limit | status | cost | gap | CPU s (wall) | CBC's cost | above | CPU s (wall) |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for limited in (False, True):
        for nodes in options.nodes:
            values = (nodes, options.strategies, limited, options.seed, options.limit_s, options.least_s)
            print(row(*values), flush=True)


if __name__ == "__main__":
    main()
