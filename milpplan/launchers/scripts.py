"""Parts of the shell scripts that all launchers share: comments, node variables, torchrun and the batch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence

from milpplan.launchers.megatron.arguments import Values
from milpplan.launchers.records import Launch, Started
from milpplan.units import counted

WIDTH = 110


def header(launch: Started, version: str) -> list[str]:
    """Write the comment lines: author and target, the plan in words, and the notes. ``version`` is milpplan's."""
    lines = [
        f"{launch.target} ({launch.version}), {counted(launch.num_nodes, 'node')} of "
        f"{counted(launch.gpus_per_node, 'GPU')}. "
        f"Written by milpplan {version}.",
        *launch.title,
        *(f"Note: {note}" for note in launch.notes),
    ]
    return [f"# {part}" for line in lines for part in wrapped(line)]


def wrapped(text: str) -> list[str]:
    """Wrap a text into comment lines. A name with a line break stays inside its comment."""
    words, lines = text.split(), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append("    " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def places(launch: Started) -> list[str]:
    """Write the variables that locate a node, with defaults for the first node, and the environment."""
    return [
        f"NUM_NODES=${{NUM_NODES:-{launch.num_nodes}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{launch.gpus_per_node}}}",
        "NODE_RANK=${NODE_RANK:-0}",
        "MASTER_ADDR=${MASTER_ADDR:-localhost}",
        "MASTER_PORT=${MASTER_PORT:-29500}",
        "",
        *(f"export {name}={value}" for name, value in launch.environment.items()),
    ]


TORCHRUN = (
    "torchrun \\",
    '    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \\',
    '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
)
"""Lines of the command up to the program that it starts."""


NOT_DECIDED = "# Not decided by the plan: learning rates, data and tokenizer. As it stands, it runs on mock data."


def torchrun_script(launch: Started, version: str, program: tuple[str, ...], before: tuple[str, ...] = ()) -> str:
    """Write the script that every node runs, for a program with a configuration file.

    Args:
        launch: the launch to start.
        version: of milpplan.
        program: lines after torchrun, without continuation marks.
        before: lines ahead of torchrun.
    """
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", "", "# Where this node is."]
    lines += [
        *places(launch),
        *([""] if launch.environment else []),
        *before,
        *([""] if before else []),
        *TORCHRUN,
    ]
    lines += [f"    {line} \\" for line in program[:-1]] + [f"    {program[-1]}"]
    return "\n".join(lines) + "\n"


def arguments_script(
    launch: Launch,
    version: str,
    before: Sequence[str],
    program: str,
    fixed: Mapping[str, Mapping[str, Values]],
    written: Callable[[str, Values], str],
) -> str:
    """Write the script that every node runs, for a program with command-line arguments.

    Args:
        launch: the launch to start.
        version: of milpplan.
        before: lines ahead of the variables that locate the node.
        program: the program and its own arguments, after torchrun.
        fixed: arguments that the plan does not decide, by the name of their shell array.
        written: writes an argument and its values.
    """
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", "", *before, *places(launch)]

    def array(name: str, arguments: Mapping[str, Values]) -> list[str]:
        return [f"{name}=(", *(f"    {written(flag, values)}" for flag, values in arguments.items()), ")"]

    for part in launch.sections:
        lines += ["", *(f"# {line}" for line in wrapped(part.why)), *array(part.name, part.arguments)]
    lines += ["", NOT_DECIDED]
    for name, arguments in fixed.items():
        lines += array(name, arguments)
    given = [f'"${{{name}[@]}}"' for name in (*(part.name for part in launch.sections), *fixed)]
    lines += ["", *TORCHRUN, " \\\n".join(f"    {words}" for words in (program, *given))]
    return "\n".join(lines) + "\n"


def slurm_script(launch: Started, version: str, torchrun_name: str) -> str:
    """Write the batch script that starts the torchrun script once on every node, in node order.

    Args:
        launch: the launch to start.
        version: of milpplan.
        torchrun_name: file name of the torchrun script, in the same directory.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", launch.title[0].split(" on ")[0])[:40]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={launch.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={launch.gpus_per_node}",
        "#SBATCH --exclusive",
        *header(launch, version),
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
