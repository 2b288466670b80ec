"""Degrees of a layout as integer variables, and the layout rules as rows over them.

Sets: degrees and switches d (``tp``, ``schedule``, ...), candidate values V_d, primes q, legal layouts l.
Variables: d in V_d, [d=v] in {0, 1}, layout_l in {0, 1}. exp_q(v) is the exponent of q in v.

    one_value_per_degree     sum_v [d=v] = 1                                                     for every d
    degree_is_its_value      d = sum_v v [d=v]                                                   for every d
    product_of_degrees       exp_q(tp) + exp_q(cp) + exp_q(pp) + exp_q(dp) = exp_q(num_gpus)     for every q
    batch_is_divided         exp_q(dp) + exp_q(micro_batch_size) + exp_q(num_micro_batches)
                               = exp_q(global_batch_size)                                        for every q
    expert_grid_divides_ranks, etp_divides_tp, dp_replicate_divides_dp, dp_replicate_divides_expert_replicas
                             exp_q(ep) + exp_q(etp) <= exp_q(tp) + exp_q(cp) + exp_q(dp), ...    for every q
    <rule of a layout>       literals of a combination + sum of the values that break the rule with it
                               <= number of literals of the combination
    one_layout               sum_l layout_l = 1
    layout_has_degrees       sum_{l: d_l = v} layout_l = [d=v]                                   for all d, v

Products become sums because a product of positive integers is fixed by the exponents of its primes, and
these are linear in the one-hot literals. Rules are those of ``enumerate_layouts``, evaluated on every combination
of the columns that they read. A legal layout that ``layout_space`` drops (it is dominated, or ``vpp_values``
lacks its vpp) has no literal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.optimize.milp.program import MINUS_INFINITY, ProgramBuilder
from milpplan.optimize.space.enumerate_layouts import (
    DEGREE_RULES,
    DISPATCH_RULES,
    EXPERT_RULES,
    MICRO_BATCH_RULES,
    ORDER_RULES,
    SEQUENCE_RULES,
    SHARDING_RULES,
    divisors,
)
from milpplan.optimize.space.layout_space import Rule
from milpplan.optimize.space.rules import (
    ALIGNMENT_SWITCH_RULES,
    EXECUTION,
    EXECUTION_RULES,
    HYBRID_RULES,
    HYBRID_SHARDING_RULES,
    INFERENCE_RULES,
    KEPT_RULES,
    KEPT_SHARDING_RULES,
    PIPELINE_SHARDING_RULES,
    cluster_rules,
    node_orders,
    stage_rules,
    switch_values,
)
from milpplan.problem import Problem
from milpplan.simulation import IntArray, LayoutColumns, ascending, column_value
from milpplan.simulation.layout_columns import WORDS

MAX_COMBINATIONS = 200_000
"""Maximum number of combinations of values on which one rule is evaluated."""

DEGREES = (
    *("num_gpus", "tp", "cp", "pp", "dp", "ep", "etp", "vpp"),
    *("global_batch_size", "micro_batch_size", "num_micro_batches"),
    *("sequence_parallel", "zero_stage", "schedule", "overlap_grad_reduce", "overlap_param_gather", "rank_order"),
    *EXECUTION,
)
PRODUCTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "product_of_degrees": (("tp", "cp", "pp", "dp"), ("num_gpus",), True),
    "batch_is_divided": (("dp", "micro_batch_size", "num_micro_batches"), ("global_batch_size",), True),
    "expert_grid_divides_ranks": (("ep", "etp"), ("tp", "cp", "dp"), False),
    "etp_divides_tp": (("etp",), ("tp",), False),
    "dp_replicate_divides_dp": (("dp_replicate",), ("dp",), False),
    "dp_replicate_divides_expert_replicas": (("ep", "etp", "dp_replicate"), ("tp", "cp", "dp"), False),
}
"""Name: (factors, multiple, True if their products are equal, False if the first only divides the second)."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Candidate values of every degree, and the columns of their literals."""

    values: Mapping[str, IntArray]
    literals: Mapping[str, range]

    @staticmethod
    def add(problem: Problem, builder: ProgramBuilder) -> Degrees:
        """Add the variables, and every row that does not mention layouts."""
        values = candidate_values(problem)
        literals = {}
        for name, column in values.items():
            degree = builder.add_variable(name, int(column.min(initial=0)), int(column.max(initial=0)))
            chosen = builder.add_variables([f"[{name}={value}]" for value in column], 1)
            literals[name] = chosen
            builder.add_row(f"one_value_per_degree[{name}]", chosen, [1] * len(chosen), 1, 1)
            builder.add_row(f"degree_is_its_value[{name}]", [*chosen, degree], [*column.tolist(), -1], 0, 0)
        degrees = Degrees(values, literals)
        for name, (factors, multiple, equal) in PRODUCTS.items():
            if "dp_replicate" in factors and values["dp_replicate"].tolist() == [1]:
                continue
            degrees._add_product(builder, name, factors, multiple, equal)
        for name, rule in rules(problem).items():
            degrees._add_rule(problem, builder, name, rule)
        return degrees

    def add_layouts(self, builder: ProgramBuilder, columns: LayoutColumns) -> range:
        """Add a literal for every legal layout, bound to the degrees. Returns their columns."""
        layouts = builder.add_variables([f"layout[{row}]" for row in range(len(columns))], 1)
        builder.add_row("one_layout", layouts, [1] * len(layouts), 1, 1)
        for name, values in self.values.items():
            of_layout = np.asarray(getattr(columns, name), dtype=np.int64)
            for value, literal in zip(values.tolist(), self.literals[name], strict=True):
                chosen = [layouts[row] for row in np.flatnonzero(of_layout == value).tolist()]
                row_name = f"layout_has_degrees[{name}={value}]"
                builder.add_row(row_name, [*chosen, literal], [*[1] * len(chosen), -1], 0, 0)
        return layouts

    def _add_product(
        self,
        builder: ProgramBuilder,
        name: str,
        factors: tuple[str, ...],
        multiple: tuple[str, ...],
        equal: bool,
    ) -> None:
        """Add rows: the product of ``factors`` equals, or divides, that of ``multiple``; one row for
        every prime."""
        everything = np.concatenate([self.values[degree] for degree in (*factors, *multiple)])
        for prime in primes_of(everything):
            columns: list[int] = []
            coefficients: list[int] = []
            for degree, sign in [(factor, 1) for factor in factors] + [(part, -1) for part in multiple]:
                columns += self.literals[degree]
                coefficients += (sign * exponents(self.values[degree], prime)).tolist()
            lower = 0 if equal else MINUS_INFINITY
            builder.add_row(f"{name}[{prime}]", columns, coefficients, lower, 0)

    def _add_rule(self, problem: Problem, builder: ProgramBuilder, name: str, rule: Rule) -> None:
        """Forbid every combination of values that breaks a rule.

        A row sums all values of the degree with the most candidates that break the rule with the same values of
        the others.
        """
        read = columns_read(problem, rule, self.values)
        values = {degree: self.values[degree] for degree in read}
        summed = max(range(len(read)), key=lambda degree: len(values[read[degree]]), default=0)
        broken: dict[tuple[int, ...], list[int]] = {}
        for chosen in broken_combinations(problem, name, rule, values):
            broken.setdefault(chosen[:summed] + chosen[summed + 1 :], []).append(chosen[summed])
        others = read[:summed] + read[summed + 1 :]
        for chosen, indices in broken.items():
            parts = zip(others, chosen, strict=True)
            label = ",".join(f"{degree}={self.values[degree][index]}" for degree, index in parts)
            literals = [self.literals[degree][index] for degree, index in zip(others, chosen, strict=True)]
            literals += [self.literals[read[summed]][index] for index in indices]
            row_name = f"{name}[{label}]" if label else name
            builder.add_row(row_name, literals, [1] * len(literals), upper=len(others))


def rules(problem: Problem) -> dict[str, Rule]:
    """Return the rules of ``enumerate_layouts`` that are not products."""
    named_rules = DEGREE_RULES | cluster_rules(problem) | SEQUENCE_RULES | EXECUTION_RULES | stage_rules(problem)
    named_rules |= SHARDING_RULES | INFERENCE_RULES | PIPELINE_SHARDING_RULES
    named_rules |= KEPT_RULES | KEPT_SHARDING_RULES | DISPATCH_RULES
    named_rules |= HYBRID_RULES | HYBRID_SHARDING_RULES | MICRO_BATCH_RULES | ALIGNMENT_SWITCH_RULES
    if any(kind.mlp.type == "moe" for kind in problem.model.kinds):
        named_rules |= EXPERT_RULES
        # With the pipeline outermost both grids agree for all degrees: no need to try all combinations.
        if not all(order.endswith("pp") for order in problem.space.rank_order):
            named_rules |= ORDER_RULES
    else:
        named_rules |= {"experts_need_moe": lambda p, c: (c["ep"] == 1) & (c["etp"] == 1)}
    return {name: rule for name, rule in named_rules.items() if name not in PRODUCTS}


def candidate_values(problem: Problem) -> dict[str, IntArray]:
    """Return the values of every degree before any rule: those of the space, else all divisors of the number they
    divide."""
    space, job = problem.space, problem.job
    of_gpus = ascending(np.concatenate([divisors(gpus) for gpus in job.num_gpus_values]))
    of_batch = ascending(np.concatenate([divisors(batch) for batch in job.global_batch_values]))
    stages = np.arange(1, problem.model.num_layers + 3, dtype=np.int64)
    dense = all(kind.mlp.type == "dense" for kind in problem.model.kinds)
    candidates = {
        "num_gpus": np.array(job.num_gpus_values),
        "global_batch_size": np.array(job.global_batch_values),
    }
    for name in DEGREES:
        if name in candidates:
            continue
        allowed = getattr(space, name, None)
        if name in ("ep", "etp") and dense:
            candidates[name] = np.array([1])
        elif name == "schedule":
            candidates[name] = np.array([column_value(name, word) for word in problem.schedules])
        elif name in EXECUTION:
            candidates[name] = np.array([column_value(name, value) for value in switch_values(problem, name)])
        elif name in WORDS:
            candidates[name] = np.array([column_value(name, word) for word in allowed or ()])
        elif allowed is not None:
            candidates[name] = np.array(allowed, dtype=np.int64)
        else:
            free = {"vpp": stages, "micro_batch_size": of_batch, "num_micro_batches": of_batch}
            candidates[name] = free.get(name, of_gpus)
    names: tuple[str, ...] = DEGREES
    if problem.other_hardware:
        candidates["node_order"] = node_orders(problem)
        names = (*DEGREES, "node_order")
    return {name: ascending(candidates[name]).astype(np.int64) for name in names}


def columns_read(problem: Problem, rule: Rule, values: Mapping[str, IntArray]) -> tuple[str, ...]:
    """Return the degrees that a rule reads."""
    read: dict[str, None] = {}

    class Recorder(dict[str, IntArray]):
        def __getitem__(self, name: str) -> IntArray:
            read[name] = None
            return super().__getitem__(name)

    rule(problem, Recorder({name: column[:1] for name, column in values.items()}))
    return tuple(read)


def broken_combinations(
    problem: Problem, name: str, rule: Rule, values: Mapping[str, IntArray]
) -> Iterator[tuple[int, ...]]:
    """Yield the indices into ``values`` of every combination that breaks a rule."""
    sizes = [len(column) for column in values.values()]
    if not sizes:
        return
    if np.prod(sizes, dtype=np.float64) > MAX_COMBINATIONS:
        raise InvalidInputError(
            f"Rule {name} has {np.prod(sizes, dtype=np.float64):,.0f} combinations of {', '.join(values)}.",
            f"The monolithic program takes at most {MAX_COMBINATIONS:,}.",
            "Fix some degrees, or use solve(), which needs no such rows.",
        )
    indices = np.array(list(product(*(range(size) for size in sizes))), dtype=np.int64)
    table = {degree: column[indices[:, i]] for i, (degree, column) in enumerate(values.items())}
    legal = np.asarray(rule(problem, table))
    for row in np.flatnonzero(~legal):
        yield tuple(indices[row].tolist())


def primes_of(values: IntArray) -> list[int]:
    """Return the primes that divide any of the values, ascending."""
    primes: set[int] = set()
    for value in values.tolist():
        rest, factor = value, 2
        while factor * factor <= rest:
            while rest % factor == 0:
                primes.add(factor)
                rest //= factor
            factor += 1
        if rest > 1:
            primes.add(rest)
    return sorted(primes)


def exponents(values: IntArray, prime: int) -> IntArray:
    """Return the exponent of a prime in every value."""
    count = np.zeros_like(values)
    rest = values.copy()
    divisible = rest % prime == 0
    while divisible.any():
        count += divisible
        rest = np.where(divisible, rest // prime, rest)
        divisible = rest % prime == 0
    return count
