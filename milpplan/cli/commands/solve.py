"""The command ``solve`` and its examples. ``milpplan.cli.solving`` does the work."""

from __future__ import annotations

from typing import Final

from milpplan.cli import interrupts
from milpplan.cli.outcome import ExitCode
from milpplan.cli.solve_options import LengthOptions, SolveWords

EXAMPLES: Final = (
    ("The best plan for Llama-3 70B on 8 nodes, proved", "llama3-70b dgx-h100 --gpus 64 --global-batch 128"),
    (
        "What Megatron-LM can run of it, kept for export and report",
        "llama3-70b dgx-h100 --gpus 64 --global-batch 128 --target megatron --out plan.json",
    ),
    (
        "Your model and your cluster, at most a minute",
        "path/to/config.json my-cluster.toml --gpus 32 --global-batch 256 --time-limit 60",
    ),
    (
        "The plan that loses the least whatever the network does",
        "llama3-70b dgx-h100 --gpus 64 --global-batch 128 --robust",
    ),
    (
        "Which GPUs are cheaper for 15 trillion tokens",
        "llama3-70b dgx-h100,dgx-b200 --gpus 256 --global-batch 1024 --tokens 15e12 "
        "--price-per-gpu-hour dgx-h100=2.5,dgx-b200=4.5",
    ),
)


def solve(words: SolveWords, lengths: LengthOptions) -> ExitCode:
    """Find the best plan for a model on a cluster, and prove it. For sequences of several lengths, see
    `milpplan solve-lengths`."""
    # An import could lose a signal.
    with interrupts.leaving():
        from milpplan.cli.solving import run

    return run(words, lengths)
