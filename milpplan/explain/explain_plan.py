"""Explanation of a plan: all questions, in order of importance, within a time limit.

**What-ifs**: the value of changed hardware or batch, from the problem with a single change, solved and proved
again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.explain.break_even import break_evens
from milpplan.explain.judge import candidates
from milpplan.explain.judge.gap import single_change
from milpplan.explain.optima import Budget, Yardstick, asked_for, saved_share
from milpplan.explain.records import BreakEvens, Explanation, Interval, Optimum, SingleChange, WishAnswer, Worth
from milpplan.explain.why_not import Wish, answer, checked, limits, neighbours, wish_words
from milpplan.optimize import DEFAULT_GAP, Effort, explain, with_job
from milpplan.optimize.context import Deadline, undisturbed
from milpplan.optimize.space.enumerate_layouts import broken_rules
from milpplan.problem import BusTable, HardwareSpec, Plan, Problem
from milpplan.problem.hardware import ScaleUp
from milpplan.simulation import StepReport, simulate
from milpplan.units import GIB, seconds_text

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
    formats = {name: getattr(gpu, name) for name in ("bf16", "fp8", "nvfp4") if getattr(gpu, name) is not None}
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
    Change("twice_the_batch", "twice the batch (half of its step)", _twice_the_batch),
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


TIME_LIMIT_S = 60.0
BASE_SHARE = 0.4
"""Maximum share of the time for the proof that all answers rely on."""
KNOWN_SHARE = 0.05
"""Share of the time for runners-up, where that proof already exists."""
BREAK_EVEN_SHARE = 0.2
"""Maximum share of the time left after that proof for the break-even values of doubts."""
WISH, WORTH, NEIGHBOUR, CHANGE = 4.0, 3.0, 1.0, 1.0
"""Weights of the questions in the distribution of the time."""


@dataclass(slots=True)
class _Talk:
    """Questions and answers so far; the state at the end of the time or at Ctrl-C is the result."""

    yardstick: Yardstick
    problem: Problem
    plan: Plan
    value: float
    best: Optimum
    budget: Budget
    callback: Callable[[str], None] | None
    changes: list[SingleChange] = field(default_factory=list)
    worth: list[Worth] = field(default_factory=list)
    wishes: list[WishAnswer] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    interrupted: bool = False

    def ask(self, words: str, weight: float, question: Callable[[float | None], Optimum | None]) -> None:
        """Ask a question, unless the time is over or the user has interrupted."""
        if self.interrupted or self.budget.is_spent:
            self.open.append(words)
            return
        if self.callback is not None:
            self.callback(words)
        limit_s = self.budget.share_s(weight)
        try:
            optimum = question(limit_s)
        except KeyboardInterrupt:
            self.interrupted = True
            self.open.append(words)
            return
        self.interrupted = optimum is not None and optimum.interrupted


def explain_plan(
    problem: Problem,
    plan: Plan,
    wishes: Sequence[Wish] = (),
    *,
    time_limit_s: float | None = TIME_LIMIT_S,
    gap: float = DEFAULT_GAP,
    proved_bound_s: float | None = None,
    callback: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain a plan: its distance from the proved best, its limits, the value of changes, and the price of
    alternatives.

    Args:
        problem: the problem of the plan.
        plan: a legal plan for it, good or bad.
        wishes: fields and values such as ``{"tp": 8}``; without any the plan's neighbours are examined.
        time_limit_s: of all questions together; None: every answer is solved to ``gap``.
        gap: relative tolerance of every solve.
        proved_bound_s: a lower bound of the problem's step time, where an earlier solve has proved one.
        callback: called with the words of a question before it is solved.

    Returns:
        Answers as proved intervals, which are wider with less time; names the questions that were not reached.

    Raises:
        InfeasibleError: the problem provably has no plan.
        IllegalPlanError: the plan is not legal for the problem.
        InvalidInputError: a wish, a gap or a limit is invalid.
    """
    started = time.monotonic()
    checked(problem, wishes)
    if time_limit_s is not None and not time_limit_s > 0:
        raise InvalidInputError(f"time_limit_s={time_limit_s}.", "Expected a positive number of seconds.", "")
    problem = asked_for(problem, plan)
    report = simulate(problem, plan)
    yardstick = Yardstick.of(problem, plan, gap)
    value = yardstick.value(problem, plan, report.step_time_ns)
    if callback is not None:
        callback("the proved best")
    until = None if time_limit_s is None else started + time_limit_s
    best = _best(yardstick, problem, plan, value, time_limit_s, proved_bound_s)
    if best.infeasible:
        raise explain(problem, effort=Effort(deadline=until))
    talk = _Talk(yardstick, problem, plan, value, best, Budget(until), callback, interrupted=best.interrupted)
    break_even = None
    try:
        break_even = _break_even(talk, report)
        _ask_all(talk, wishes)
    except KeyboardInterrupt:
        # Interrupted between two questions.
        talk.interrupted = True
    with undisturbed():
        return _told(talk, report, started, break_even)


def _best(
    yardstick: Yardstick, problem: Problem, plan: Plan, value: float, limit_s: float | None, known_s: float | None
) -> Optimum:
    """Return the proved best, with an earlier bound if there is one, which leaves the time to the questions."""
    is_close = known_s is not None and yardstick.unit == "s" and value <= known_s * (1.0 + 2.0 * yardstick.gap)
    share = KNOWN_SHARE if is_close else BASE_SHARE
    best = yardstick.optimum(problem, None if limit_s is None else share * limit_s, plan)
    if known_s is None or yardstick.unit != "s" or best.infeasible:
        return best
    low, high = max(best.bounds.low, known_s), best.bounds.high
    if low > high * (1.0 + 1e-9):
        raise InvalidInputError(
            f"No plan is said to take less than {seconds_text(known_s)}, and one takes {seconds_text(high)}.",
            "Expected a bound that was proved for this problem.",
            "Leave the bound out, or solve again.",
        )
    return replace(best, bounds=Interval(min(low, high), high))


def _break_even(talk: _Talk, report: StepReport) -> BreakEvens | None:
    """Compare the plan with others from doubt to doubt, in a share of the time."""
    if talk.interrupted or talk.budget.is_spent or not report.fits:
        return None
    if talk.callback is not None:
        talk.callback("break-even values")
    left_s = Deadline(talk.budget.until).left_s()
    deadline = Deadline.after(None if left_s is None else BREAK_EVEN_SHARE * left_s)
    kept = [] if talk.best.plan is None else [talk.best.plan]
    return break_evens(talk.problem, talk.plan, kept, talk.yardstick.gap, deadline)


def _told(talk: _Talk, report: StepReport, started: float, break_even: BreakEvens | None) -> Explanation:
    """Make the record of the answers."""
    best, high = talk.best, talk.best.bounds.high
    in_seconds = talk.yardstick.unit == "s"
    return Explanation(
        problem=talk.problem,
        plan=talk.plan,
        report=report,
        unit=talk.yardstick.unit,
        value=talk.value,
        best=best,
        above_best=saved_share(Interval(talk.value, talk.value), best.bounds),
        is_outside=report.fits and talk.value < high,
        limits=limits(talk.problem, talk.plan, report, high if in_seconds else math.inf),
        changes=tuple(sorted(talk.changes, key=lambda change: change.best.bounds.high)),
        worth=tuple(talk.worth),
        wishes=tuple(talk.wishes),
        break_even=break_even,
        unanswered=tuple(talk.open),
        interrupted=talk.interrupted,
        wall_time_s=time.monotonic() - started,
    )


def _ask_all(talk: _Talk, wishes: Sequence[Wish]) -> None:
    problem, plan, best = talk.problem, talk.plan, talk.best
    fields = _loose_fields(talk)
    changes = tuple(questions(problem))
    asked = bool(wishes)
    base = best.plan or plan
    others = tuple(wishes) if asked else tuple(neighbours(problem, base))
    talk.budget.weight_left = (
        CHANGE * len(fields) + WORTH * len(changes) + (WISH if asked else NEIGHBOUR) * len(others)
    )
    for names in fields:
        _ask_change(talk, names)
    if asked:
        _ask_wishes(talk, others, asked)
    for change, changed in changes:
        talk.ask(change.words, WORTH, _worth_question(talk, change, changed))
    if not asked:
        _ask_wishes(talk, others, asked)


def _loose_fields(talk: _Talk) -> tuple[tuple[str, ...], ...]:
    """Choose the sets of fields to free, where a better plan than the explained one is known."""
    best = talk.best
    if best.plan is None or talk.plan == best.plan:
        return ()
    return tuple(candidates(talk.plan, best.plan))


def _ask_change(talk: _Talk, names: tuple[str, ...]) -> None:
    def question(limit_s: float | None) -> Optimum | None:
        change = single_change(talk.yardstick, talk.problem, talk.plan, talk.value, names, limit_s)
        if change is None:
            return None
        talk.changes.append(change)
        return change.best

    talk.ask(f"a change of {names[0] if names else 'stages and recomputation'}", CHANGE, question)


def _worth_question(talk: _Talk, change: Change, changed: Problem) -> Callable[[float | None], Optimum | None]:
    def question(limit_s: float | None) -> Optimum | None:
        unlimited = next((answered for answered in talk.worth if answered.name == MEMORY[0]), None)
        value_of_change = worth(talk.yardstick, change, changed, talk.plan, talk.best, unlimited, limit_s)
        talk.worth.append(value_of_change)
        return value_of_change.best

    return question


def _ask_wishes(talk: _Talk, wishes: Sequence[Wish], asked: bool) -> None:
    for wish in wishes:

        def question(limit_s: float | None, wish: Wish = wish) -> Optimum | None:
            answered = answer(talk.yardstick, talk.problem, wish, talk.best, limit_s, asked)
            talk.wishes.append(answered)
            return answered.best

        talk.ask(wish_words(wish), WISH if asked else NEIGHBOUR, question)
