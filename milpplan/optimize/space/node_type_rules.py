"""Rules of clusters with several node types, and the batch's shares of heterogeneous data-parallel replicas.

Node types differ either between the stages of equal replicas, where each pipeline rank is on one type, or between
replicas. Then a replica is wholly on one node type. The replicas of all types have equal degrees, layers and
switches, and each type has its own number of micro-batches. Replicas are numbered outermost (the order of ranks
ends with dp), so those of a type are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.space.execution_rules import Rule, offloads
from milpplan.optimize.space.rule_filter import ProductTable, expand
from milpplan.problem.plan import (
    RANK_ORDERS,
    SHARE_BASES,
    MicroBatchShares,
    RankOrder,
    order_code,
    shares_code,
    shares_of,
)
from milpplan.problem.problem import Problem
from milpplan.simulation.layout_columns import BoolArray, IntArray, ascending, column_value
from milpplan.simulation.network import placement

USUAL_ORDER: RankOrder = "tp-cp-pp-dp"
"""Order of ranks where the space names none with the replicas outermost."""
MAX_ROWS = 4_000_000
"""Maximum number of shares of two types over all degrees and micro-batch sizes."""
MAX_ROWS_OF_MANY = 400_000
"""Maximum number of shares of more types, which grow with a power of the batch: about two million
layouts, 1.5 GB."""
OUTERMOST = np.array([order.endswith("dp") for order in RANK_ORDERS])
REPLICA_RULES: dict[str, Rule] = {
    "different_replicas_hold_all_experts": lambda p, c: (c["tp"] * c["cp"]) % (c["ep"] * c["etp"]) == 0,
    "different_replicas_offload_nothing": lambda p, c: ~offloads(c),
    "different_replicas_are_neighbours": lambda p, c: OUTERMOST[c["rank_order"]],
}
REPLICA_SHARDING_RULES: dict[str, Rule] = {
    "different_replicas_meet_once_a_step": lambda p, c: c["zero_stage"] <= 1,
}
"""ZeRO 2 and 3 exchange gradients or weights in every micro-batch, and replicas have different numbers of them."""
CLUSTER_ORDER_RULES: dict[str, Rule] = {
    "node_types_need_stages_of_neighbours": lambda p, c: placement.stages_are_blocks(c),
}
"""Rules on the order of ranks where node types differ between stages: a stage whose accelerators are
interleaved with another stage's would be on several types."""


def replicas_of(problem: Problem, c: Mapping[str, IntArray]) -> list[IntArray]:
    """Return the replicas on each node type, [n] each; integral only for legal layouts."""
    block = c["tp"] * c["cp"] * c["pp"]
    return [gpus // block for gpus in problem.node_gpus]


def _whole_replicas(problem: Problem, c: Mapping[str, IntArray]) -> BoolArray:
    block = c["tp"] * c["cp"] * c["pp"]
    return np.asarray(np.logical_and.reduce([gpus % block == 0 for gpus in problem.node_gpus]))


REPLICA_DEGREE_RULES: dict[str, Rule] = {
    "different_replicas_need_two_node_types": lambda p, c: np.full(len(c["tp"]), len(p.node_types) >= 2),
    "different_replicas_are_trained": lambda p, c: np.full(len(c["tp"]), not p.inference),
    "node_types_hold_whole_replicas": _whole_replicas,
}


ALL_REPLICA_RULES = REPLICA_DEGREE_RULES | REPLICA_RULES | REPLICA_SHARDING_RULES
"""All rules of heterogeneous replicas, for rows with all columns."""


def replica_rank_orders(problem: Problem) -> tuple[int, ...]:
    """Return codes of the space's orders of ranks with the replicas outermost, or the usual one."""
    orders = [order for order in problem.space.rank_order if order.endswith("dp")]
    return tuple(sorted({column_value("rank_order", order) for order in orders or [USUAL_ORDER]}))


def with_shares(problem: Problem, columns: Mapping[str, IntArray]) -> ProductTable:
    """Cross rows with all micro-batch sizes and all shares of the types that make up the batch."""
    batch = columns["global_batch_size"]
    sizes = problem.space.micro_batch_size
    by_batch = {
        int(value): np.array(
            [size for size in (sizes or range(1, int(value) + 1)) if value % size == 0], dtype=np.int64
        )
        for value in ascending(batch)
    }
    sized = expand(columns, "micro_batch_size", by_batch, batch)
    if len(problem.node_types) not in SHARE_BASES:
        none = {0: np.zeros(0, dtype=np.int64)}
        return expand(sized, "replica_micro_batches", none, np.zeros_like(batch, shape=len(sized["tp"])))
    numbers = [np.maximum(number, 1) for number in replicas_of(problem, sized)]
    total = sized["global_batch_size"] // sized["micro_batch_size"]
    # One key for all values that the shares depend on.
    keys, key_of_row = np.unique(np.stack([*numbers, total]), axis=1, return_inverse=True)
    key_of_row, asked_shares = np.asarray(key_of_row).reshape(-1), problem.space.replica_micro_batches
    if asked_shares is None:
        share_counts = np.array([num_shares(key[:-1].tolist(), int(key[-1])) for key in keys.T], dtype=np.int64)
        max_rows = MAX_ROWS if len(problem.node_types) == 2 else MAX_ROWS_OF_MANY
        _check_size(float(share_counts[key_of_row].astype(np.float64).sum()), max_rows)
    codes: dict[int, IntArray] = {
        number: np.array([shares_code(shares) for shares in _shares(asked_shares, *key.tolist())], dtype=np.int64)
        for number, key in enumerate(keys.T)
    }
    return expand(sized, "replica_micro_batches", codes, key_of_row)


def _check_size(rows: float, max_rows: int) -> None:
    """Refuse tables that exceed memory."""
    if rows > max_rows:
        raise InvalidInputError(
            f"Replicas of different make share the batch in {rows:,.0f} ways, over all degrees and micro-batches.",
            f"Expected at most {max_rows:,}.",
            "Fix micro_batch_size or some degrees (--fix micro_batch_size=1,tp=8), or take a smaller batch.",
        )


def num_shares(numbers: Sequence[int], total: int) -> int:
    """Return the number of ways in which replicas of each type run ``total`` micro-batches, each at least 1."""
    surplus = total - sum(numbers)
    if surplus < 0:
        return 0
    # ways[t]: for the types so far, to run t micro-batches beyond one each; floats, exact below 2**53.
    ways = np.zeros(surplus + 1)
    ways[0] = 1
    for number in numbers:
        for first in range(min(number, surplus + 1)):
            ways[first::number] = np.cumsum(ways[first::number])
    return int(min(ways[surplus], 2.0**62))


def _shares(asked: tuple[MicroBatchShares, ...] | None, *key: int) -> Iterator[MicroBatchShares]:
    """Yield all shares of the replicas of each type that run ``total`` micro-batches, each at least 1.

    ``key``: replicas of each type, then the total. ``asked``: only these shares.
    """
    *numbers, total = key
    if asked is not None:
        whole = (
            shares
            for shares in sorted(set(asked))
            if sum(n * m for n, m in zip(numbers, shares, strict=True)) == total
        )
        yield from whole
        return
    first, *rest = numbers
    if not rest:
        if total >= first and total % first == 0:
            yield (total // first,)
        return
    for micro_batches in range(1, (total - sum(rest)) // first + 1):
        for others in _shares(None, *rest, total - first * micro_batches):
            yield (micro_batches, *others)


def shares_in(columns: Mapping[str, IntArray], node_type: int) -> IntArray:
    """Return the micro-batches of the replicas on one type, [n]."""
    codes, index = np.unique(columns["replica_micro_batches"], return_inverse=True)
    of_code = np.array([shares_of(code)[node_type] for code in codes.tolist()], dtype=np.int64)
    return of_code[np.asarray(index).reshape(-1)]


def meeting_once() -> dict[str, Rule]:
    """Return the rules of shardings (``REPLICA_SHARDING_RULES``) for tables that also have rows with equal
    replicas."""

    def of_different(rule: Rule) -> Rule:
        return lambda p, c: (c["replica_micro_batches"] == 0) | rule(p, c)

    return {name: of_different(rule) for name, rule in REPLICA_SHARDING_RULES.items()}


def _whole_ranks(node_gpus: tuple[int, ...], pp: IntArray) -> BoolArray:
    """Require that all tp x cp x dp accelerators of a pipeline rank are of one type: each type has a whole number
    of ranks."""
    total = sum(node_gpus)
    return np.asarray(np.logical_and.reduce([pp * gpus % total == 0 for gpus in node_gpus]))


CLUSTER_RULES: dict[str, Rule] = {
    "node_types_hold_whole_ranks": lambda p, c: _whole_ranks(p.node_gpus, c["pp"]),
}
"""Rules of layouts whose stages differ in node type."""


def cluster_rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules of stages on several node types; rules on the order only where some order of the space may
    break them."""
    if not problem.other_hardware:
        return {}
    outermost = all(order.endswith("pp") for order in problem.space.rank_order)
    return CLUSTER_RULES if outermost else CLUSTER_RULES | CLUSTER_ORDER_RULES


def node_orders(problem: Problem) -> IntArray:
    """Return codes of the orders of node types along the pipeline that the space admits."""
    types = len(problem.node_types)
    orders = permutations(range(types)) if problem.space.node_order is None else problem.space.node_order
    return np.array(sorted({order_code(tuple(order)) for order in orders}) if types > 1 else [0], dtype=np.int64)
