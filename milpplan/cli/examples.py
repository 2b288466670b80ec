"""Examples of every command in its ``--help``: what people run it for, and the words."""

from __future__ import annotations

import re

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "solve": (
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
            "Which GPUs are cheaper for 15 trillion tokens",
            "llama3-70b dgx-h100,dgx-b200 --gpus 256 --global-batch 1024 --tokens 15e12 "
            "--price-per-gpu-hour dgx-h100=2.5,dgx-b200=4.5",
        ),
    ),
    "solve-lengths": (
        (
            "The best step for sequences of several lengths",
            "llama2-7b dgx-a100-80 --gpus 16 --lengths examples/lengths.txt",
        ),
        (
            "With one strategy, beside the rules of HotSPa and FlexSP",
            "llama2-7b dgx-a100-80 --gpus 16 --lengths examples/lengths.txt --max-strategies 1 --baselines",
        ),
    ),
    "min-gpus": (
        ("As few H100 as Llama-3 70B trains on", "llama3-70b dgx-h100 --global-batch 512"),
        (
            "As few as finish in 90 days",
            "llama3-70b dgx-h100 --global-batch 1024 --tokens 1e12 --deadline-days 90 --gpus 64:1024:64",
        ),
    ),
    "simulate": (
        ("Time and memory of a plan, yours or a solve's", "plan.json"),
        ("Every stage, as JSON", "plan.json --json"),
    ),
    "certify": (("Prove a result again with another solver", "plan.json"),),
    "compare": (("What differs between two plans, and what that costs", "old.json new.json"),),
    "explain": (
        ("What limits the plan, and what more memory or bandwidth would gain", "plan.json"),
        ("Why not tensor parallelism of 8", "plan.json --why-not tp=8"),
    ),
    "traffic": (
        ("Who sends how much to whom", "plan.json"),
        ("Traffic as a page", "plan.json --html traffic.html"),
    ),
    "switch": (("What moves when a job changes its plan", "before.json after.json"),),
    "sweep": (("Solve all cells of a study, or go on", "examples/studies/llama3-70b-which-gpu.toml"),),
    "report": (("A page to show, and a trace for Perfetto", "plan.json -o report.html --trace trace.json"),),
    "export": (
        ("Scripts for torchrun and Slurm in the directory launch", "plan.json --to megatron -o launch"),
        ("An older release", "plan.json --to torchtitan --target-version 0.2.2 -o launch"),
    ),
    "import": (
        (
            "What a Megatron-LM script costs, as a plan file",
            "run.sh --from megatron --hardware dgx-h100 -o plan.json",
        ),
    ),
    "gap": (
        ("How far your script is from the best", "run.sh --from megatron --hardware dgx-h100"),
        ("From a pipe, such as a job's command line", "- --from megatron --hardware dgx-h100 < run.sh"),
        ("In money, for a run of 15 trillion tokens", "plan.json --tokens 15e12 --price-per-gpu-hour 2.5"),
    ),
    "validate": (("The simulator against published runs", ""), ("Against your own", "--runs my_runs.json")),
    "calibrate": (
        ("Constants that fit your measured steps", "my_runs.json --hardware dgx-h100 --out my-cluster.toml"),
    ),
    "profile": (("Measure this machine for five minutes", "--hardware dgx-h200 --out my-gpus.toml"),),
    "list": (("Models by name", "models"), ("Hardware by name", "hardware")),
    "show": (
        ("What is known of a model", "llama3-70b"),
        ("The start of a cluster file of your own", "dgx-h100 > my-cluster.toml"),
    ),
    "schema": (("The JSON Schema of plan files", "plan"),),
    "init": (("Answer a few questions; then milpplan solve --job job.toml", "job.toml"),),
    "doctor": (("Are the solvers sound?", ""),),
}
"""Pairs of a purpose and the words after the command's name, by command."""
TOGETHER = re.compile(r"(?:-\S+|>) [^-]\S*|\S+")
"""Pattern of a word, or of an option with its value."""


def wrapped(words: str, width: int) -> list[str]:
    """Break a command line into lines of at most ``width`` columns that can be pasted; a word is never cut."""
    lines = [""]
    for word in TOGETHER.findall(words):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines
