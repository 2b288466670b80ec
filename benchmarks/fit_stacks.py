"""Fit the constants of every published software stack and write them to ``hardware/stacks``.

    python -m benchmarks.fit_stacks [--only NAME ...] [--dry-run]
    python -m benchmarks.fit_stacks --leave-out source [--write benchmarks/results/accuracy.md]

A stack is a framework with its kernels on one kind of hardware. Its constants are fitted to the timed runs of the
sources named in ``STACKS``, and its errors are those of runs that were left out: whole sources in turn where
several used the stack, otherwise a tenth of the source's configurations at a time. Where a source is the only one
of its stack, leaving it out would leave nothing to fit to. ``--leave-out source`` writes no stack: it predicts
every source by constants fitted to the others of its framework and generation, and prints the table.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.leave_out import left_out, tables
from benchmarks.tables import replace_section
from milpplan.calibration.fitting.fit import fit
from milpplan.calibration.measured import Observation, observations
from milpplan.calibration.sources import write_overlay
from milpplan.problem.catalog import load_overlay
from milpplan.problem.hardware import HardwareSpec
from milpplan.problem.overlay import CONGESTION, SHARES, Overlay, applied
from milpplan.validation.comparison import UNSCORED_FLAGS
from milpplan.validation.runs.reader import read_runs
from milpplan.validation.runs.variants import is_scored

TARGET = Path(__file__).resolve().parents[1] / "hardware" / "stacks"
CONSTANTS = (
    "gemm_efficiency",
    "memory_efficiency",
    "attention_efficiency",
    "scale_up_efficiency",
    "scale_out_efficiency",
    "layer_launch_s",
    "step_overhead_s",
)
"""Fitted unless ``CHOSEN`` says otherwise."""
SHARDED = (*SHARES, CONGESTION)
"""Constants of gathers and reductions beside compute, and of rings over many nodes."""
CHOSEN = {
    "composer": (*CONSTANTS, *SHARDED),
    "aleph-alpha": (*CONSTANTS, CONGESTION),
    "maxtext": ("gemm_efficiency", *SHARDED),
    "nemo": (
        "gemm_efficiency",
        "gemm_fp8_efficiency",
        "attention_efficiency",
        "scale_out_efficiency",
        "dispatch_efficiency",
        "step_overhead_s",
    ),
    "nanotron": (*CONSTANTS, "scale_out_hop_s", "far_micro_batch_s", "far_step_s", "far_reduce_s", "slice_copy_s"),
    # One model with one length in few layouts does not tell kinds of kernels apart.
    "internevo": ("gemm_efficiency", "scale_out_efficiency", "scale_out_hop_s", *SHARES),
    # Megatron-LM of 2023 synchronises the host after every batch of messages between stages
    # (megatron/core/pipeline_parallel/p2p_communication.py).
    "zero-bubble": ("gemm_efficiency", "message_s"),
    # Its runs waited for every kernel (CUDA_LAUNCH_BLOCKING=1, chronicles-prequel.md).
    "megatron-deepspeed": ("gemm_efficiency", "memory_efficiency", "scale_up_efficiency", "kernel_latency_s"),
    "nanotron-slow-calls": (
        "gemm_efficiency",
        "collective_rank_s",
        "collective_call_s",
        "collective_far_rank_s",
        "step_overhead_s",
    ),
    "nanotron-earlier-engine": ("message_s",),
}
"""Constants of stacks whose runs say more, or that lie on another stack."""
BASES = {"nanotron-slow-calls": "nanotron", "nanotron-earlier-engine": "nanotron-slow-calls"}
"""Stacks that lie on another one: what they share is fitted to the other's runs."""
FLAGGED = {"nanotron-earlier-engine": "old_pp_engine"}
"""Stacks that are fitted only to runs with a flag that no score counts: those it is for are then left out."""
LEAST_RUNS = 4
MOST_RUNS = 60
"""More runs of one source on one hardware say little more about eight constants."""
LARGER_SAMPLES = {"nanotron": 150, "nanotron-slow-calls": 150}
"""Stacks where they do: single iterations that scatter by 5 %, on 8 to 512 GPUs with tp of 1 to 128. Constants of
60 runs left the others a point worse."""
SEED = 0
WORTHWHILE = 0.8
"""A stack is written only if the error of runs left out is below this share of the error before."""


@dataclass(frozen=True, slots=True)
class Part:
    """The observations of one stack on one hardware description or, as ``base``, on another stack."""

    name: str
    base: str
    runs: list[Observation]

    @property
    def sources(self) -> set[str]:
        """Sources of the runs."""
        return {run.group for run in self.runs}

    @property
    def constants(self) -> tuple[str, ...]:
        """What is fitted."""
        return CHOSEN.get(self.runs[0].stack, CONSTANTS)

    def labels(self) -> list[Hashable]:
        """What is left out together: a source where each of several has enough runs, else runs of one layout."""
        counts = Counter(run.group for run in self.runs)
        if len(counts) > 1 and min(counts.values()) >= LEAST_RUNS:
            return [run.group for run in self.runs]
        return [(run.problem.model.name, run.problem.job.sequence_length, run.plan.layout) for run in self.runs]


def parts(only: Sequence[str]) -> Iterator[Part]:
    """Timed runs by stack and hardware; a stack follows the one that it lies on, whose file is then written."""
    by_name: dict[str, list[Observation]] = defaultdict(list)
    for run in _fitted_to():
        if run.stack:
            by_name[f"{run.problem.hardware.name}+{run.stack}"].append(run)
    rng = np.random.default_rng(SEED)
    for name, runs in sorted(by_name.items(), key=lambda part: (part[1][0].stack in FLAGGED, part[0])):
        if len(runs) > MOST_RUNS:
            rows = rng.choice(len(runs), MOST_RUNS, replace=False)
            larger = LARGER_SAMPLES.get(runs[0].stack)
            if larger is not None:  # By a generator of its own, so that the samples of the others stay.
                rows = np.random.default_rng(SEED).choice(len(runs), larger, replace=False)
            runs = [runs[row] for row in sorted(rows)]
        if len(runs) >= LEAST_RUNS and (not only or name in only):
            yield _on_its_base(name, runs)


def _fitted_to() -> Iterator[Observation]:
    """What stacks are fitted to: the runs without flags, and those of ``FLAGGED``."""
    file = read_runs(None)
    found, _ = observations(file)
    yield from (run for run in found if run.stack not in FLAGGED)
    for stack, flag in FLAGGED.items():
        flagged = replace(file, runs=tuple(run for run in file.runs if flag in run.flags))
        found, _ = observations(flagged, unscored=UNSCORED_FLAGS - {flag})
        yield from (run for run in found if run.stack == stack)


def _on_its_base(name: str, runs: list[Observation]) -> Part:
    """The runs with the constants of the stack below, read from its file."""
    hardware, stack = runs[0].problem.hardware.name, runs[0].stack
    if stack not in BASES:
        return Part(name, hardware, runs)
    base = f"{hardware}+{BASES[stack]}"
    overlay = load_overlay(base)
    assert overlay is not None
    problems = [
        run.problem.model_copy(update={"hardware": _with_overlays(run.problem.hardware, overlay)}) for run in runs
    ]
    return Part(name, base, [replace(run, problem=one) for run, one in zip(runs, problems, strict=True)])


def _with_overlays(hardware: HardwareSpec, overlay: Overlay) -> HardwareSpec:
    """The description with an overlay, and before it those that it lies on."""
    below = load_overlay(overlay.base)
    return applied(hardware if below is None else _with_overlays(hardware, below), overlay)


def leave_sources_out(target: Path | None) -> None:
    """Print the tables of sources left out, on described accelerators; with a document, put them into it."""
    everything, _ = observations(read_runs(None))
    found = [run for run in everything if is_scored(run.problem.hardware.name)]
    rows = []
    for row in left_out(found, lambda stack: CHOSEN.get(stack, CONSTANTS), LEAST_RUNS, MOST_RUNS, SEED):
        print(f"{row.generation}, {row.stack or 'no stack'}: {row.source}", file=sys.stderr, flush=True)
        rows.append(row)
    text = tables(rows, LEAST_RUNS)
    print(text)
    if target is not None:
        replace_section(target, "sources left out", text)


def main() -> None:
    """Fit, print a line a stack, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of stacks, e.g. dgx-h100+nemo")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--leave-out", choices=["source"], help="fit nothing to keep; predict sources by others")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables of sources left out there")
    arguments = parser.parse_args()
    if arguments.leave_out:
        leave_sources_out(arguments.write)
        return
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for part in parts(arguments.only):
        result = fit(part.runs, constants=part.constants, groups=part.labels(), hops=False)
        unseen = result.left_out_s[~np.isnan(result.left_out_s)]
        known = result.measured_s[~np.isnan(result.left_out_s)]
        errors = np.abs(unseen / known - 1.0)
        print(
            f"{part.name}: {len(part.runs)} runs of {', '.join(sorted(part.sources))}; mean error "
            f"{result.mean_abs_error(result.before_s):.1%} before, {result.mean_abs_error(result.after_s):.1%} "
            f"after, {errors.mean():.1%} left out (worst {errors.max():.1%})",
            file=sys.stderr,
            flush=True,
        )
        overlay = result.overlay(
            base=part.base,
            name=part.name,
            data=f"{len(part.runs)} published runs of {', '.join(sorted(part.sources))}",
            date=today,
        )
        helps = overlay.provenance.error_left_out is not None and errors.mean() < WORTHWHILE * result.error_before
        if helps and not arguments.dry_run:
            write_overlay(TARGET / f"{part.name}.toml", overlay)


if __name__ == "__main__":
    main()
