"""Fit what frameworks without fused kernels have in common, and predict each source by the others.

    python -m benchmarks.fit_plain [--dry-run] [--write benchmarks/results/accuracy.md]

A framework that launches single operators of PyTorch or Paddle moves more memory traffic for the same layer than
the fused kernels of Megatron-LM and Transformer Engine, whose traffic the cost model counts. One factor on the
memory's rate, fitted to all such sources at once, each with as many runs, stands for it where a framework has no
stack of its own: the overlays ``HARDWARE+plain``. What that is worth is seen on sources left out, each predicted
by a factor fitted to the others.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.leave_out import errors, figures
from benchmarks.tables import markdown_table, replace_section
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.fitting.records import Fit
from milpplan.calibration.measured import Observation, observations
from milpplan.calibration.sources import write_overlay
from milpplan.problem.overlay import Factor, Overlay, with_constants
from milpplan.units import percent_text
from milpplan.validation.runs.frameworks import PLAIN_STACK, framework_of
from milpplan.validation.runs.reader import read_runs
from milpplan.validation.runs.variants import generation_of

TARGET: Final = Path(__file__).resolve().parents[1] / "hardware" / "stacks"
CONSTANT: Final = "memory_efficiency"
HARDWARE: Final = ("dgx-a100-40", "dgx-a100-80", "dgx-h100", "dgx-h200")
"""Of the generations that plain frameworks were measured on."""
OLDER_KERNEL: Final = {"Hopper": Factor(value=0.61, one_sigma=0.05)}
"""FlashAttention-2, which PyTorch calls, over the cuDNN 9 of the description of H100: 191 to 335 over 315 to 539
TFLOP/s at 512 to 16,384 tokens, FlashAttention-3 (Shah et al. 2024) figure 5; one sigma: reading off the bars. On
A100 the description has FlashAttention-2 itself. Not fitted."""
SPECIAL: Final = ("nanotron-slow-calls", "nanotron-earlier-engine")
"""Stacks of nodes and engines in a state that no other source has."""
RUNS_A_SOURCE: Final = 30
SEED: Final = 0
HEADER: Final = ("generation", "source", "runs", "fitted to", "factor", "no stack", "left out", "with it")


@dataclass(frozen=True, slots=True)
class Row:
    """One source on one generation: its runs' errors without a factor, left out, and fitted to."""

    generation: str
    source: str
    others: int
    factor: float
    without: npt.NDArray[np.float64]
    left_out: npt.NDArray[np.float64]
    fitted: npt.NDArray[np.float64]


def plain_runs() -> list[Observation]:
    """The runs of all sources with such a framework, on hardware as described."""
    file = read_runs(None)
    plain = {run.id for run in file.runs if framework_of(run).plain}
    found, _ = observations(file)
    usual = [run for run in found if run.id in plain and run.stack not in SPECIAL]
    return [run for run in usual if run.problem.hardware.name in HARDWARE]


def sample(runs: Sequence[Observation]) -> list[Observation]:
    """As many runs of every source on each generation, with the attention kernel that PyTorch calls there."""
    groups: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for run in runs:
        groups[generation_of(run.problem.hardware), run.group].append(_with_older_kernel(run))
    chosen = []
    for _, own in sorted(groups.items()):
        rows = np.random.default_rng(SEED).choice(len(own), min(RUNS_A_SOURCE, len(own)), replace=False)
        chosen += [own[row] for row in sorted(rows)]
    return chosen


def _with_older_kernel(run: Observation) -> Observation:
    older = OLDER_KERNEL.get(generation_of(run.problem.hardware))
    if older is None:
        return run
    hardware = with_constants(run.problem.hardware, {"attention_efficiency": older.value}, {})
    return replace(run, problem=run.problem.model_copy(update={"hardware": hardware}))


def left_out(runs: Sequence[Observation], everything: Fit) -> Iterator[Row]:
    """Every source, all its runs, predicted by a factor fitted to a sample of the others; its runs on two
    generations are left out together."""
    whole = _overlay(everything, runs[0].problem.hardware.name, len(runs), "")
    for source in sorted({run.group for run in runs}):
        others = sample([run for run in runs if run.group != source])
        result = fit(others, constants=(CONSTANT,), num_folds=1, hops=False)
        without = _overlay(result, runs[0].problem.hardware.name, len(others), "")
        for generation in ("Ampere", "Hopper"):
            own = [run for run in runs if (run.group, generation_of(run.problem.hardware)) == (source, generation)]
            older = [_with_older_kernel(run) for run in own]
            if own:
                yield Row(
                    generation,
                    source,
                    len(others),
                    result.constant(CONSTANT).value,
                    errors(own, None),
                    errors(older, without),
                    errors(older, whole),
                )


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and a sentence that sums them up."""
    cells = [
        (
            row.generation,
            row.source,
            len(row.without),
            f"{row.others} runs of the others",
            f"{row.factor:.3f}",
            figures(row.without),
            figures(row.left_out),
            figures(row.fitted),
        )
        for row in sorted(rows, key=lambda row: (row.generation, row.source))
    ]
    means = [
        percent_text(float(np.mean([np.mean(np.abs(getattr(row, name))) for row in rows])))
        for name in ("without", "left_out", "fitted")
    ]
    return (
        f"{markdown_table(HEADER, cells)}\n\nMean of these {len(rows)} rows' mean absolute errors: {means[0]} "
        f"without a stack, {means[1]} left out, {means[2]} with the source among those fitted to."
    )


def _overlay(result: Fit, hardware: str, count: int, sources: str) -> Overlay:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    data = f"{count} published runs of frameworks without fused kernels: {sources}"
    return result.overlay(hardware, f"{hardware}+{PLAIN_STACK}", data, today)


def _with_kernel(overlay: Overlay, generation: str) -> Overlay:
    """The overlay with the older attention kernel of its generation."""
    older = OLDER_KERNEL.get(generation)
    if older is None:
        return overlay
    constants = overlay.constants.model_copy(update={"attention_efficiency": older})
    note = "; attention_efficiency not fitted: FlashAttention-2 over cuDNN 9, Shah et al. 2024, figure 5"
    provenance = overlay.provenance.model_copy(update={"method": overlay.provenance.method + note})
    return overlay.model_copy(update={"constants": constants, "provenance": provenance})


def main() -> None:
    """Fit, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="write no overlay")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table there")
    arguments = parser.parse_args()
    runs = plain_runs()
    fitted_to = sample(runs)
    result = fit(fitted_to, constants=(CONSTANT,), groups=[run.group for run in fitted_to], hops=False)
    constant = result.constant(CONSTANT)
    print(f"{CONSTANT} {constant.value:.3f} +- {constant.one_sigma:.3f}", file=sys.stderr)
    text = table(list(left_out(runs, result)))
    print(text)
    if arguments.write is not None:
        replace_section(arguments.write, "plain frameworks left out", text)
    if arguments.dry_run:
        return
    for hardware in HARDWARE:
        generation = "Ampere" if hardware.startswith("dgx-a100") else "Hopper"
        overlay = _overlay(result, hardware, len(fitted_to), ", ".join(sorted({run.group for run in runs})))
        write_overlay(TARGET / f"{hardware}+{PLAIN_STACK}.toml", _with_kernel(overlay, generation))


if __name__ == "__main__":
    main()
