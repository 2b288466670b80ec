"""What follows from the order of the layers: rows of relaxations, items of menus, choices of ranks."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from milpplan.optimize.layout import CompactRelaxation, LayoutContext, RankRelaxation, rank_choices
from milpplan.optimize.space import layers_up_to, run_counts
from milpplan.optimize.space.enumerate_layouts import layout_space
from milpplan.simulation import IntArray, usable_memory_bytes
from tests.optimize.brute_force import constants
from tests.optimize.problems import random_problem
from tests.optimize.test_branching import NEVER, splits_of


@cache
def contexts(count: int) -> list[LayoutContext]:
    """Interleaved layouts with free splits, of models with several kinds of layers."""
    found: list[LayoutContext] = []
    for seed in range(1000):
        problem = random_problem(seed, family=("mixed", "window")[seed % 2])
        space = problem.space.model_copy(update={"interleaved_layers": "any"})
        problem = problem.model_copy(update={"space": space})
        columns = layout_space(problem).columns
        rows = np.flatnonzero(columns.vpp > 1)
        if len(rows):
            layout = columns.at(int(rows[seed % len(rows)]))
            found.append(
                LayoutContext.of(problem, layout, constants(problem, layout), usable_memory_bytes(problem))
            )
        if len(found) == count:
            break
    return found


@pytest.fixture(params=range(8))
def context(request: pytest.FixtureRequest) -> LayoutContext:
    """One of eight layouts."""
    return contexts(8)[request.param]


def narrowed(context: LayoutContext, rng: random.Random) -> tuple[LayoutContext, list[tuple[int, ...]]]:
    """Tighter limits to some virtual stages, and all splits within them, of which there are some."""
    while True:
        narrow = context
        for stage in rng.sample(range(context.num_stages), 3):
            low, high = sorted(rng.choices(range(context.min_layers(stage), context.max_layers(stage) + 1), k=2))
            narrow = narrow.with_stage(stage, low, high)
        if splits := splits_of(narrow):
            return narrow, splits


def runs_of(context: LayoutContext, split: tuple[int, ...]) -> IntArray:
    """Layers of each run in every virtual stage, [J, R]."""
    runs = np.repeat(np.arange(len(context.runs)), [count for _, count in context.runs])
    return np.array(
        [np.bincount(part, minlength=len(context.runs)) for part in np.split(runs, np.cumsum(split)[:-1])]
    )


def test_limits_of_stages_say_how_many_layers_are_up_to_each(context: LayoutContext) -> None:
    """Exactly the fewest of any split."""
    rng = random.Random(3)
    for _ in range(20):
        narrow, splits = narrowed(context, rng)
        first, last = layers_up_to(narrow.layer_bounds, context.problem.model.num_layers)
        held = np.array(splits)
        assert (first == held.cumsum(axis=1).min(axis=0)).all()
        assert (last == held[:, ::-1].cumsum(axis=1)[:, ::-1].min(axis=0)).all()


def test_rows_of_layers_hold_for_every_split(context: LayoutContext) -> None:
    """The same layers on other virtual stages break some often."""
    rng, J = random.Random(4), context.num_stages
    compact = CompactRelaxation(context, NEVER)
    names, K = compact.program.rows.names, len(context.problem.model.kinds)
    kinds = [kind for kind, _ in context.runs]
    broken = 0
    for _ in range(10):
        narrow, splits = narrowed(context, rng)
        rows, lower, upper = compact.limits(narrow)
        assert {names[row].split("[")[0] for row in (rows[0], rows[-1])} == {"stage_holds_layers", "kinds_end"}
        for split in rng.sample(splits, min(20, len(splits))):
            layers = np.zeros((J, K), dtype=np.int64)
            np.add.at(layers.T, kinds, runs_of(narrow, split).T)
            for place, counts in enumerate((layers, layers[rng.sample(range(J), J)])):
                values = np.zeros(compact.program.num_variables, dtype=np.int64)
                values[: J * K] = counts.reshape(-1)
                activity = compact.program.rows.activities(values)[rows]
                holds = bool(((lower <= activity) & (activity <= upper)).all())
                assert holds or place == 1
                broken += not holds
    assert broken > 5


def test_menus_hold_what_has_a_place_in_the_model(context: LayoutContext) -> None:
    """A virtual stage may hold so many layers of each run exactly where some split says so."""
    rng, left_out = random.Random(5), 0
    for _ in range(20):
        narrow, splits = narrowed(context, rng)
        held = np.stack([runs_of(narrow, split) for split in splits])
        for stage, (fewest, most) in enumerate(narrow.layer_bounds):
            counts = narrow.placed_counts(stage, most)
            assert set(map(tuple, counts.tolist())) == {tuple(row) for row in held[:, stage].tolist()}
            size = run_counts(narrow.runs).sum(axis=1)
            left_out += int(((fewest <= size) & (size <= most)).sum()) - len(counts)
    assert left_out > 0


def test_choices_of_ranks_within_limits_are_those_of_splits() -> None:
    """Of every rank all choices are left that hold what some split has there, and many others are not."""
    rng, left_out = random.Random(6), 0
    for context in contexts(8):
        choices = [rank_choices(context, rank) for rank in range(context.layout.pp)]
        known = [own for own in choices if own is not None]
        if len(known) < len(choices):
            continue
        relaxation = RankRelaxation(CompactRelaxation(context, NEVER), known)
        for _ in range(10):
            narrow, splits = narrowed(context, rng)
            within = np.split(relaxation._within(narrow), relaxation.offsets[1:-1])
            held = np.stack([runs_of(narrow, split) for split in splits])
            for own, kept in zip(known, within, strict=True):
                possible = {part.tobytes() for part in held[:, list(own.stages)]}
                said = [part.tobytes() in possible for part in np.ascontiguousarray(own.runs)]
                assert (kept >= said).all()
                left_out += int((~kept).sum())
    assert left_out > 50
