"""Pipelines whose sequences differ in what the stages before the last do: ``corners``, and bounds that know it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from milpplan.lengths import pipeline_ns
from milpplan.lengths.bounds import StageLoads, corners, load_bound
from tests.lengths.cases import path_bound


def test_every_pair_has_at_least_a_mixture_of_the_corners() -> None:
    """No weights of both places are less for any pair than for all corners; corners are pairs themselves."""
    random = np.random.default_rng(31)
    for _ in range(50):
        pairs = random.integers(0, 30, (2, int(random.integers(1, 20)))).astype(float)
        found = corners(pairs)
        assert {*map(tuple, found.tolist())} <= set(zip(*pairs.tolist(), strict=True))
        weights = random.random((40, 2)) * random.integers(0, 2, (40, 2))
        assert ((weights @ pairs).min(axis=1) >= (weights @ found.T).min(axis=1) - 1e-9).all()


@pytest.mark.long
def test_bounds_that_know_kinds_hold_for_every_packing() -> None:
    """Random packings of sequences of several kinds, those that are short on one stage early and late or anywhere,
    take no less than the bound that knows the kinds, which is above the one that knows the least shares only. One
    that took all sequences for the most of all kinds would break."""
    random, raised, broken = np.random.default_rng(32), [], 0
    for turn in range(8):
        stages, number = int(random.integers(2, 5)), int(random.integers(2, 12))
        kinds = np.array([[0.3, 0.75], [0.34, 0.62], [0.45, 0.55]]) + random.uniform(0.0, 0.1, (3, 2))
        found = corners(kinds.T)
        shares = (float(kinds[:, 0].min()), float(kinds[:, 1].min()))
        one = StageLoads(np.ones(1), 50.0, shares, (30.0, 20.0), 10, mixes=found)
        total = 1e6
        bounds, plain = (
            [load_bound(stage, stages, 50.0, total, 12, exact=exact) for exact in (False, True)]
            for stage in (one, replace(one, mixes=np.zeros((0, 2))))
        )
        most = replace(one, mixes=kinds.max(axis=0)[None])
        wrong = path_bound(most, stages, number, total).at(total)
        highest = max(bound.at(total) for bound in bounds)
        raised.append(highest / max(bound.at(total) for bound in plain))
        for packing in range(40):
            # [number, kinds] loads; rising and falling, the first and the last micro-batches of one kind each.
            loads = random.dirichlet(np.full(number * 3, 0.5)).reshape(number, 3)
            if turn % 2 and number > 1:
                shape = np.minimum(np.arange(1, number + 1), np.arange(number, 0, -1))
                loads = np.eye(3)[np.where(np.arange(number) < number / 2, 0, 2)]
                loads = loads * shape[:, None] ** float(random.uniform(0, 2))
            if packing < 3:
                loads = np.tile(np.eye(3)[packing], (number, 1))
            loads = loads / loads.sum() * total
            forward, backward = (
                np.tile(np.ceil(loads @ kinds[:, phase] + constant), (stages, 1))
                for phase, constant in ((0, 30.0), (1, 20.0))
            )
            forward[-1] = np.ceil(loads.sum(axis=1) / 3)
            backward[-1] = np.ceil(loads.sum(axis=1) + 50.0 - forward[-1])
            exact = pipeline_ns(forward.astype(int), backward.astype(int), np.full(number, 10))
            assert highest <= exact
            broken += wrong > exact
    assert max(raised) > 1.003, raised
    assert min(raised) > 1.0 - 1e-9, raised
    assert broken
