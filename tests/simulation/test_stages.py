"""Costs of virtual stages: affine in layers and in recompute counts, and consistent with one another."""

from __future__ import annotations

import numpy as np
import pytest

from milpplan.problem import Layout, Plan, Problem
from milpplan.simulation import LayoutColumns, LayoutCosts, StageOptions, durations, plan_stages, stage_options
from milpplan.simulation.layers import Phase
from milpplan.simulation.layout_costs import layout_costs
from milpplan.simulation.network.collectives import processor_fraction
from milpplan.simulation.pipeline.step_graph import Term
from tests.amounts import first
from tests.simulation.cases import problem_of, random_cases, random_layout, random_problem

ADDITIVE = (Term.FORWARD, Term.BACKWARD, Term.GATHER, Term.REDUCE, Term.OPTIMIZER)


def costs_of(problem: Problem, layout: Layout) -> LayoutCosts:
    """Constants of one layout."""
    return layout_costs(problem, LayoutColumns.of([layout])).at(0)


def sharded() -> LayoutCosts:
    """DeepSeek-V3 under a layout with every kind of communication."""
    problem = problem_of("deepseek-v3", "dgx-h100")
    layout = Layout(tp=2, cp=2, dp=4, ep=8, pp=2, global_batch_size=64, sequence_parallel=True, zero_stage=1)
    return costs_of(problem, layout)


def stage(
    costs: LayoutCosts, kinds: list[int], full: int = 0, selective: int = 0, *, ends: str = ""
) -> StageOptions:
    """One option of a stage; ``ends`` names what it holds besides layers."""
    return stage_options(
        costs,
        kinds,
        np.array([full]),
        np.array([selective]),
        is_first="first" in ends,
        is_last="last" in ends,
    )


@pytest.mark.parametrize("ends", ["", "first", "last", "first last"])
@pytest.mark.parametrize("kind", [0, 1])
def test_affine_in_layers(kind: int, ends: str) -> None:
    """Every further layer of a kind adds the same time, states and kept bytes."""
    costs = sharded()
    found = [stage(costs, [kind] * n, ends=ends) for n in range(6)]
    for term in ADDITIVE:
        assert np.all(np.diff([item.terms[term, 0] for item in found], n=2) == 0), term.name
    assert np.all(np.diff([item.state_bytes for item in found], n=2, axis=0) == 0)
    assert np.all(np.diff([item.kept_bytes[0] for item in found], n=2) == 0)


def test_affine_in_recompute_counts() -> None:
    """Every further recomputed layer adds one replay to the backward and drops the same bytes; else only the part
    of the backward changes that reductions wait for."""
    costs = sharded()
    kinds = [1] * 8
    none = stage(costs, kinds)
    for full, selective in ((0, 0), (1, 0), (0, 1), (3, 4), (8, 0), (0, 8)):
        found = stage(costs, kinds, full, selective)
        extra = full * costs.duration_ns[1, Phase.FULL] + selective * costs.duration_ns[1, Phase.SELECTIVE]
        dropped = full * costs.dropped_full_bytes[1] + selective * costs.dropped_selective_bytes[1]
        changed = found.terms[:, 0] - none.terms[:, 0]
        assert changed[Term.BACKWARD] == extra
        assert changed[Term.LEAD] == pytest.approx(costs.exposed_fractions[1] * extra, abs=1)
        assert np.count_nonzero(np.delete(changed, [Term.BACKWARD, Term.LEAD])) == 0
        assert none.kept_bytes - found.kept_bytes == dropped


def test_first_layers_are_recomputed() -> None:
    """In a stage of several kinds the first layers are recomputed wholly, the next ones selectively."""
    costs = sharded()
    kinds = [0, 0, 1, 1]
    extra = stage(costs, kinds, 3, 1).terms - stage(costs, kinds).terms
    full, selective = costs.duration_ns[:, Phase.FULL], costs.duration_ns[:, Phase.SELECTIVE]
    assert extra[Term.BACKWARD] == 2 * full[0] + full[1] + selective[1]


def test_options_are_what_they_are_alone() -> None:
    """Many recompute choices evaluated together equal each of them alone; taking keeps them."""
    costs = sharded()
    full, selective = np.array([0, 2, 1, 4, 0]), np.array([0, 1, 3, 0, 4])
    together = stage_options(costs, [0, 1, 1, 1], full, selective, is_first=True, is_last=False)
    for row in range(len(full)):
        alone = stage(costs, [0, 1, 1, 1], int(full[row]), int(selective[row]), ends="first")
        taken = together.take(np.array([row]))
        for name in ("terms", "state_bytes", "kept_bytes", "transient_bytes", "full", "selective"):
            assert np.array_equal(getattr(taken, name), getattr(alone, name)), name


def test_an_empty_stage_costs_nothing() -> None:
    """No layers and no end of the model: all zero."""
    found = stage(sharded(), [])
    assert not found.terms.any()
    assert not found.state_bytes.any()
    assert not found.kept_bytes.any()
    assert not found.transient_bytes.any()


def test_replay_needs_room_for_one_layer() -> None:
    """A backward needs its widest workspace, and the dropped bytes of one recomputed layer of the largest
    kind, however many are recomputed."""
    costs = sharded()
    kinds = [0, 1, 1, 1]
    workspace = costs.workspace_bytes.max()
    assert stage(costs, kinds).transient_bytes == workspace
    full = max(costs.dropped_full_bytes)
    assert stage(costs, kinds, 2).transient_bytes == workspace + full
    assert stage(costs, kinds, 4).transient_bytes == workspace + full
    assert stage(costs, [1, 1], 0, 1).transient_bytes == (
        costs.workspace_bytes[1] + costs.dropped_selective_bytes[1]
    )
    head = stage(costs, [0], ends="last").transient_bytes
    assert head == max(costs.workspace_bytes[0], costs.head_workspace_bytes)


@pytest.mark.parametrize("seed", first(10, range(40)))
def test_buckets_are_part_of_their_stage(seed: int) -> None:
    """LEAD <= BACKWARD, TRAIL <= REDUCE, FIRST <= GATHER, LAST <= FORWARD for any stage: what the rule that
    drops layouts without overlap rests on."""
    random = np.random.default_rng(seed)
    problem = random_problem(random)
    costs = costs_of(problem, random_layout(random, problem))
    held = list(problem.model.layer_kinds)
    for ends in ("", "first", "last", "first last"):
        start, stop = sorted(random.integers(0, len(held) + 1, 2).tolist())
        full = int(random.integers(0, stop - start + 1))
        terms = stage(costs, held[start:stop], full, ends=ends).terms
        for bucket, whole in (
            (Term.LEAD, Term.WEIGHT if costs.split_backward else Term.BACKWARD),
            (Term.TRAIL, Term.REDUCE),
            (Term.FIRST, Term.GATHER),
            (Term.LAST, Term.FORWARD),
        ):
            assert terms[bucket] <= terms[whole], bucket.name
        assert np.all(terms >= 0)


@pytest.mark.parametrize(("problem", "plan"), first(8, random_cases(seed=31, count=30)))
def test_a_split_loses_nothing(problem: Problem, plan: Plan) -> None:
    """However the layers are split, the virtual stages together hold all states and do all work of a
    micro-batch."""
    costs = costs_of(problem, plan.layout)
    bare = plan.model_copy(
        update={
            "virtual_stages": tuple(
                item.model_copy(update={"recompute": type(item.recompute)()}) for item in plan.virtual_stages
            )
        }
    )
    stages = plan_stages(costs, problem.model.layer_kinds, bare)
    matrix = durations(stages)
    assert matrix.shape == (len(Term), plan.layout.num_virtual_stages)
    whole = stage(costs, list(problem.model.layer_kinds), ends="first last")
    assert np.array_equal(sum(item.state_bytes for item in stages), whole.state_bytes)
    assert sum(int(item.kept_bytes[0]) for item in stages) == whole.kept_bytes
    for term in ADDITIVE:
        assert matrix[term].sum() == whole.terms[term, 0]


@pytest.mark.parametrize("hidden", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_fraction_of_the_shorter_is_hidden(hidden: float, zero_stage: int) -> None:
    """Of a reduction beside the last backward, of a gather beside the first forward, and of both in every
    micro-batch, ``hidden`` times the shorter of communication and compute is hidden."""
    problem = problem_of("llama3-8b", "dgx-a100-80")
    layout = Layout(
        dp=64, global_batch_size=64, zero_stage=zero_stage, overlap_grad_reduce=True, overlap_param_gather=True
    )
    fractions = {"hidden_gather_fraction": hidden, "hidden_reduce_fraction": hidden}
    all_hidden, some = (
        costs_of(
            problem.model_copy(
                update={
                    "hardware": problem.hardware.model_copy(
                        update={"software": problem.hardware.software.model_copy(update=changed)}
                    )
                }
            ),
            layout,
        )
        for changed in ({"hidden_gather_fraction": 1.0, "hidden_reduce_fraction": 1.0}, fractions)
    )
    if zero_stage == 3:
        # (exposed, hidden) of forward and backward; the processors' share of hidden time is exposed again.
        share = float(processor_fraction(problem.hardware, 64, 1))
        sent = all_hidden.parts.zero[0].sum(axis=0)[:2] - share * all_hidden.parts.zero[0, 1, :2]
        assert some.parts.zero[0, 1, :2] == pytest.approx(hidden * all_hidden.parts.zero[0, 1, :2], abs=2)
        assert some.parts.zero[0, 0, :2] == pytest.approx(sent - (1 - share) * some.parts.zero[0, 1, :2], abs=3)
        return
    before, after = (stage(costs, [0] * 32, ends="first last").terms[:, 0] for costs in (all_hidden, some))
    for part, whole, rest, cover in (
        (Term.TRAIL, Term.REDUCE, Term.LEAD, Term.BACKWARD),
        (Term.FIRST, Term.GATHER, Term.LAST, Term.FORWARD),
    ):
        exposed = max(after[part], after[whole] - after[cover] + after[rest])
        shorter = min(before[whole] - before[part], before[cover] - before[rest])
        assert exposed == pytest.approx(before[whole] - hidden * shorter, abs=2)
