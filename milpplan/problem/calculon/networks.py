"""Mapping of Calculon's networks to the network tiers of milpplan: a domain, between domains, between pods.

In an execution every parallelism names its network. The parallelisms on the first network fill a domain, whose
size is the product of their degrees. If three networks are in use, the parallelisms on the second network form a
pod of domains, and all others leave the pod. So each parallelism uses the network that the execution names.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Final

from milpplan.errors import InvalidInputError
from milpplan.problem.calculon.read_files import CalculonFiles

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
