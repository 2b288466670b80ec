"""Step times of a source predicted by constants fitted to the other sources of its framework and generation.

A stack that was fitted to a source says nothing about runs of others; what a forecast is worth is seen where two
sources or more used one framework on one generation of hardware. Where there is one only, nothing is left to fit
to, and the table says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.tables import markdown_table
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.measured import Observation
from milpplan.problem.overlay import Overlay, applied
from milpplan.simulation.simulator import simulate
from milpplan.units import percent_text
from milpplan.validation.runs.variants import generation_of

FloatArray = npt.NDArray[np.float64]
Constants = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Runs of one source with a framework on a generation; errors are those of step times, [runs].

    ``others``: runs fitted to, by source. ``without``: with no stack; ``left_out``: with constants fitted to the
    others, ``fitted``: to all sources, this one with them; both empty where the others are too few.
    """

    generation: str
    stack: str
    source: str
    others: dict[str, int]
    without: FloatArray
    left_out: FloatArray
    fitted: FloatArray

    @property
    def possible(self) -> bool:
        """Whether there was something to fit to."""
        return len(self.left_out) > 0


def left_out(
    found: Iterable[Observation], constants: Constants, least: int, most: int, seed: int
) -> Iterator[LeftOut]:
    """Every source of every framework and generation.

    ``constants`` says what is fitted of a stack; ``least``: runs that a fit needs; ``most``: of more a sample is
    fitted to, drawn with ``seed``.
    """
    groups: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for run in found:
        groups[generation_of(run.problem.hardware), run.stack].append(run)
    for (generation, stack), runs in sorted(groups.items()):
        by_source: dict[str, list[Observation]] = defaultdict(list)
        for run in runs:
            by_source[run.group].append(run)
        several = stack and len(by_source) > 1
        everything = _fitted(runs, constants(stack), most, seed) if several else None
        for source, own in sorted(by_source.items()):
            others = [run for run in runs if run.group != source] if stack else []
            forecast = memory = np.zeros(0)
            if everything is not None and len(others) >= least:
                forecast = errors(own, _fitted(others, constants(stack), most, seed))
                memory = errors(own, everything)
            yield LeftOut(
                generation,
                stack,
                source,
                dict(sorted(Counter(run.group for run in others).items())),
                errors(own, None),
                forecast,
                memory,
            )


def _fitted(runs: list[Observation], constants: Sequence[str], most: int, seed: int) -> Overlay:
    """The overlay of a sample of the runs, on whichever description each has."""
    if len(runs) > most:
        rng = np.random.default_rng(seed)
        runs = [runs[row] for row in sorted(rng.choice(len(runs), most, replace=False))]
    result = fit(runs, constants=constants, num_folds=1, hops=False)
    return result.overlay(base=runs[0].problem.hardware, name="left out", data="", date="")


def errors(runs: Sequence[Observation], overlay: Overlay | None) -> FloatArray:
    """Predicted over measured step time, minus 1; ``overlay`` on the description of every run."""
    ratios = []
    for run in runs:
        hardware = run.problem.hardware if overlay is None else applied(run.problem.hardware, overlay)
        problem = run.problem.model_copy(update={"hardware": hardware})
        ratios.append(simulate(problem, run.plan).step_time_s / run.step_time_s - 1.0)
    return np.array(ratios)


def tables(rows: Sequence[LeftOut], least: int) -> str:
    """Two tables in Markdown: what was left out, and what cannot be."""
    done = [
        (
            row.generation,
            row.stack,
            row.source,
            len(row.without),
            ", ".join(f"{count} of {name}" for name, count in row.others.items()),
            figures(row.without),
            figures(row.left_out),
            figures(row.fitted),
        )
        for row in rows
        if row.possible
    ]
    header = ("generation", "framework", "source left out", "runs", "fitted to", "no stack", "left out", "with it")
    first = markdown_table(header, done)
    impossible = [
        (row.generation, row.stack or "-", row.source, len(row.without), _why(row, least))
        for row in rows
        if not row.possible
    ]
    second = markdown_table(("generation", "framework", "source", "runs", "why"), impossible)
    means = _means([row for row in rows if row.possible])
    return "\n\n".join((first, *means, "Sources that cannot be left out:", second))


def _means(done: Sequence[LeftOut]) -> Iterator[str]:
    """One sentence that sums up the first table, every row weighing the same."""
    if done:
        without, forecast, fitted = (
            percent_text(float(np.mean([np.mean(np.abs(getattr(row, name))) for row in done])))
            for name in ("without", "left_out", "fitted")
        )
        yield (
            f"Mean of these {len(done)} rows' mean absolute errors: {without} without a stack, {forecast} left "
            f"out, {fitted} with the source among those fitted to."
        )


def _why(row: LeftOut, least: int) -> str:
    if not row.stack:
        return "its framework has no stack"
    if not row.others:
        return "the only source of this framework on this generation"
    return f"the others have {sum(row.others.values())} runs, fewer than {least}"


def figures(values: FloatArray) -> str:
    """Mean / mean absolute / worst absolute, per cent."""
    mean = float(np.mean(values))
    sign = "+" if mean >= 0 else "-"
    sizes = [
        percent_text(float(size)).removesuffix(" %")
        for size in (abs(mean), np.mean(np.abs(values)), np.max(np.abs(values)))
    ]
    return f"{sign}{sizes[0]} / {sizes[1]} / {sizes[2]} %"
