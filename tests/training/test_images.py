"""Images as a distribution: wait for the fullest replica, memory of the largest micro-batch, proofs, refusals."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from milpplan import Layout, Problem, simulate
from milpplan.cli.app import app
from milpplan.problem import Images
from milpplan.reports.words.plan_words import plan_sentences
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import images_over_mean, mfu
from milpplan.simulation.layout_costs import layout_costs
from tests.amounts import long_but
from tests.consumers import assert_consumers_agree
from tests.optimize.problems import random_problem
from tests.optimize.test_optimality import BACKENDS, check
from tests.simulation.cases import even_plan, random_layout
from tests.simulation.cases import random_problem as real_problem
from tests.simulation.test_bulk import switched, with_host
from tests.training.test_vision import end_of, qwen, with_images

DRAWN = Images(numbers=(0, 1, 4), shares=(0.5, 0.3, 0.2))


def drawn(problem: Problem, rng: np.random.Generator) -> Problem:
    """The problem with an encoder, and zero to three images in a sequence."""
    seen = with_images(problem, rng)
    images = Images(numbers=(0, 1, 3), shares=tuple(rng.uniform(0.1, 1.0, 3).tolist()))
    size = int(rng.integers(1, problem.job.sequence_length // 3 + 1))
    job = seen.job.model_copy(update={"vision_tokens": 0, "image_tokens": size, "images": images})
    return Problem.model_validate(dict(seen) | {"job": job})


def of_images(images: Images | None, size: int = 256, **job: Any) -> Problem:
    """Qwen3-VL 8B at peak everywhere, with images of ``size`` tokens."""
    return qwen(job.pop("vision_tokens", 0), image_tokens=size, images=images, **job)


def over_mean(images: Images, batch: int, dp: int, **layout: Any) -> float:
    """Images of the slowest ranks over the mean of a replica."""
    columns = LayoutColumns.of([Layout(dp=dp, global_batch_size=batch, **layout)])
    return float(images_over_mean(of_images(images), columns)[0])


def draws(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Images of drawn sequences."""
    return rng.choice(DRAWN.numbers, size=shape, p=DRAWN.shares)


@pytest.mark.parametrize(("batch", "dp"), [(8, 8), (64, 16), (96, 2), (512, 8)])
def test_the_fullest_replica_is_that_of_random_draws(batch: int, dp: int) -> None:
    """Of 20,000 drawn batches the mean of the fullest replica is the formula's, within four standard errors."""
    fullest = draws(np.random.default_rng(3), (20_000, dp, batch // dp)).sum(axis=2).max(axis=1)
    mean = batch / dp * DRAWN.mean
    assert abs(over_mean(DRAWN, batch, dp) - fullest.mean() / mean) < 4 * fullest.std() / 20_000**0.5 / mean


@pytest.mark.parametrize(
    ("batch", "dp", "size", "cp"), [(8, 8, 1, 2), (64, 4, 2, 3), (96, 2, 4, 2), (64, 1, 1, 8)]
)
def test_the_slowest_ranks_that_share_are_those_of_random_draws(batch: int, dp: int, size: int, cp: int) -> None:
    """Of 20,000 drawn batches, whose micro-batches are dealt to the ranks image by image, the mean is the
    formula's, within four standard errors."""
    images = draws(np.random.default_rng(4), (20_000, dp, batch // dp // size, size)).sum(axis=3)
    slowest = np.ceil(images / cp).sum(axis=2).max(axis=1)
    mean = batch / dp * DRAWN.mean
    factor = over_mean(DRAWN, batch, dp, cp=cp, micro_batch_size=size, vision_data_parallel=True)
    assert abs(factor - slowest.mean() / mean) < 4 * slowest.std() / 20_000**0.5 / mean


def test_the_fullest_replica_by_hand() -> None:
    """Of two replicas with one fair coin each some has an image in three of four steps; with two coins each
    the mean maximum is 22/16. One replica waits for none, and equal sequences leave nothing to wait for."""
    coin = Images(numbers=(1, 0), shares=(2.0, 2.0))
    assert over_mean(coin, 2, 2) == pytest.approx(0.75 / 0.5)
    assert over_mean(coin, 4, 2) == pytest.approx(22 / 16)
    assert over_mean(coin, 4, 1) == 1
    assert over_mean(Images(numbers=(3,), shares=(1.0,)), 64, 8) == pytest.approx(1)
    assert over_mean(DRAWN, 2**19, 2) == pytest.approx(1, abs=2e-3)


def span(first: Any, other: float, backward: float) -> Any:
    """Time of 1F1B on two stages: forwards of the first stage ``first`` [..., m], of the second one ``other``, and
    backwards twice as long plus ``backward`` of the first stage's forward; written from the order of work."""
    m = first.shape[-1]
    back = backward * first
    own, sent = first[..., 0], first[..., 0]
    last = np.zeros_like(own)
    for number in range(m):
        # The first stage runs one forward more before each backward, the last stage both in turn.
        last = np.maximum(last, sent) + other + backward * other
        if number + 1 < m:
            own = own + first[..., number + 1]
            sent = own
        own = np.maximum(own, last) + back[..., number]
    return own


@pytest.mark.parametrize("m", [1, 2, 6])
def test_steps_of_random_draws_take_at_least_as_long(m: int) -> None:
    """Without a pipeline the mean step of drawn batches is the planned one; with two stages it is no shorter, and
    both are longer than the step of the mean micro-batch."""
    dp, size, draw = 8, 2, draws(np.random.default_rng(5), (4000, 8, m, 2)).sum(axis=3)
    factor, mean = over_mean(DRAWN, m * size * dp, dp), size * DRAWN.mean
    stage = np.stack([1 + draw, 1 + np.full_like(draw, mean, float), 1 + np.full_like(draw, factor * mean, float)])
    alone = 3 * stage.sum(axis=3).max(axis=2)
    error = 4 * alone[0].std() / 4000**0.5
    assert abs(alone[0].mean() - alone[2].mean()) < error
    assert alone[1].mean() < alone[2].mean()
    piped = span(stage, 2.0, 2.0).max(axis=2)
    assert piped[2].mean() < piped[0].mean() + 4 * piped[0].std() / 4000**0.5
    assert piped[1].mean() < piped[2].mean()


def test_time_of_the_mean_and_memory_of_the_largest() -> None:
    """At peak everywhere the encoder's time is that of the mean times the factor; memory is that of a micro-batch
    whose sequences all have the most images; FLOPs are those of the mean."""
    layout = {"dp": 8, "global_batch_size": 64, "micro_batch_size": 2}
    text, seen, most = (
        end_of(case, **layout) for case in (qwen(0), of_images(DRAWN), of_images(None, vision_tokens=4 * 256))
    )
    mean = end_of(of_images(None, vision_tokens=256), **layout)
    expected = text.seconds + (mean.seconds - text.seconds) * DRAWN.mean * over_mean(DRAWN, 64, 8)
    np.testing.assert_allclose(seen.seconds, expected, rtol=1e-4)
    for name in ("kept_bytes", "workspace_bytes"):
        np.testing.assert_array_equal(getattr(seen, name), getattr(most, name))
    rate = [mfu(case, 1.0, 8) for case in (qwen(0), of_images(DRAWN), of_images(None, vision_tokens=256))]
    assert rate[1] - rate[0] == pytest.approx(DRAWN.mean * (rate[2] - rate[0]))


def test_the_same_images_in_every_sequence_are_no_distribution() -> None:
    """Four images in every sequence cost what their tokens cost."""
    plan = even_plan(of_images(DRAWN), Layout(dp=4, pp=2, global_batch_size=64))
    always = of_images(Images(numbers=(4,), shares=(0.3,)))
    steps = [simulate(case, plan) for case in (always, of_images(None, vision_tokens=1024))]
    assert steps[0] == steps[1]


def test_layouts_are_costed_as_one_by_one() -> None:
    """Layouts that differ in replicas and batch alone have constants of their own."""
    problem = of_images(DRAWN)
    layouts = [Layout(dp=dp, global_batch_size=batch) for dp in (1, 2, 8) for batch in (8, 16, 64)]
    table = layout_costs(problem, LayoutColumns.of(layouts))
    for row, layout in enumerate(layouts):
        alone = layout_costs(problem, LayoutColumns.of([layout])).at(0)
        np.testing.assert_array_equal(table.at(row).embedding_ns, alone.embedding_ns)
    times = np.array([table.at(row).embedding_ns[0] for row in range(len(layouts))]).reshape(3, 3)
    assert (times[0] == times[0, 0]).all()
    assert (np.diff(times[1:], axis=1) < 0).all()
    assert (np.diff(times, axis=0) > 0).all()


@pytest.mark.parametrize("seed", long_but((0,), range(20)))
def test_bulk_bounds_and_traffic_know_the_distribution(seed: int) -> None:
    """Bulk simulation gives the simulator's numbers, bounds hold for random plans, and traffic adds up."""
    random = np.random.default_rng(seed)
    problem = drawn(with_host(real_problem(random)), random)
    layouts = [switched(random, problem, random_layout(random, problem)) for _ in range(12)]
    assert_consumers_agree(problem, layouts, random)


@pytest.mark.parametrize("backend", long_but(("highs",), BACKENDS))
@pytest.mark.parametrize("count", long_but((2,), (2, 20)))
def test_optimum_of_drawn_images_is_that_of_brute_force(backend: str, count: int) -> None:
    """Random problems with a distribution of images, on every backend."""
    first = 53_000 + 100 * BACKENDS.index(backend)
    for seed in range(first, first + count):
        check(drawn(random_problem(seed), np.random.default_rng(seed)), backend)


@pytest.mark.parametrize(
    ("images", "job", "seen"),
    [
        ({"numbers": (0, 2), "shares": (1.0,)}, {}, "2 numbers need as many shares, not 1"),
        ({"numbers": (1, 1), "shares": (1.0, 2.0)}, {}, "numbers must differ"),
        ({"numbers": (0,), "shares": (1.0,)}, {}, "one of them above 0"),
        ({"numbers": (2,), "shares": (1.0,)}, {"vision_tokens": 8}, "images beside vision_tokens"),
        ({"numbers": (2,), "shares": (1.0,)}, {"alignment": {"method": "dpo"}}, "are not modelled"),
        ({"numbers": (2,), "shares": (1.0,)}, {"image_tokens": None}, "no fixed size: state image_tokens"),
        ({"numbers": (5,), "shares": (1.0,)}, {"image_tokens": 1024}, "5 images of 1024 tokens exceed"),
        (
            {"numbers": (16,), "shares": (1.0,)},
            {"global_batch_size": 2**20},
            "expected at most",
        ),
    ],
)
def test_nonsense_is_refused(images: dict[str, Any], job: dict[str, Any], seen: str) -> None:
    """A distribution that contradicts itself or the job says so."""
    with pytest.raises(ValueError, match=seen):
        qwen(**({"vision_tokens": 0, "image_tokens": 64, "images": images} | job))


def test_answers_say_what_the_step_waits_for() -> None:
    """A plan in words names the distribution, the wait and the memory."""
    problem, layout = of_images(DRAWN), Layout(dp=8, global_batch_size=32, micro_batch_size=2)
    plan = even_plan(problem, layout)
    text = " ".join(plan_sentences(problem, plan, simulate(problem, plan)))
    assert "0 to 4 images a sequence, 1.1 on average, of 256 tokens" in text
    assert "waits for the replica with the most images" in text
    assert "micro-batches of 8 images" in text


def test_the_command_line_reads_shares() -> None:
    """Shares of the command line reach the plan's file; words that are no pairs are refused."""
    words = ["solve", "qwen3-vl-8b", "dgx-h100", "--gpus", "8", "--global-batch", "16", "--fix", "pp=1,cp=1,tp=1"]
    words += ["--space", "uniform", "--image-tokens", "256", "--images"]
    answer = CliRunner().invoke(app, [*words, "0:0.5,1:0.3,4:0.2", "--json"])
    assert answer.exit_code == 0
    job = json.loads(answer.stdout)["problem"]["job"]
    assert job["images"] == {"numbers": [0, 1, 4], "shares": [0.5, 0.3, 0.2]}
    for nonsense in ("4", "1:x", "1:0.5,1:0.5"):
        refused = CliRunner().invoke(app, [*words, nonsense])
        assert refused.exit_code == 2
        assert "--images" in refused.output
