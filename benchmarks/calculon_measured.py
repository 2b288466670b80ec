"""Calculon and milpplan against the published timings that both can be held to.

    python -m benchmarks.calculon_measured CHECKOUT_PATH

Korthikanti et al. 2022 (arXiv 2205.05198), A100 80 GB: table 5, iteration times of four models with full
recomputation and with sequence parallelism and selective recomputation; table 4, forward and backward of one layer
of the 22B model. Three estimates: Calculon on its own system file (the one its validation uses), milpplan on that
file, and milpplan on its own description of the machine (dgx-a100-80, fp32 gradients), to which no constant was
fitted from these runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.calculon_side import PLAIN, Checkout, Tree, files_of, load, without_memory_limit
from benchmarks.tables import markdown_table
from milpplan import Plan, Problem, load_hardware, simulate
from milpplan.problem.calculon.translation import calculon_run
from milpplan.simulation.layers.shard import Phase
from milpplan.simulation.layout_columns import LayoutColumns
from milpplan.simulation.layout_costs import layout_costs
from milpplan.units import NS_PER_S, percent_text

SYSTEM = "a100_80g"
FULL = {"activation_recompute": "full", "tensor_par_comm_type": "ar", "seq_par_ag_redo": False}
NONE = {"activation_recompute": "none", "tensor_par_comm_type": "ar", "seq_par_ag_redo": False}
SELECTIVE = NONE | {"activation_recompute": "attn_only"}
SEQUENCE = {"activation_recompute": "none", "tensor_par_comm_type": "rs_ag", "seq_par_ag_redo": True}
BOTH = SEQUENCE | {"activation_recompute": "attn_only"}


@dataclass(frozen=True, slots=True)
class Run:
    """A measured iteration: seconds."""

    model: str
    procs: int
    pp: int
    vpp: int
    batch: int
    micro_batch: int
    full_s: float
    selective_s: float

    def execution(self, mode: Tree) -> Tree:
        """The run in Calculon's words, its GeLU unfused as in its own validation."""
        degrees = {"num_procs": self.procs, "tensor_par": 8, "pipeline_par": self.pp, "data_par": 1}
        sizes = {"batch_size": self.batch, "microbatch_size": self.micro_batch, "pipeline_interleaving": self.vpp}
        rest = {"pipeline_par_net": 1, "data_par_net": 1, "fused_activation": False}
        return PLAIN | degrees | sizes | rest | mode


TABLE_5 = (
    Run("megatron-22B", 8, 1, 1, 4, 4, 1.42, 1.10),
    Run("gpt3-175B", 64, 8, 3, 64, 1, 18.13, 13.75),
    Run("turing-530B", 280, 35, 3, 280, 1, 49.05, 37.83),
    Run("megatron-1T", 512, 64, 1, 512, 1, 94.42, 71.49),
)
TABLE_4 = {
    "no recomputation": (NONE, 7.7, 11.9),
    "sequence parallelism": (SEQUENCE, 7.2, 11.8),
    "full recomputation": (FULL, 7.7, 19.5),
    "selective": (SELECTIVE, 7.7, 13.2),
    "selective, sequence parallelism": (BOTH, 7.2, 13.1),
}
"""Milliseconds of forward and backward."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """Seconds of (step, forward of a layer, backward of a layer) by three models."""

    calculon: tuple[float, float, float]
    on_their_file: tuple[float, float, float]
    on_ours: tuple[float, float, float]


def estimates(checkout: Checkout, run: Run, mode: Tree) -> Estimates:
    """All three of one run; memory is no limit, since a layer without recomputation was measured by itself."""
    model, system = checkout.files("models")[run.model], without_memory_limit(checkout.files("systems")[SYSTEM])
    execution = run.execution(mode)
    stats = checkout.estimate(checkout.llm.Application(model), execution, checkout.system(system))
    if stats is None:
        raise SystemExit(f"Calculon cannot run {run.model}.")
    forward = stats["block_fw_time"] + stats["baseblock_fw_tp_time_exposed"]
    backward = sum(stats[f"block_{part}_time"] for part in ("agrad", "wgrad", "re"))
    backward += stats["baseblock_agrad_tp_time_exposed"] + stats["baseblock_recomm_time_exposed"]
    problem, plan = calculon_run(files_of(model, execution, system))
    own = problem.model_copy(
        update={
            "hardware": load_hardware("dgx-a100-80"),
            "job": problem.job.model_copy(update={"grad_dtype": "fp32"}),
        }
    )
    return Estimates((stats["total_time"], forward, backward), _ours(problem, plan), _ours(own, plan))


def _ours(problem: Problem, plan: Plan) -> tuple[float, float, float]:
    costs = layout_costs(problem, LayoutColumns.of([plan.layout])).at(0)
    duration = costs.duration_ns[0] / NS_PER_S
    held = plan.virtual_stages[0].recompute
    replay = duration[Phase.FULL] if held.full else duration[Phase.SELECTIVE] if held.selective else 0.0
    return (
        simulate(problem, plan).step_time_s,
        float(duration[Phase.FORWARD]),
        float(duration[Phase.BACKWARD] + replay),
    )


def errors(predicted: Sequence[float], measured: Sequence[float]) -> str:
    """Mean, mean absolute and worst relative error."""
    relative = np.array(predicted) / np.array(measured) - 1
    worst = relative[np.argmax(np.abs(relative))]
    parts = (relative.mean(), np.abs(relative).mean(), worst)
    return " / ".join(percent_text(float(part)) for part in parts)


def table(rows: Sequence[tuple[str, float, float, float, float]], unit: float, what: str) -> str:
    """Measured and three estimates, and their errors in the last row."""
    header = (what, "measured", "Calculon", "milpplan, Calculon's file", "milpplan, dgx-a100-80")
    lines: list[Sequence[object]] = [(row[0], *(f"{value * unit:.4g}" for value in row[1:])) for row in rows]
    measured = [row[1] for row in rows]
    lines.append(
        ("mean / mean absolute / worst", "", *(errors([row[i] for row in rows], measured) for i in (2, 3, 4)))
    )
    return markdown_table(header, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate and print."""
    parser = argparse.ArgumentParser(description="Calculon and milpplan against published timings.")
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT_PATH", help="a checkout of Calculon")
    checkout = load(parser.parse_args(arguments).checkout)
    steps = []
    for run in TABLE_5:
        for name, mode, measured in (("full", FULL, run.full_s), ("selective, SP", BOTH, run.selective_s)):
            found = estimates(checkout, run, mode)
            steps.append(
                (f"{run.model}, {name}", measured, found.calculon[0], found.on_their_file[0], found.on_ours[0])
            )
    layers = []
    for name, (mode, forward, backward) in TABLE_4.items():
        found = estimates(checkout, TABLE_5[0], mode)
        for index, (phase, milliseconds) in enumerate((("forward", forward), ("backward", backward)), start=1):
            values = (found.calculon[index], found.on_their_file[index], found.on_ours[index])
            layers.append((f"{name}, {phase}", milliseconds / 1e3, *values))
    print(table(steps, 1.0, "iteration, s"), table(layers, 1e3, "layer of the 22B model, ms"), sep="\n\n")


if __name__ == "__main__":
    main()
