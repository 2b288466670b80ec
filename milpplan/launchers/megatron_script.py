"""Shell scripts of a Megatron-LM launch: one for ``torchrun`` on every node, and one for Slurm that starts it."""

from __future__ import annotations

import re
import shlex

from milpplan.launchers.arguments import Values
from milpplan.launchers.records import Launch

WIDTH = 110

TRAINING = (
    ("--train-iters", "100"),
    ("--lr", "1.0e-4"),
    ("--min-lr", "1.0e-5"),
    ("--lr-decay-style", "cosine"),
    ("--weight-decay", "0.1"),
    ("--clip-grad", "1.0"),
    ("--log-interval", "1"),
    ("--eval-iters", "0"),
    ("--distributed-timeout-minutes", "60"),
)
"""What a run needs and no plan decides."""


def torchrun_script(launch: Launch, version: str) -> str:
    """The script that every node runs; it is enough by itself on one node.

    Args:
        launch: the arguments.
        version: of milpplan, for the comment.
    """
    names = [part.name for part in launch.sections]
    lines = ["#!/usr/bin/env bash", *_header(launch, version), "set -euo pipefail", ""]
    lines += [
        "# Where Megatron-LM is, and where this node is.",
        "MEGATRON_DIR=${MEGATRON_DIR:-.}",
        f"NUM_NODES=${{NUM_NODES:-{launch.num_nodes}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{launch.gpus_per_node}}}",
        "NODE_RANK=${NODE_RANK:-0}",
        "MASTER_ADDR=${MASTER_ADDR:-localhost}",
        "MASTER_PORT=${MASTER_PORT:-29500}",
        "",
    ]
    lines += [f"export {name}={value}" for name, value in launch.environment.items()]
    for part in launch.sections:
        lines += ["", *(f"# {line}" for line in _wrapped(part.why)), *_array(part.name, part.arguments)]
    lines += [
        "",
        "# Not decided by the plan: learning rates, data and tokenizer. As it stands, it runs on mock data.",
        *_array("TRAINING_ARGS", {flag: (value,) for flag, value in TRAINING}),
        *_array("DATA_ARGS", {"--mock-data": (), "--tokenizer-type": ("NullTokenizer",)}),
        "",
        "torchrun \\",
        '    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \\',
        '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
        '    "$MEGATRON_DIR/pretrain_gpt.py" \\',
        *(f'    "${{{name}[@]}}" \\' for name in [*names, "TRAINING_ARGS"]),
        '    "${DATA_ARGS[@]}"',
    ]
    return "\n".join(lines) + "\n"


def slurm_script(launch: Launch, version: str, torchrun_name: str) -> str:
    """The batch script that starts the other one once on every node, in the order of the nodes.

    Args:
        launch: the arguments.
        version: of milpplan.
        torchrun_name: file name of the other script, in the same directory.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", launch.title[0].split(" on ")[0])[:40]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={launch.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={launch.gpus_per_node}",
        "#SBATCH --exclusive",
        *_header(launch, version),
        "# Submit from the directory of this file; account, partition and time are yours to add.",
        "set -euo pipefail",
        "",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_ADDR",
        "export MASTER_PORT=${MASTER_PORT:-29500}",
        "",
        "# Ranks follow the nodes: neighbours of the plan are neighbours here.",
        f"srun bash -c 'NODE_RANK=$SLURM_NODEID exec bash {shlex.quote(torchrun_name)}'",
    ]
    return "\n".join(lines) + "\n"


def _header(launch: Launch, version: str) -> list[str]:
    lines = [
        f"{launch.target} ({launch.version}), {launch.num_nodes} nodes of {launch.gpus_per_node} GPUs. "
        f"Written by milpplan {version}.",
        *launch.title,
        *(f"Note: {note}" for note in launch.notes),
    ]
    return [f"# {part}" for line in lines for part in _wrapped(line)]


def _wrapped(text: str) -> list[str]:
    """Lines of a comment. A name with a line break in it stays inside its comment."""
    words, lines = text.split(), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("    " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _array(name: str, arguments: dict[str, Values]) -> list[str]:
    rows = [f"    {' '.join((flag, *map(shlex.quote, values)))}" for flag, values in arguments.items()]
    return [f"{name}=(", *rows, ")"]
