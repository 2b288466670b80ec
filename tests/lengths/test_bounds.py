"""Bounds of pipelines and of sets of strategies, held to exact times and to plain enumeration."""

from __future__ import annotations

import itertools

import numpy as np

from milpplan.lengths.replicas import pipeline_ns, replicas_ns
from milpplan.lengths.screening import longest_ns
from milpplan.lengths.unequal import StageLoads, least_shares, path_bound
from tests.lengths.cases import pool, random_micro_batches


def test_paths_bound_every_packing() -> None:
    """Random loads of micro-batches on unequal stages take no less than the bound of their number and sum; equal
    loads on one stage take just that."""
    random = np.random.default_rng(1)
    tight = []
    for _ in range(40):
        stages, number = int(random.integers(2, 5)), int(random.integers(1, 9))
        loads = random.integers(10, 1000, number).astype(float)
        shares = (float(random.uniform(0.1, 0.4)), float(random.uniform(0.3, 0.6)))
        one = StageLoads(np.ones(1), float(random.integers(0, 30)), shares, (3.0, 5.0), int(random.integers(0, 9)))
        bound = path_bound(one, stages, number, float(loads.sum()))
        forward = np.ceil(np.tile(shares[0] * loads + 3.0, (stages, 1)))
        backward = np.ceil(np.tile(shares[1] * loads + 5.0, (stages, 1)))
        whole = loads + one.last_ns
        forward[-1] = np.floor(whole / 3)
        backward[-1] = np.ceil(whole) - forward[-1]
        exact = pipeline_ns(forward.astype(np.int64), backward.astype(np.int64), np.full(number, one.transfer_ns))
        assert bound.at(float(loads.sum())) <= exact
        tight.append(bound.at(float(loads.sum())) / exact)
    assert max(tight) > 0.95


def test_shares_of_sequences_add_up_to_a_bound() -> None:
    """All sequences together take the least bound over the numbers of micro-batches, and no sequence has more than
    its own passage through all stages."""
    loads = StageLoads(np.array([100.0, 700.0]), 20.0, (0.3, 0.5), (5.0, 8.0), 2)
    counts = np.array([50.0, 4.0])
    shares = least_shares(lambda number: loads, 3, counts, 2)
    mean = float(counts @ loads.last) / 2
    bounds = [path_bound(loads, 3, number, mean).at(mean) for number in range(1, 40)]
    serial = [mean + 20.0 * number for number in range(1, 40)]
    assert float(counts @ shares) / 2 <= min(max(pair) for pair in zip(bounds, serial, strict=True)) + 1e-6
    assert float(counts @ shares) / 2 > mean * 1.03
    assert (shares <= loads.last * (1 + 2 * 0.8) + 20.0 + 2 * 13.0 + 8.0).all()


def test_dear_tables_of_pipelines_hold_for_parts_of_the_workload() -> None:
    """Random parts of the sequences, packed at random: never below what the table adds up to."""
    found, random, checked = pool(), np.random.default_rng(2), 0
    for member, one in enumerate(found.members):
        layout = one.candidate.layout
        if layout.pp != 2 or not one.beside_grains:
            continue
        found.refine(member, beside=True)
        strategy = found.strategy(member, beside=True)
        pipeline, replicas = strategy.pipelines[0]
        for _ in range(6):
            rows = random_micro_batches(found, one.beside_grains, random, layout.dp * int(random.integers(1, 5)))
            # No more than there are: the table is proved for parts of the workload.
            rows = rows[np.cumsum(rows, axis=0).max(axis=1) <= found.load.counts.min()]
            parts = tuple(np.array_split(rows, layout.dp))
            if not len(rows):
                continue
            exact = int(replicas_ns(found.problem, one.candidate, found.load.lengths, parts).max())
            work = float((rows @ pipeline.units(found.load.lengths)).sum()) * pipeline.parts / replicas
            assert work + strategy.reduce_ns <= exact + found.reduce_ns(member), one.candidate.name
            checked += 1
    assert checked > 3


def test_the_longest_sequence_bounds_sets() -> None:
    """Every assignment of a few sequences to two or three strategies takes at least the bound, with groups that
    take their work or, with the longest sequence, its passage; one assignment comes close."""
    random = np.random.default_rng(3)
    for _ in range(30):
        size = int(random.integers(2, 4))
        work = random.integers(1, 30, (size, 5)).astype(float)
        serial = work[:, -1] + random.integers(0, 60, size)
        least = np.inf
        for chosen in itertools.product(range(size), repeat=5):
            groups = np.zeros(size)
            np.add.at(groups, list(chosen), work[list(chosen), range(5)])
            groups[chosen[-1]] = max(groups[chosen[-1]], serial[chosen[-1]])
            least = min(least, float(groups.sum()))
        bound = longest_ns(work, serial, tuple(range(size)))
        assert bound <= least
        assert bound >= 0.5 * least
