"""Value of changed hardware or batch: the problem with a single change, solved and proved again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from milpplan.errors import IllegalPlanError
from milpplan.explain.optima import Yardstick, saved_share
from milpplan.explain.records import Interval, Optimum, Worth
from milpplan.optimize.infeasibility import with_job
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem.hardware import BusTable, HardwareSpec, ScaleUp
from milpplan.problem.plan import Plan
from milpplan.problem.problem import Problem
from milpplan.units import GIB

MORE: Final = 1.1
"""Factor of an increased rate."""
UNLIMITED_BYTES: Final = 2**20 * GIB
"""Memory that no plan of a model of any size fills."""
MEMORY: Final = ("unlimited_memory", "more_memory")
"""Changes that only add plans and change no duration: the second has no value where the first has none."""
TABLES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Change:
    """Question about a change: its name, its words, and a function from the problem to the changed problem, or to
    None where the change does not apply."""

    name: str
    words: str
    problem: Callable[[Problem], Problem | None]


def _on_hardware(change: Callable[[HardwareSpec], HardwareSpec]) -> Callable[[Problem], Problem]:
    def changed(problem: Problem) -> Problem:
        others = tuple(
            group.model_copy(update={"hardware": change(group.hardware)}) for group in problem.other_hardware
        )
        return problem.model_copy(update={"hardware": change(problem.hardware), "other_hardware": others})

    return changed


def _with_accelerator(hardware: HardwareSpec, **fields: object) -> HardwareSpec:
    return hardware.model_copy(update={"accelerator": hardware.accelerator.model_copy(update=fields)})


def _more_memory(hardware: HardwareSpec) -> HardwareSpec:
    return _with_accelerator(hardware, memory_bytes=hardware.accelerator.memory_bytes + GIB)


def _unlimited_memory(hardware: HardwareSpec) -> HardwareSpec:
    return _with_accelerator(hardware, memory_bytes=UNLIMITED_BYTES)


def _faster_memory(hardware: HardwareSpec) -> HardwareSpec:
    rate = hardware.accelerator.memory_bandwidth_bytes_per_s
    return _with_accelerator(hardware, memory_bandwidth_bytes_per_s=rate * MORE)


def _faster_products(hardware: HardwareSpec) -> HardwareSpec:
    """Speed up products of every number format; attention follows, because its rate is a share of the same
    peak."""
    gpu = hardware.accelerator
    formats = {name: getattr(gpu, name) for name in ("bf16", "fp8") if getattr(gpu, name) is not None}
    faster = {
        name: engine.model_copy(update={"peak_flops_per_s": engine.peak_flops_per_s * MORE})
        for name, engine in formats.items()
    }
    return _with_accelerator(hardware, **faster)


def _faster_domain(hardware: HardwareSpec) -> HardwareSpec:
    up = hardware.scale_up
    tables = {name: _faster_table(getattr(up, name)) for name in TABLES}
    scale_up: ScaleUp = up.model_copy(update={"bandwidth_bytes_per_s": up.bandwidth_bytes_per_s * MORE, **tables})
    return hardware.model_copy(update={"scale_up": scale_up})


def _faster_table(table: BusTable) -> BusTable:
    rows = tuple(tuple(rate * MORE for rate in row) for row in table.bus_bandwidth_bytes_per_s)
    return table.model_copy(update={"bus_bandwidth_bytes_per_s": rows})


def _faster_network(hardware: HardwareSpec) -> HardwareSpec:
    """Speed up the network between domains and, if there are any, between pods."""
    tiers = {"scale_out": hardware.scale_out, "pods": hardware.pods}
    faster = {
        name: tier.model_copy(update={"bandwidth_bytes_per_s": tier.bandwidth_bytes_per_s * MORE})
        for name, tier in tiers.items()
        if tier is not None
    }
    return hardware.model_copy(update=faster)


def _without_latency(hardware: HardwareSpec) -> HardwareSpec:
    """Remove the latency of links and kernels. Measured tables of a domain keep theirs, which they do not
    separate."""
    none = {"base_latency_s": 0.0, "scale_up_hop_latency_s": 0.0, "scale_out_hop_latency_s": 0.0}
    out = hardware.scale_out
    variants = tuple(variant.model_copy(update=none) for variant in out.variants)
    network = {"p2p_latency_s": 0.0, "collective_base_latency_s": 0.0, "hop_latency_s": 0.0, "variants": variants}
    scale_up = hardware.scale_up.model_copy(update={"p2p_latency_s": 0.0, "hop_latency_s": 0.0})
    far = {name: 0.0 for name in network if name != "variants"}
    pods = None if hardware.pods is None else hardware.pods.model_copy(update=far)
    links = {"scale_up": scale_up, "scale_out": out.model_copy(update=network), "pods": pods}
    return _with_accelerator(hardware, kernel_latency_s=0.0).model_copy(update=links)


def _twice_the_batch(problem: Problem) -> Problem | None:
    batch = problem.job.global_batch_size
    return with_job(problem, global_batch_size=2 * batch) if isinstance(batch, int) else None


CHANGES: Final = (
    Change("unlimited_memory", "memory without limit", _on_hardware(_unlimited_memory)),
    Change("more_memory", "1 GiB more memory", _on_hardware(_more_memory)),
    Change("memory_bandwidth", "10 % more memory bandwidth", _on_hardware(_faster_memory)),
    Change("matrix_flops", "10 % more matrix FLOP/s", _on_hardware(_faster_products)),
    Change("domain_bandwidth", "10 % more domain bandwidth", _on_hardware(_faster_domain)),
    Change("network_bandwidth", "10 % more network bandwidth", _on_hardware(_faster_network)),
    Change("no_latency", "no latency", _on_hardware(_without_latency)),
    Change("twice_the_batch", "twice the batch", _twice_the_batch),
)


def questions(problem: Problem) -> Iterator[tuple[Change, Problem]]:
    """Iterate over the changes that apply to a problem, with the changed problems."""
    for change in CHANGES:
        changed = change.problem(problem)
        if changed is not None:
            yield change, changed


def worth(
    yardstick: Yardstick,
    change: Change,
    changed: Problem,
    plan: Plan,
    best: Optimum,
    unlimited: Worth | None,
    limit_s: float | None,
) -> Worth:
    """Determine the value of a change.

    Args:
        yardstick: the unit and the tolerance.
        change: the question.
        changed: the problem after the change.
        plan: the explained plan.
        best: the proved best before the change.
        unlimited: the answer for unlimited memory, if it is already known.
        limit_s: seconds to spend.
    """
    before = best.bounds
    same = _as_it_is(yardstick, changed, plan)
    more_room = change.name == MEMORY[1] and unlimited is not None
    if more_room and unlimited is not None and unlimited.gain.high <= yardstick.gap:
        return Worth(change.name, change.words, same, best, Interval(0.0, unlimited.gain.high), MEMORY[0])
    after = yardstick.optimum(changed, limit_s, _start(changed, best.plan or plan))
    low, high = after.bounds.low, after.bounds.high
    if change.name in MEMORY:
        # More memory removes no plan and changes no duration, so the optimum cannot grow.
        high = min(high, before.high)
    if more_room and unlimited is not None:
        low = max(low, unlimited.best.bounds.low)
    gain = saved_share(before, Interval(min(low, high), high))
    if change.name in MEMORY:
        gain = Interval(max(0.0, gain.low), max(0.0, gain.high))
    return Worth(change.name, change.words, same, after, gain)


def _start(changed: Problem, plan: Plan) -> Plan:
    """Return the plan with the batch of the changed problem."""
    batch = changed.job.global_batch_size
    if not isinstance(batch, int) or batch == plan.layout.global_batch_size:
        return plan
    layout = plan.layout.model_copy(update={"global_batch_size": batch})
    return plan.model_copy(update={"layout": layout})


def _as_it_is(yardstick: Yardstick, changed: Problem, plan: Plan) -> float | None:
    """Return the objective of the unchanged plan after a change; None where it is illegal or does not fit
    there."""
    same = _start(changed, plan)
    if broken_rules(changed, same.layout):
        return None
    try:
        return yardstick.simulated(changed, same)
    except IllegalPlanError:
        return None
