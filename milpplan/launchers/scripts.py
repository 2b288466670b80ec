"""Parts of the shell scripts that all launchers share: comments, node variables, torchrun and job files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.launchers.megatron.flags import Values
from milpplan.launchers.records import Launch, Started
from milpplan.problem.reading import shown
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


HERE = 'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
"""Line that finds the directory of the script."""


def defaults(**values: object) -> list[str]:
    """Write shell variables with defaults, which variables of the caller replace."""
    return [f"{name}=${{{name}:-{value}}}" for name, value in values.items()]


def places(launch: Started) -> list[str]:
    """Write the variables that locate a node, with defaults for the first node, and the environment."""
    return [
        *defaults(NUM_NODES=launch.num_nodes, GPUS_PER_NODE=launch.gpus_per_node),
        *defaults(NODE_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=29500),
        "",
        *(f"export {name}={value}" for name, value in launch.environment.items()),
    ]


TORCHRUN = (
    "torchrun \\",
    '    --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \\',
    '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
)
"""Lines of the command up to the program that it starts."""


RAY_CLUSTER = (
    "# The other nodes join the Ray cluster of the first, which starts the run.",
    'if [ "$NODE_RANK" -ne 0 ]; then',
    '    exec ray start --address "$MASTER_ADDR:6379" --num-gpus "$GPUS_PER_NODE" --block',
    "fi",
    'ray start --head --node-ip-address "$MASTER_ADDR" --port 6379 --num-gpus "$GPUS_PER_NODE"',
)
"""Lines that make one Ray cluster of the nodes."""


NOT_DECIDED = "# Not decided by the plan: learning rates, data and tokenizer."
MOCK_DATA = " As it stands, it runs on mock data."


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
    start: Sequence[str] | None = None,
) -> str:
    """Write the script that every node runs, for a program with command-line arguments.

    Args:
        launch: the launch to start.
        version: of milpplan.
        before: lines ahead of the variables that locate the node.
        program: the program and its own arguments.
        fixed: arguments that the plan does not decide, by the name of their shell array.
        written: writes an argument and its values.
        start: lines of the command ahead of the program; None: torchrun.
    """
    lines = ["#!/usr/bin/env bash", *header(launch, version), "set -euo pipefail", "", *before, *places(launch)]

    def array(name: str, arguments: Mapping[str, Values]) -> list[str]:
        return [f"{name}=(", *(f"    {written(flag, values)}" for flag, values in arguments.items()), ")"]

    for part in launch.sections:
        lines += ["", *(f"# {line}" for line in wrapped(part.why)), *array(part.name, part.arguments)]
    lines += ["", NOT_DECIDED + (MOCK_DATA if start is None else "")]
    for name, arguments in fixed.items():
        lines += array(name, arguments)
    given = [f'"${{{name}[@]}}"' for name in (*(part.name for part in launch.sections), *fixed)]
    lines += ["", *(start or TORCHRUN), " \\\n".join(f"    {words}" for words in (program, *given))]
    return "\n".join(lines) + "\n"


JOBS: Final = ("slurm", "skypilot", "kubeflow", "ray", "torchrun")
"""Schedulers that a job file can be written for; ``torchrun`` needs none."""
ACCELERATORS: Final = {
    "dgx-a100-40": "A100",
    "dgx-a100-80": "A100-80GB",
    "dgx-b200": "B200",
    "dgx-h100": "H100",
    "dgx-h200": "H200",
    "gb200-nvl72": "GB200",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx4090": "RTX4090",
}
"""SkyPilot's names of accelerators by the name of the hardware."""


def job_files(
    job: str, launch: Started, version: str, files: Mapping[str, str], hardware: str, minutes: int | None = None
) -> dict[str, str]:
    """Write the job file that starts the torchrun script of a launch once on every node.

    Args:
        job: a name in ``JOBS``.
        launch: the launch to start.
        version: of milpplan.
        files: files of the launch by name; their shell script is started.
        hardware: name of the hardware.
        minutes: limit on the time of the job; None: no limit.

    Returns:
        The job file by name; nothing for ``torchrun``.

    Raises:
        UnknownNameError: the scheduler is not known, or SkyPilot's name of the accelerator.
        InvalidInputError: ``torchrun`` has no time limit.
    """
    if job not in JOBS:
        raise UnknownNameError(
            f"--job {shown(job)} does not exist.",
            f"Expected one of {', '.join(JOBS)}.",
            "Give one of these names.",
        )
    if job == "torchrun":
        if minutes is not None:
            raise InvalidInputError(
                f"--job torchrun has a limit of {minutes} minutes.",
                "Expected none: no job file is written that could hold it.",
                "Leave --job-minutes out, or name a scheduler.",
            )
        return {}
    script = next((name for name in files if name.endswith(".sh")), next(iter(files)))
    stem = script.removesuffix(".sh")
    command = f"{'' if minutes is None else f'timeout {minutes}m '}bash {shlex.quote(script)}"
    if job == "skypilot":
        return {f"{stem}.sky.yaml": _skypilot_task(launch, version, command, hardware)}
    if job == "kubeflow":
        return {f"{stem}.trainjob.yaml": _train_job(launch, version, command, files, hardware)}
    if job == "ray":
        if RAY_CLUSTER[1] in files[script]:
            raise InvalidInputError(
                f"--job ray is given, and {launch.target} makes a Ray cluster of its nodes by itself.",
                "Expected a scheduler that starts the script on every node.",
                "Leave --job out (Slurm), or name another.",
            )
        return {f"{stem}_ray.py": _ray_program(launch, version, command, f"{stem}_ray.py")}
    return {f"{stem}.sbatch": _slurm_script(launch, version, script, minutes)}


def _job_name(launch: Started) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", launch.title[0].split(" on ")[0])[:40]


def _dns_name(launch: Started) -> str:
    """Return the job's name as schedulers with DNS names take it: it starts with a letter."""
    return ("plan-" + re.sub(r"[^a-z0-9]+", "-", _job_name(launch).lower())).strip("-")


def _skypilot_task(launch: Started, version: str, command: str, hardware: str) -> str:
    """Write a SkyPilot task; SkyPilot copies the directory to every node and numbers the nodes."""
    if hardware not in ACCELERATORS:
        raise UnknownNameError(
            f"SkyPilot's name for the accelerators of {shown(hardware)} is not known.",
            f"Expected one of {', '.join(ACCELERATORS)}.",
            "Write the files for another scheduler: --job slurm.",
        )
    lines = [
        *header(launch, version),
        "# Start from the directory of this file with sky launch; cloud and setup are yours to add.",
        f"name: {_dns_name(launch)}",
        "workdir: .",
        f"num_nodes: {launch.num_nodes}",
        "resources:",
        f"  accelerators: {ACCELERATORS[hardware]}:{launch.gpus_per_node}",
        "run: |",
        "  export NODE_RANK=$SKYPILOT_NODE_RANK",
        '  export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        f"  {command}",
    ]
    return "\n".join(lines) + "\n"


def _train_job(launch: Started, version: str, command: str, files: Mapping[str, str], hardware: str) -> str:
    """Write a Kubeflow TrainJob, whose shell command first writes the launch files into the working directory."""
    lines = ["set -e"]
    for name, text in files.items():
        lines += [f"cat > {shlex.quote(name)} <<'END_OF_FILE'", *text.splitlines(), "END_OF_FILE"]
    lines += [
        "export NODE_RANK=$PET_NODE_RANK MASTER_ADDR=$PET_MASTER_ADDR MASTER_PORT=$PET_MASTER_PORT",
        f"exec {command}",
    ]
    # Kubernetes expands $(NAME) in arguments and reads $$ as a dollar sign.
    program = re.sub(r"\$(?=[$(])", "$$", "\n".join(lines))
    resource = "amd.com/gpu" if hardware.startswith("mi3") else "nvidia.com/gpu"
    document = [
        *header(launch, version),
        "# Start with kubectl create -f; image and volumes are yours to add. $$ is a dollar sign to Kubernetes.",
        "apiVersion: trainer.kubeflow.org/v1alpha1",
        "kind: TrainJob",
        "metadata:",
        f"  name: {_dns_name(launch)}",
        "spec:",
        "  runtimeRef:",
        "    name: torch-distributed",
        "  trainer:",
        f"    numNodes: {launch.num_nodes}",
        f"    numProcPerNode: {launch.gpus_per_node}",
        "    resourcesPerNode:",
        "      limits:",
        f"        {resource}: {launch.gpus_per_node}",
        '    command: ["bash", "-c"]',
        "    args:",
        "      - |",
        *[" " * 8 + line if line else "" for line in program.splitlines()],
    ]
    return "\n".join(document) + "\n"


def _ray_program(launch: Started, version: str, command: str, name: str) -> str:
    """Write the driver of a Ray job, which reserves whole nodes and starts the script on each."""
    lines = [
        *header(launch, version),
        f"# Start from the directory of this file: ray job submit --working-dir . -- python {name}",
        f"NUM_NODES, GPUS_PER_NODE = {launch.num_nodes}, {launch.gpus_per_node}",
        f"COMMAND = {json.dumps(shlex.split(command))}",
    ]
    return "\n".join(lines) + "\n" + RAY_DRIVER


RAY_DRIVER: Final = """
import os
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(num_cpus=1, num_gpus=GPUS_PER_NODE, max_retries=0)
def start(rank, master):
    environment = {**os.environ, "NODE_RANK": str(rank), "MASTER_ADDR": master}
    subprocess.run(COMMAND, env=environment, check=True)


ray.init()
bundles = [{"CPU": 1, "GPU": GPUS_PER_NODE}] * NUM_NODES
group = placement_group(bundles, strategy="STRICT_SPREAD")
ray.get(group.ready())
on = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(NUM_NODES)]
master = ray.get(address.options(scheduling_strategy=on[0]).remote())
ray.get([start.options(scheduling_strategy=on[rank]).remote(rank, master) for rank in range(NUM_NODES)])
"""
"""Part of the driver that does not depend on the plan. Ray decides the order of the nodes."""


def _slurm_script(launch: Started, version: str, torchrun_name: str, minutes: int | None) -> str:
    """Write the batch script that starts the torchrun script once on every node, in node order.

    Args:
        launch: the launch to start.
        version: of milpplan.
        torchrun_name: file name of the torchrun script, in the same directory.
        minutes: limit on the time of the job; None: the partition's.
    """
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={_job_name(launch)}",
        f"#SBATCH --nodes={launch.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={launch.gpus_per_node}",
        "#SBATCH --exclusive",
        *([] if minutes is None else [f"#SBATCH --time={minutes}"]),
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
