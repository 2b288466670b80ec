"""Tables of a strategy: exact for packed micro-batches, and for groups never above the exact times."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan import Layout, Problem, load_hardware, load_model
from milpplan.lengths import finish_ns, line_below, micro_batch_times, pipeline_ns, quantum_problem, replicas_ns
from milpplan.lengths.tabled import (
    Pipeline,
    pipeline_times_ns,
)
from milpplan.problem import Job
from milpplan.simulation import LayoutColumns, packed_times, sequence_cores, simulate
from milpplan.simulation.layers import EXPOSED, layer_seconds
from milpplan.simulation.pipeline.step_graph import StepGraph, Term, simulate_times
from tests.lengths.cases import GRAIN, pool, pool_of, random_micro_batches, workload
from tests.small import small_problem


@pytest.mark.parametrize("model", ["llama2-7b", "deepseek-v3", "gpt-oss-120b", "mixtral-8x7b"])
@pytest.mark.parametrize(("tp", "cp", "number", "length"), [(1, 1, 3, 2048), (4, 2, 2, 8192), (1, 8, 1, 32768)])
def test_equal_sequences_cost_what_the_simulator_says(
    model: str, tp: int, cp: int, number: int, length: int
) -> None:
    """Packed, so many sequences of one length take what a micro-batch of them takes, to a nanosecond a part."""
    layout = Layout(
        tp=tp, cp=cp, dp=2, micro_batch_size=number, global_batch_size=2 * number, sequence_parallel=tp > 1
    )
    job = Job(num_gpus=2 * tp * cp, global_batch_size=2 * number, sequence_length=length)
    problem = Problem(model=load_model(model), hardware=load_hardware("dgx-h100"), job=job)
    grain = problem.model_copy(update={"job": job.model_copy(update={"sequence_length": GRAIN})})
    cores = []
    for kind in problem.model.kinds:
        one = sequence_cores(grain, kind, layout, np.array([length]))
        cores.append(number * one.sequence_s + one.once_s)
    packed = packed_times(grain, layout, np.array([number * length // GRAIN]), np.stack(cores))
    for kind, found in zip(problem.model.kinds, packed.phases(), strict=True):
        seconds = layer_seconds(problem, kind, LayoutColumns.of([layout]))
        expected = np.rint(seconds * 1e9)[EXPOSED].sum(axis=0)
        assert np.abs(found - expected).max() <= 6


def test_tables_are_never_above_exact_times() -> None:
    """Random micro-batches of every strategy: units and constant of the table against the slowest stage."""
    found, random = pool(), np.random.default_rng(1)
    for number, one in enumerate(found.members):
        pipeline = found.strategy(number, shared_memory=False).pipelines[0][0]
        rows = random_micro_batches(found, one.own_memory_quanta, random, 6)
        if not len(rows) or pipeline.num_stages > 1:
            continue
        times = micro_batch_times(found.problem, one.candidate, found.load.lengths, rows)
        least = (rows @ pipeline.units(found.load.lengths) + pipeline.micro_batch_units) * pipeline.parts
        if one.candidate.layout.pp == 1:
            assert (least <= times.forward[0] + times.backward[0]).all(), one.candidate.name


def test_lines_of_stages_count_last_tiles_in_every_micro_batch() -> None:
    """Stages of every strategy: never above random micro-batches, and exact for one shortest sequence by itself
    where the line of its tokens touches there and no host waits."""
    found, random, exact = pool(), np.random.default_rng(4), 0
    shortest = np.eye(1, len(found.load.lengths), dtype=np.int64)
    for one, tables in zip(found.members, found.tables, strict=True):
        most, alone = one.own_memory_quanta, int(found.load.lengths[0]) // GRAIN
        rows = np.concatenate([shortest, random_micro_batches(found, most, random, 6)])
        times = micro_batch_times(found.problem, one.candidate, found.load.lengths, rows)
        for stage in range(one.candidate.layout.pp):
            for at in (float(alone), most / 4, float(most)):
                for line, name in zip(
                    tables.stage([stage], most, max(1.0, at)), ("forward", "backward"), strict=True
                ):
                    least, took = rows @ line.sequence + line.constant, getattr(times, name)[stage]
                    assert (least <= took + 1e-6).all(), (one.candidate.name, stage, name)
                    exact += bool(took[0] - least[0] <= 2 * tables.rounding_ns)
    assert exact >= 20, exact


def test_tables_are_close_where_micro_batches_are_full() -> None:
    """Full micro-batches under replicas without a pipeline or a ring: within two per cent."""
    found, random = pool(), np.random.default_rng(2)
    checked = 0
    for number, one in enumerate(found.members):
        layout, pipeline = one.candidate.layout, found.strategy(number, shared_memory=False).pipelines[0][0]
        rows = random_micro_batches(found, one.own_memory_quanta, random, 40)
        rows = rows[
            rows @ found.load.lengths
            >= 0.9 * min(one.own_memory_quanta, found.load.num_quanta // layout.dp) * GRAIN
        ]
        if layout.pp > 1 or layout.cp > 1 or not len(rows):
            continue
        times = micro_batch_times(found.problem, one.candidate, found.load.lengths, rows)
        least = (rows @ pipeline.units(found.load.lengths) + pipeline.micro_batch_units) * pipeline.parts
        assert (least >= 0.98 * (times.forward[0] + times.backward[0])).all(), one.candidate.name
        checked += 1
    assert checked >= 3


def test_strategies_are_never_faster_than_their_tables_say() -> None:
    """Random packings of all sequences on all replicas, pipelines included: the sum of the table's units over the
    replicas, with the reduction, is at most the exact time of the slowest with the true reduction."""
    found, random = pool(), np.random.default_rng(3)
    checked = 0
    for number, one in enumerate(found.members):
        strategy, dp = found.strategy(number, shared_memory=False), one.candidate.layout.dp
        pipeline = strategy.pipelines[0][0]
        if not pipeline.holds(found.load.lengths).all():
            continue
        items = random.permutation(np.repeat(np.arange(len(found.load.lengths)), found.load.counts))
        replicas = []
        for part in np.array_split(items, dp):
            rows: list[np.ndarray] = []
            for k in part:
                row = rows[-1] if rows and random.random() < 0.8 else np.zeros(len(found.load.lengths), np.int64)
                if (row @ found.load.lengths + found.load.lengths[k]) > one.own_memory_quanta * GRAIN:
                    row = np.zeros(len(found.load.lengths), np.int64)
                if not rows or row is not rows[-1]:
                    rows.append(row)
                row[k] += 1
            replicas.append(np.array(rows))
        exact = int(replicas_ns(found.problem, one.candidate, found.load.lengths, tuple(replicas)).max())
        if pipeline.num_stages == 1:
            work = sum(int((one_ @ pipeline.units(found.load.lengths)).sum()) for one_ in replicas)
            assert work * pipeline.parts / dp + strategy.reduce_ns <= exact + found.reduce_ns(number)
        else:
            loads = [rows @ pipeline.units(found.load.lengths) + pipeline.micro_batch_units for rows in replicas]
            assert max(int(pipeline_times_ns(pipeline, load)) for load in loads) <= exact
        checked += 1
    assert checked > 10


def test_pipelines_agree_with_both_engines() -> None:
    """Equal stages with unequal micro-batches: the recursion of groups; unequal stages with equal ones: the
    step graph of the simulator."""
    random = np.random.default_rng(4)
    for _ in range(30):
        stages, number = int(random.integers(1, 5)), int(random.integers(1, 9))
        units, lag = random.integers(1, 50, number), int(random.integers(0, 9))
        whole = Pipeline("one", stages, 0.0, 1.0, 0.0, 10**9, transfer_ns=lag, forward_parts=2, backward_parts=5)
        mine = pipeline_ns(np.tile(2 * units, (stages, 1)), np.tile(5 * units, (stages, 1)), np.full(number, lag))
        assert mine == int(pipeline_times_ns(whole, units))
        forward, backward = random.integers(1, 50, (2, stages))
        layout = Layout(pp=stages, global_batch_size=number)
        durations = np.zeros((len(Term), stages), dtype=np.int64)
        durations[Term.FORWARD], durations[Term.BACKWARD] = forward, backward
        graph = StepGraph.of(layout, lag, 0)
        alike = [np.repeat(one[:, None], number, axis=1) for one in (forward, backward)]
        assert pipeline_ns(*alike, np.full(number, lag)) == simulate_times(graph, durations).step_time_ns


def test_a_static_step_of_equal_sequences_is_the_simulators() -> None:
    """One stage, equal sequences: group, reduction and finish are the step time of the plan, to a few ns."""
    steps = workload(long=0, short=1)
    length = int(steps.lengths[0])
    found = pool_of(small_problem(memory_gib=40), steps)
    for number, one in enumerate(found.members):
        layout = one.candidate.layout
        if layout.pp > 1 or length % (2 * layout.cp * layout.tp):
            continue
        replicas = tuple(np.full((3, 1), 2) for _ in range(layout.dp))
        time_ns = int(replicas_ns(found.problem, one.candidate, found.load.lengths, replicas).max())
        total = time_ns + found.reduce_ns(number) + finish_ns(one)
        whole = layout.model_copy(update={"micro_batch_size": 2, "global_batch_size": 6 * layout.dp})
        job = found.problem.job.model_copy(
            update={"sequence_length": length, "global_batch_size": whole.global_batch_size}
        )
        problem = found.problem.model_copy(update={"job": job})
        plan = one.candidate.plan.model_copy(update={"layout": whole})
        assert abs(simulate(problem, plan).step_time_ns - total) <= 1000, one.candidate.name


def test_lines_are_below_and_touch() -> None:
    """A line below values: nowhere above, no negative part, and equal to a convex curve at its point."""
    random = np.random.default_rng(6)
    for _ in range(50):
        values = np.cumsum(random.integers(1, 100, int(random.integers(1, 40)))).astype(float) + 5.0
        at = float(random.integers(1, len(values) + 1))
        constant, slope = line_below(values, at)
        assert min(constant, slope) >= 0
        assert (constant + slope * np.arange(1, len(values) + 1) <= values * (1 + 1e-12)).all()
    straight = 7.0 + 3.0 * np.arange(1, 20)
    assert line_below(straight, 5.0) == pytest.approx((7.0, 3.0))


def test_grains_stand_for_tokens() -> None:
    """A problem of one grain has the model's layers and asks for every divisor of its GPUs."""
    one = quantum_problem(pool().problem, GRAIN)
    assert one.job.sequence_length == GRAIN
    assert one.job.global_batch_size == one.job.num_gpus
