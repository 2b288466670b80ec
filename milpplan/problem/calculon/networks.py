"""Which of Calculon's networks joins which processors: a domain, and what joins domains and pods of domains.

In an execution every parallelism names its network. Those on the first network fill a domain of as many ranks as
their degrees multiply to; where three are in use those on the second one make a pod of such domains, and all
others leave the pod: so each uses the network that the execution says.
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
    """The files with those networks alone that the execution uses, and the execution's numbers of them.

    An execution that uses one keeps a second beside it, so that nothing else changes: the next one, or before the
    last one the first.

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
    """Ranks that every network but the last joins, from the inside, and the order of ranks where it is not
    milpplan's own; of files with the networks in use (``used_networks``)."""
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
    return tuple(accumulate((sizes.get(one, 1) for one in range(number - 1)), mul)), order


def free_wholes(files: CalculonFiles) -> tuple[int, ...]:
    """Processors that every network but the last joins where the layout is free, from the inside: the product of
    the sizes, as many as Calculon lets parallelisms share them.

    Raises:
        InvalidInputError: more than three networks, or some that are not listed from the inside outwards.
    """
    networks, procs = files.system.networks, files.execution.num_procs
    if len(networks) > TIERS:
        raise InvalidInputError(
            f"{files.names[2]}: networks has {len(networks)} entries, and the layout is free.",
            "Expected one to three to choose among: a domain, what joins domains, and what joins pods of those.",
            "Leave those in the file that the search may use, or simulate an execution, which names its own.",
        )
    sizes = [one.size for one in networks]
    reach = list(accumulate(sizes, mul))
    if sizes != sorted(sizes) or procs > reach[-1]:
        raise InvalidInputError(
            f"{files.names[2]}: networks has the sizes {sizes}.",
            f"Expected the smaller network first, and sizes for num_procs={procs:,} processors together.",
            "Correct the sizes, or num_procs in the execution file.",
        )
    return tuple(reach[:-1] or reach)


def _checked_networks(files: CalculonFiles) -> dict[str, int]:
    """Network of every parallelism that there is. Where the networks' sizes or fillings forbid the execution in
    Calculon, it is refused in the same way (calculon/llm/llm.py, ``_check_network_assignments``)."""
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
    sizes = [network.size for network in files.system.networks]
    return InvalidInputError(
        f"{files.names[1]}: network {index} cannot be used so: {reason}.",
        f"Expected an assignment that fits the networks of {files.names[2]}, of sizes {sizes}.",
        "Correct tensor_par_net, pipeline_par_net or data_par_net.",
    )
