"""Translation of Calculon's model, execution and system files to a ``Problem`` and a ``Plan``.

Calculon's words on the left, ours on the right, of those that are more than another name:

    activation_recompute   full: every layer wholly; attn_only: every layer selectively (its unfused scores)
    optimizer_sharding     zero_stage 1: shards the optimizer and communicates once a step
    pipeline_interleaving  vpp, schedule 1f1b or interleaved
    *_net                  the domain is the part of network 0 that the execution uses (see below)
    the others             ``SWITCHES``

Calculon has no embedding, head or loss; its own count of parameters has 51,200 tied tokens and learned positions,
which the model gets. What differs in the costs is in docs/launchers.md.

In an execution every parallelism names its network. The parallelisms on the first network fill a domain, whose
size is the product of their degrees. If three networks are in use, the parallelisms on the second network form a
pod of domains, and all others leave the pod. So each parallelism uses the network that the execution names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.problem import Job, Layout, ModelSpec, Plan, Problem, Space, validated
from milpplan.problem.calculon.system import (
    CalculonExecution,
    CalculonFiles,
    hardware_of,
    read_calculon,
    slowest_scalar,
)
from milpplan.problem.reading import RecordType, invalid_fields
from milpplan.problem.records import Record

INSIDE_OUT: Final = {"tensor": "tp", "data": "dp", "pipeline": "pp"}
"""Parallelisms from neighbouring ranks outwards, as milpplan places them."""
TIERS: Final = 3
"""Maximum number of networks of a cluster in milpplan."""


def used_networks(files: CalculonFiles) -> CalculonFiles:
    """Drop the networks that the execution does not use, and renumber the others in the execution.

    An execution that uses a single network keeps a second network beside it, so that all other values stay the
    same: the next network, or the first if the execution uses the last.

    Raises:
        InvalidInputError: an assignment that Calculon refuses.
    """
    execution, networks = files.execution, files.system.networks
    used = _checked_networks(files)
    numbers = sorted(set(used.values()))
    if len(networks) <= 2:
        return files
    if len(numbers) < 2:
        (only,) = numbers or (0,)
        numbers = [only, only + 1] if only + 1 < len(networks) else [0, only]
    nets = {f"{name}_par_net": numbers.index(used[name]) if name in used else 0 for name in execution.degrees}
    chosen = tuple(networks[number] for number in numbers)
    return replace(
        files,
        execution=execution.model_copy(update=nets),
        system=files.system.model_copy(update={"networks": chosen}),
    )


def placed(files: CalculonFiles) -> tuple[tuple[int, ...], str | None]:
    """Find the ranks that every network but the last joins, and the order of ranks.

    Args:
        files: files with only the networks in use (``used_networks``).

    Returns:
        Number of ranks of each tier, from the inside, and the order of ranks; None for milpplan's usual order.
    """
    execution, used = files.execution, _checked_networks(files)
    sizes = _sizes(files, used)
    ranked = [name for name in INSIDE_OUT if name in used]
    wanted = sorted(ranked, key=lambda name: used[name])
    number = len(files.system.networks)
    if number == 1:
        return (execution.num_procs,), None
    order = None
    if wanted != ranked:
        idle = [name for name in INSIDE_OUT if name not in used]
        order = "-".join(INSIDE_OUT[name] for name in (*wanted, *idle)).replace("tp", "tp-cp")
    return tuple(accumulate((sizes.get(network, 1) for network in range(number - 1)), mul)), order


def free_wholes(files: CalculonFiles) -> tuple[int, ...]:
    """Find the processors that every network but the last joins if the layout is free, from the inside.

    They are products of the sizes, because Calculon lets several parallelisms share a network.

    Raises:
        InvalidInputError: more than three networks, or networks that are not listed from the inside outwards.
    """
    networks, procs = files.system.networks, files.execution.num_procs
    if len(networks) > TIERS:
        raise InvalidInputError(
            f"{files.names[2]}: networks has {len(networks)} entries, and the layout is free.",
            "Expected one to three to choose among: a domain, what joins domains, and what joins pods of those.",
            "Leave those in the file that the search may use, or simulate an execution, which names its own.",
        )
    sizes = [network.size for network in networks]
    reach = list(accumulate(sizes, mul))
    if sizes != sorted(sizes) or procs > reach[-1]:
        raise InvalidInputError(
            f"{files.names[2]}: networks has the sizes {sizes}.",
            f"Expected the smaller network first, and sizes for num_procs={procs:,} processors together.",
            "Correct the sizes, or num_procs in the execution file.",
        )
    return tuple(reach[:-1] or reach)


def _checked_networks(files: CalculonFiles) -> dict[str, int]:
    """Find the network of every parallelism with a degree above 1.

    An execution that Calculon refuses for the sizes or fillings of its networks is refused here, too
    (calculon/llm/llm.py, ``_check_network_assignments``).
    """
    execution, networks = files.execution, files.system.networks
    used = {name: execution.network_of(name) for name, degree in execution.degrees.items() if degree > 1}
    for index, size in _sizes(files, used).items():
        if index >= len(networks):
            raise _network_error(files, index, "there is no such network")
        if size > networks[index].size:
            raise _network_error(files, index, f"{size} processors on it are more than its size")
        if networks[index].must_be_filled and networks[index].size % size:
            raise _network_error(files, index, f"{size} processors do not divide its size, but must_be_filled")
    return used


def _sizes(files: CalculonFiles, used: dict[str, int]) -> dict[int, int]:
    """Multiply the degrees of the parallelisms on each network: its number of processors."""
    sizes: dict[int, int] = {}
    for name, network in used.items():
        sizes[network] = sizes.get(network, 1) * files.execution.degrees[name]
    return sizes


def _network_error(files: CalculonFiles, index: int, reason: str) -> InvalidInputError:
    """Make the error of an assignment to a network."""
    sizes = [network.size for network in files.system.networks]
    return InvalidInputError(
        f"{files.names[1]}: network {index} cannot be used so: {reason}.",
        f"Expected an assignment that fits the networks of {files.names[2]}, of sizes {sizes}.",
        "Correct tensor_par_net, pipeline_par_net or data_par_net.",
    )


VOCABULARY: Final = 51_200
"""Vocabulary in Calculon's count of parameters (calculon/llm/llm.py, ``num_parameters``)."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Pair of a field of Calculon's execution and the field of milpplan with the same meaning."""

    theirs: str
    record: type[Record]
    ours: str
    values: dict[object, object]
    """Calculon's values and milpplan's values."""


SWITCHES: Final = (
    Switch("tensor_par_overlap", Layout, "tp_overlap", {"none": "none", "ring": "ring", "pipe": "pipelined"}),
    Switch("tensor_par_comm_type", Layout, "pp_scatter_gather", {"ar": False, "rs_ag": False, "p2p_rs_ag": True}),
    Switch("tensor_par_comm_type", Layout, "sequence_parallel", {"ar": False, "p2p_rs_ag": False, "rs_ag": True}),
    Switch("weight_offload", Layout, "offload_weights", {False: False, True: True}),
    Switch("activations_offload", Layout, "offload_activations", {False: False, True: True}),
    Switch("optimizer_offload", Layout, "offload_optimizer", {False: False, True: True}),
    Switch("training", Job, "kind", {True: "training", False: "inference"}),
)


def calculon_run(files: CalculonFiles) -> tuple[Problem, Plan]:
    """Translate an execution to a plan, on the system with the networks that the execution uses.

    Raises:
        InvalidInputError: an assignment of networks or a split of blocks that cannot be.
    """
    files = used_networks(files)
    wholes, order = placed(files)
    layout = _layout(files, order)
    problem = _problem(files, wholes, Space())
    stages = _stages(files, layout)
    return problem, validated(Plan, {"layout": layout, "virtual_stages": stages}, files.names[1])


def calculon_problem(files: CalculonFiles, space: Space) -> Problem:
    """Translate model, system, processors, batch and number format; the layout is free, networks keep their sizes.

    Raises:
        InvalidInputError: more networks than three, or some that are not listed from the inside outwards.
    """
    return _problem(files, free_wholes(files), space)


def notes(files: CalculonFiles, free: bool = False) -> tuple[str, ...]:
    """List the values of the files that milpplan prices in another way, in sentences.

    ``free``: the layout is not that of the execution, and the notes leave its decisions out.
    """
    files = files if free else used_networks(files)
    execution, outer = files.execution, files.system.networks[1:]
    system = files.system
    said = {
        "The model gets an embedding and a head of 51,200 tokens, which Calculon's estimates leave out.": True,
        "Operators without a matrix product are priced by their bytes; Calculon adds the time of their FLOPs.": (
            system.processing_mode == "no_overlap"
        ),
        "Operators without a matrix product are priced by their bytes; Calculon takes their FLOPs where longer.": (
            system.processing_mode == "roofline"
        ),
        "optimizer_sharding is ZeRO stage 1; Calculon also shards gradients, and reduces them once a step.": (
            execution.optimizer_sharding and execution.training and not free
        ),
        "Forwards alone run without interleaving here: whole stages fill and drain the pipeline.": (
            not execution.training and execution.pipeline_interleaving > 1 and not free
        ),
        "A forward without a backward keeps no activations and has no optimizer: nothing to offload or shard.": (
            not (execution.training or free) and (execution.activations_offload or execution.optimizer_sharding)
        ),
        "float8 here means fp8 products; Calculon halves all tensors.": execution.datatype == "float8",
        "Between domains a ring all-reduce moves 2 (n - 1) / n of the bytes; the system file says less.": any(
            network.ops.all_reduce[0] < 2 for network in outer
        ),
    }
    rates = {f"1/{slowest_scalar(network):g}" for network in outer if slowest_scalar(network) > 1}
    for rate in sorted(rates):
        said[f"An outer network's operations all get the rate of its slowest, {rate}."] = True
    return tuple(text for text, applies in said.items() if applies)


def model_of(files: CalculonFiles) -> ModelSpec:
    """Translate the blocks to layers, with Calculon's numbers of tokens and positions."""
    model, execution = files.model, files.execution
    attention = {
        "type": "gqa",
        "num_attention_heads": model.attn_heads,
        "num_key_value_heads": model.attn_heads if execution.attention_type == "multihead" else 1,
        "head_dim": model.attn_size,
        "qkv_bias": True,
        "output_bias": True,
    }
    mlp = {"type": "dense", "intermediate_size": model.feedforward, "gated": False, "bias": True}
    data = {
        "name": Path(files.names[0]).stem[:200] or "calculon",
        "hidden_size": model.hidden,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": model.seq_size,
        "layers": [{"count": model.num_blocks, "attention": attention, "mlp": mlp}],
        "tie_word_embeddings": True,
        "learned_positions": True,
        "norm": "layernorm",
        "dropout": True,
        "default_sequence_length": model.seq_size,
    }
    return validated(ModelSpec, data, files.names[0])


def switch_values(files: CalculonFiles, record: type[Record]) -> dict[str, object]:
    """Translate the execution's switches to fields of a layout or a job."""
    return {
        switch.ours: switch.values[_effective(files.execution, switch)]
        for switch in SWITCHES
        if switch.record is record
    }


def _chunks(execution: CalculonExecution) -> int:
    """Count the virtual stages of a processor; inference fills and drains the pipeline with whole stages."""
    return execution.pipeline_interleaving if execution.training else 1


def _effective(execution: CalculonExecution, switch: Switch) -> object:
    """Return the value of a switch, or its default where it has no effect.

    A switch has no effect without tensor ranks, stage borders, or tensors that a forward keeps for a backward.
    """
    value = getattr(execution, switch.theirs)
    if switch.theirs == "activations_offload":
        return value and execution.training
    if switch.theirs == "tensor_par_comm_type":
        idle = execution.tensor_par == 1 or (value == "p2p_rs_ag" and execution.pipeline_par == 1)
        return "ar" if idle else value
    return value


def _problem(files: CalculonFiles, wholes: tuple[int, ...], space: Space) -> Problem:
    execution = files.execution
    job = {
        "num_gpus": execution.num_procs,
        "global_batch_size": execution.batch_size,
        "sequence_length": files.model.seq_size,
        "precision": "fp8" if execution.datatype == "float8" else "bf16",
        "attention_kernel": "unfused",
        "grad_dtype": "bf16",
        **switch_values(files, Job),
    }
    name = f"calculon {Path(files.names[2]).stem}"[:200]
    hardware = hardware_of(files.system, execution.datatype, wholes, files.names[2], name)
    # Layouts say themselves whether inputs are gathered again (``gather_again``), the framework need not.
    software = hardware.software.model_copy(update={"activate_again": execution.fused_activation})
    parts = {
        "model": model_of(files),
        "hardware": hardware.model_copy(update={"software": software}),
        "job": validated(Job, job, files.names[1]),
        "space": space,
    }
    return _checked(Problem, files.names[1], **parts)


def _keeps_gathered(execution: CalculonExecution) -> bool:
    """Check that the inputs of products stay gathered from forward to backward."""
    sequence_parallel = execution.tensor_par_comm_type == "rs_ag" and execution.tensor_par > 1
    return execution.training and sequence_parallel and not execution.seq_par_ag_redo


def _layout(files: CalculonFiles, order: str | None) -> dict[str, object]:
    """Translate the layout to plain data."""
    execution, chunks = files.execution, _chunks(files.execution)
    pipelined = "interleaved" if chunks > 1 else "1f1b"
    values: dict[str, object] = {
        "tp": execution.tensor_par,
        "pp": execution.pipeline_par,
        "dp": execution.data_par,
        "vpp": chunks,
        "micro_batch_size": execution.microbatch_size,
        "global_batch_size": execution.batch_size,
        "zero_stage": 1 if execution.optimizer_sharding and execution.training else 0,
        "schedule": pipelined if execution.training else "gpipe",
        "overlap_grad_reduce": execution.data_par_overlap,
        "overlap_param_gather": execution.data_par_overlap and execution.optimizer_sharding,
        "gather_again": not _keeps_gathered(execution),
        **switch_values(files, Layout),
    }
    return values if order is None else values | {"rank_order": order}


def _stages(files: CalculonFiles, layout: dict[str, object]) -> list[dict[str, object]]:
    """Split the blocks evenly into virtual stages; without interleaving the first stages may hold a block more."""
    blocks, execution = files.model.num_blocks, files.execution
    chunks = _chunks(execution)
    number = execution.pipeline_par * chunks
    if number > blocks or (blocks % number and chunks > 1):
        raise InvalidInputError(
            f"{files.names[1]}: pipeline_par={execution.pipeline_par} with "
            f"pipeline_interleaving={chunks} makes {number} virtual stages of "
            f"{blocks} blocks.",
            "Expected at least a block in each, and with interleaving the same number.",
            "Change pipeline_par or pipeline_interleaving.",
        )
    counts = [blocks // number + (index < blocks % number) for index in range(number)]
    ends = [sum(counts[: index + 1]) for index in range(number)]
    kind = {"full": "full", "attn_only": "selective"}.get(execution.activation_recompute)
    return [
        {"layers": [end - count, end], "recompute": {kind: count} if kind else {}}
        for count, end in zip(counts, ends, strict=True)
    ]


def _checked(kind: type[RecordType], source: str, **values: object) -> RecordType:
    """Build a record; errors name ``source``."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise invalid_fields(kind, error, source) from error


__all__ = [
    "SWITCHES",
    "CalculonFiles",
    "Switch",
    "calculon_problem",
    "calculon_run",
    "model_of",
    "notes",
    "read_calculon",
    "switch_values",
]
