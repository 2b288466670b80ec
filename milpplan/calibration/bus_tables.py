"""Bus bandwidth tables inside a domain and network efficiency between domains, from measured collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from milpplan.calibration.fitting.robust import MAD_TO_SIGMA
from milpplan.calibration.nccl import BusLog
from milpplan.errors import InvalidInputError
from milpplan.problem.apply_overlay import COLLECTIVES
from milpplan.problem.hardware import BusTable, HardwareSpec
from milpplan.problem.overlay import LEAST_FACTOR, MOST_FACTOR, Constants, Factor, Tables
from milpplan.simulation.network.collectives import Operation, bus_bandwidth_bytes_per_s
from milpplan.units import percent_text, size_text

RINGS: Final = ("all_reduce", "all_gather", "reduce_scatter")
MAX_SIGMA: Final = 0.5
"""Maximum one sigma of tables; repetitions with a larger scatter do not determine a value."""
LARGEST: Final = 3
"""Number of largest messages whose rates give the efficiency of the network."""


@dataclass(frozen=True, slots=True)
class BusFit:
    """Fit to collectives: tables, constants, notes, and mean absolute errors of the previous description's
    bandwidth over ``num_rows`` rows inside a domain (None without any)."""

    tables: Tables
    constants: Constants
    told: tuple[str, ...]
    num_rows: int
    error_before: float | None


def fit_bus(logs: list[BusLog], hardware: HardwareSpec) -> BusFit:
    """Fit tables and network efficiency to measured collectives; values without measurements are kept.

    Raises:
        InvalidInputError: nothing in the logs can be used on this hardware.
    """
    domain = hardware.scale_up.num_gpus
    inside = [log for log in logs if log.num_ranks <= domain]
    outside = [log for log in logs if log.num_ranks > domain]
    notes: list[str] = []
    tables: dict[str, BusTable] = {}
    errors: list[float] = []
    for operation in dict.fromkeys(log.operation for log in inside):
        own = [log for log in inside if log.operation == operation]
        for log in own:
            errors += _errors(log, hardware)
        tables[operation] = _table(own, hardware, operation, notes)
    factors = _network_factors(outside, hardware, notes)
    constants = _constants(inside, factors, notes)
    if not tables and not factors:
        raise InvalidInputError(
            f"None of the {len(logs)} tables says anything about {hardware.name} ({'; '.join(notes)}).",
            f"Expected collectives of 2 to {domain} ranks, or rings of several whole domains of {domain}.",
            "Run nccl-tests inside one node, or on whole nodes.",
        )
    missing = [name for name in COLLECTIVES if name not in tables]
    if tables and missing:
        notes.append(f"not measured, as in the description: {', '.join(missing)}")
    return BusFit(
        Tables(**tables),
        constants,
        tuple(notes),
        sum(len(log.rates) for log in logs),
        float(np.mean(errors)) if errors else None,
    )


def _constants(inside: list[BusLog], factors: list[float], notes: list[str]) -> Constants:
    """Fit the network's efficiency, and the one sigma of the tables: scatter of repetitions, as if common to
    all."""
    constants: dict[str, Factor] = {}
    if factors:
        sigma = float(np.std(factors)) if len(factors) > 1 else 0.1 * factors[0]
        constants["scale_out_efficiency"] = Factor(value=float(np.median(factors)), one_sigma=sigma)
        notes.append(f"network between domains: {len(factors)} rates of the largest messages")
    spread = [size for log in inside for size in log.spread]
    if spread:
        sigma = min(MAD_TO_SIGMA * float(np.median(spread)), MAX_SIGMA)
        constants["scale_up_efficiency"] = Factor(value=1.0, one_sigma=sigma)
        notes.append(f"one sigma of the tables: {percent_text(sigma)} (repetitions, in place and out of place)")
    return Constants(**constants)


def _described(hardware: HardwareSpec, operation: str, sizes: list[int], ranks: float) -> list[float]:
    """Return bus bandwidths of the description, bytes/s."""
    name: Operation = operation  # type: ignore[assignment]
    rates = bus_bandwidth_bytes_per_s(hardware, name, np.array(sizes, dtype=np.float64), ranks)
    return [float(rate) for rate in rates]


def _errors(log: BusLog, hardware: HardwareSpec) -> list[float]:
    described = _described(hardware, log.operation, list(log.rates), log.num_ranks)
    return [abs(a / b - 1.0) for a, b in zip(described, log.rates.values(), strict=True)]


def _table(logs: list[BusLog], hardware: HardwareSpec, operation: str, notes: list[str]) -> BusTable:
    """Make a table of measured rows on the union of their sizes. Numbers of ranks in the description that were not
    measured keep their rates, interpolated at these sizes."""
    measured = {log.num_ranks: log for log in logs}
    before: BusTable = getattr(hardware.scale_up, operation)
    sizes = sorted({size for log in logs for size in log.rates if size > 0})
    rows: dict[float, list[float]] = {}
    for ranks in sorted({*map(float, measured), *before.num_gpus}):
        log = measured.get(int(ranks)) if ranks == int(ranks) else None
        if log is None:
            rows[ranks] = _described(hardware, operation, sizes, ranks)
            continue
        known = np.log(list(log.rates)), np.log(list(log.rates.values()))
        rows[ranks] = [float(rate) for rate in np.exp(np.interp(np.log(sizes), *known))]
    kept = [f"{ranks:g}" for ranks in rows if ranks not in measured]
    if kept:
        notes.append(f"{operation}: {', '.join(kept)} ranks not measured, as in the description")
    if sizes[-1] < before.message_bytes[-1]:
        notes.append(f"{operation}: messages beyond {size_text(sizes[-1])} have the rate of the largest one")
    return BusTable(
        num_gpus=tuple(rows),
        message_bytes=tuple(map(float, sizes)),
        bus_bandwidth_bytes_per_s=tuple(map(tuple, rows.values())),
    )


def _network_factors(logs: list[BusLog], hardware: HardwareSpec, notes: list[str]) -> list[float]:
    """Return measured over described bus bandwidth of large messages in rings over whole domains."""
    domain, out = hardware.scale_up.num_gpus, hardware.scale_out
    described = domain * out.bandwidth_bytes_per_s * out.efficiency
    factors: list[float] = []
    for log in logs:
        if log.operation not in RINGS or log.num_ranks % domain:
            notes.append(f"{log.operation} of {log.num_ranks} ranks not used: no ring over whole domains")
            continue
        largest = list(log.rates.values())[-LARGEST:]
        factors += [min(max(rate / described, LEAST_FACTOR), MOST_FACTOR) for rate in largest]
    return factors
