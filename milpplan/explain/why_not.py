"""Price of alternatives: the proved best with a wish, or the reason that forbids it.

**Limits** of a plan: memory by stage, the pipeline's bubble, exposed communication, and rules of divisibility.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from pydantic import ValidationError

from milpplan.errors import InvalidInputError
from milpplan.explain.optima import Yardstick, ratio
from milpplan.explain.records import Exposed, Interval, Optimum, Outcome, PlanLimits, RuleEffect, WishAnswer
from milpplan.optimize import fixed, refusing_rules, with_space
from milpplan.optimize.bounds.cluster_bounds import cluster_bounds, cluster_compute_bounds
from milpplan.optimize.infeasibility import floor
from milpplan.optimize.space.enumerate_layouts import DEGREE_RULES, EXPERT_RULES, SEQUENCE_RULES, layout_space
from milpplan.optimize.space.layout_space import Rule
from milpplan.optimize.space.rules import SPLIT_RULES, stage_rules
from milpplan.problem import Layout, Plan, Problem, Space
from milpplan.problem.reading import plain_reason
from milpplan.simulation import FloatArray, LayoutColumns, StepReport, cluster_costs, usable_memory_bytes
from milpplan.simulation.network import group_place
from milpplan.units import NS_PER_S, gib_text

DIVISIBILITY: Final[dict[str, Rule]] = {
    name: rule
    for name, rule in (DEGREE_RULES | EXPERT_RULES | SEQUENCE_RULES | SPLIT_RULES).items()
    if name
    in (
        "heads_divisible_by_tp",
        "recurrent_heads_divisible_by_tp_and_cp",
        "kv_heads_multiple_or_divisor_of_tp",
        "intermediate_size_divisible_by_tp",
        "sequence_divisible_by_twice_cp",
        "sequence_divisible_by_tp",
        "expert_width_divisible_by_etp",
        "interleaved_micro_batches_divisible_by_pp",
    )
}
"""Rules that refuse a layout only because of a remainder: without the rule the layout could be priced."""
SCHEDULE_BOUND_ONLY: Final = "interleaved_micro_batches_divisible_by_pp"
"""Rule without which there is no schedule, so that only a rank's work bounds the step."""
MAX_BOUNDED: Final = 40_000
"""Maximum number of layouts bounded with memory and communication; other layouts are bounded by compute alone."""


def _heads(problem: Problem) -> str:
    return "/".join(sorted({str(heads) for kind in problem.model.kinds for heads in kind.head_counts}))


def _kv_heads(problem: Problem) -> str:
    attentions = [kind.attention for kind in problem.model.kinds]
    return "/".join(
        sorted({str(attention.num_key_value_heads) for attention in attentions if attention.type == "gqa"})
    )


def _experts(problem: Problem, name: str) -> str:
    mlps = [kind.mlp for kind in problem.model.kinds]
    return "/".join(sorted({str(getattr(mlp, name)) for mlp in mlps if mlp.type == "moe"}))


WORDS: Final[dict[str, Callable[[Problem], str]]] = {
    "heads_divisible_by_tp": lambda p: (
        "tp must be 1: every rank has all of the attention to compressed keys"
        if any(kind.attention.type == "compressed" for kind in p.model.kinds)
        else f"tp must divide the {_heads(p)} attention heads"
    ),
    "recurrent_heads_divisible_by_tp_and_cp": lambda p: (
        "tp x cp must divide the heads of linear recurrences; gates of low rank need cp=1"
    ),
    "kv_heads_multiple_or_divisor_of_tp": lambda p: (
        f"tp must divide the {_kv_heads(p)} key/value heads, or be a multiple of them"
    ),
    "intermediate_size_divisible_by_tp": lambda p: "tp must divide the width of the MLP",
    "sequence_divisible_by_twice_cp": lambda p: (
        f"2 cp must divide the {p.job.sequence_length:,} tokens"
        + f", at least {p.model.boundary_tokens} a rank" * (p.model.boundary_tokens > 1)
    ),
    "pp_not_above_stages": lambda p: f"pp stages need {p.model.num_layers} layers to hold",
    "batch_divisible_by_dp": lambda p: f"dp must divide the batch of {_batch(p)}",
    "pairs_share_a_micro_batch": lambda p: "both sequences of a pair share a micro-batch: its size must be even",
    "offloaded_weights_need_no_reference": lambda p: "weights on the host beside a frozen copy are not priced",
    "experts_need_moe": lambda p: f"{p.model.name} has no experts for ep and etp",
    "experts_divisible_by_ep": lambda p: f"ep must divide the {_experts(p, 'num_experts')} experts",
    "expert_width_divisible_by_etp": lambda p: f"etp must divide the width {_experts(p, 'intermediate_size')}",
    "expert_grid_divides_ranks": lambda p: "ep x etp must divide tp x cp x dp",
    "etp_divides_tp": lambda p: "etp must divide tp",
    "sequence_parallel_needs_tp": lambda p: "sequence parallelism needs tp > 1",
    "sequence_divisible_by_tp": lambda p: "with sequence parallelism tp must divide a rank's tokens",
    "experts_with_tp_need_sequence_parallel": lambda p: "experts with tp > 1 need sequence parallelism",
    "virtual_stages_not_above_layers": lambda p: (
        f"pp x vpp must not exceed the {p.model.num_layers} layers (and ends)"
    ),
    "interleaving_needs_two_stages": lambda p: "vpp > 1 needs pp > 1",
    "split_backward_needs_two_stages": lambda p: "a schedule that splits the backward needs pp > 1",
    "interleaved_micro_batches_divisible_by_pp": lambda p: "with vpp > 1, pp must divide the micro-batches",
    "layers_split_into_stages": lambda p: (
        "every virtual stage must start with a layer that selects its own keys, and no split of the space does so"
        if p.model.taking_layers
        else f"{p.model.num_layers} layers do not fill so many equal stages"
    ),
    "schedule_matches_vpp": lambda p: "interleaved needs vpp > 1, zb-v and dualpipe-v vpp = 2, others vpp = 1",
    "pairs_need_one_node_type": lambda p: "dualpipe-v is planned for clusters of one node type",
    "pairs_need_two_micro_batches_per_stage": lambda p: "dualpipe-v needs at least 2 pp micro-batches",
    "recomputed_vision_needs_images": lambda p: (
        "recompute_vision needs images and a vision encoder that is trained"
    ),
    "shared_images_need_context_parallelism": lambda p: "vision_data_parallel needs images and cp > 1",
    "recompute_modules_of_the_model": lambda p: (
        "recompute_modules needs inputs that are gathered again, and modules of the model, moe without those "
        f"inside it: {', '.join(p.recompute_modules) or 'none here'}"
    ),
    "offload_modules_of_the_model": lambda p: (
        "offload_modules needs activations on the device, attn_proj beside core_attn, none inside a recomputed "
        f"moe, and modules of the model: {', '.join(p.offload_modules) or 'none here'}"
    ),
    "ulysses_divides_cp_and_heads": lambda p: (
        "ulysses must divide cp, and tp x ulysses the heads of queries, keys and values "
        f"(multiples of {p.model.common_heads})"
    ),
    "ulysses_needs_flash_attention": lambda p: "ulysses > 1 needs flash attention",
    "windows_need_one_exchange": lambda p: "attention windows need ulysses = 1 or ulysses = cp",
    "offload_needs_whole_backward": lambda p: "offloading needs a schedule that does not split the backward",
    "zero_needs_replicas": lambda p: "ZeRO needs replicas (cp x dp > 1)",
    "grad_overlap_needs_replicas": lambda p: "overlap of the gradient reduction needs replicas (cp x dp > 1)",
    "param_overlap_needs_zero_and_grad_overlap": lambda p: (
        "overlap of the parameter gather needs ZeRO 1 or more and overlap of the gradient reduction"
    ),
    "sharded_gradients_are_overlapped": lambda p: "ZeRO 2 and 3 overlap the gradient reduction",
    "sharded_weights_are_overlapped": lambda p: "ZeRO 3 overlaps the parameter gather",
    "dp_replicate_divides_dp": lambda p: "dp_replicate must divide dp",
    "dp_replicate_divides_expert_replicas": lambda p: (
        "dp_replicate must divide the replicas of an expert (tp x cp x dp / (ep x etp))"
    ),
    "dp_replicate_leaves_shards": lambda p: "dp_replicate must be below dp: groups of one replica are ZeRO 0",
    "dp_replicate_needs_zero": lambda p: "hybrid sharding needs ZeRO 1 or more, which shards something",
    "kept_weights_need_no_pipeline": lambda p: "keep_weights needs pp = 1",
    "kept_weights_are_trained_once": lambda p: (
        "keep_weights needs training, one forward a micro-batch, and weights on the device"
    ),
    "kept_weights_need_zero_3": lambda p: "keep_weights needs ZeRO 3, which gathers weights for each micro-batch",
    "allgather_needs_whole_experts": lambda p: "dispatch by all-gather is priced with etp = 1",
    "muon_needs_whole_matrices": lambda p: "Muon needs whole matrices, which ZeRO 2 and 3 cut",
    "zero_2_and_3_without_pipeline": lambda p: "ZeRO 2 and 3 with a pipeline need --allow zero-pipeline",
    "different_replicas_need_two_node_types": lambda p: (
        "replicas of different make are on at least two node types"
    ),
    "different_replicas_are_trained": lambda p: "replicas of different make are planned for training",
    "node_types_hold_whole_replicas": lambda p: (
        f"tp x cp x pp must divide the GPUs of every node type ({', '.join(map(str, p.node_gpus))})"
    ),
    "different_replicas_hold_all_experts": lambda p: "replicas of different make need ep x etp to divide tp x cp",
    "different_replicas_offload_nothing": lambda p: "replicas of different make offload nothing",
    "different_replicas_are_neighbours": lambda p: "replicas of different make need an order with dp last",
    "different_replicas_shard_together": lambda p: "replicas of different make shard over all (dp_replicate=1)",
    "different_replicas_meet_once_a_step": lambda p: (
        "ZeRO 2 and 3 meet in every micro-batch, of which replicas of different make have different numbers"
    ),
}


def _batch(problem: Problem) -> str:
    return " or ".join(f"{value:,}" for value in problem.job.global_batch_values)


def rule_words(problem: Problem, name: str) -> str:
    """Describe a rule by name and content, e.g. ``heads_divisible_by_tp: tp must divide the 64 attention
    heads``."""
    words = WORDS.get(name)
    return name if words is None else f"{name}: {words(problem)}"


def rule_effects(problem: Problem, best: float) -> tuple[RuleEffect, ...]:
    """Bound the layouts that each rule of divisibility alone excludes, for every rule that refused layouts.

    Each bound is the minimum, in seconds, and is compared with the best plan's ``best`` seconds. The result is
    empty unless the problem has a single number of GPUs and a single batch.
    """
    job = problem.job
    if len(job.num_gpus_values) > 1 or len(job.global_batch_values) > 1:
        return ()
    refused = {name: layout_space(problem).rejected.get(name, 0) for name in DIVISIBILITY}
    return tuple(
        RuleEffect(name, count, bound if np.isfinite(bound) else None, bound < best)
        for name, count in refused.items()
        if count
        for bound in [_least_without(problem, name, best)]
    )


def _least_without(problem: Problem, name: str, best: float) -> float:
    """Return the minimum bound, in seconds, of the layouts that a rule alone refuses; infinite without any."""
    space = layout_space(problem, without=(name,))
    families = space.families
    columns = {field: getattr(families, field).astype(np.int64) for field in Layout.model_fields}
    columns["num_micro_batches"] = families.num_micro_batches
    rule = stage_rules(problem).get(name, DIVISIBILITY[name])
    refused = ~np.asarray(rule(problem, columns))
    work = np.where(refused, cluster_compute_bounds(problem, families), np.inf)
    rows = np.flatnonzero(space.spread(work) < best * NS_PER_S)
    if not len(rows) or name == SCHEDULE_BOUND_ONLY:
        return float(work.min(initial=np.inf)) / NS_PER_S
    rows = rows[np.argsort(space.spread(work)[rows], kind="stable")]
    closer, rest = rows[:MAX_BOUNDED], rows[MAX_BOUNDED:]
    bound_ns = float(_bounds_ns(problem, space.take(closer)).min())
    others = np.concatenate([space.spread(work)[rest], work[work >= best * NS_PER_S]])
    return min(bound_ns, float(others.min(initial=np.inf))) / NS_PER_S


def _bounds_ns(problem: Problem, columns: LayoutColumns) -> FloatArray:
    bounds = cluster_bounds(problem, columns, cluster_costs(problem, columns))
    return np.where(bounds.step_time_ns > 0, bounds.step_time_ns, np.inf)


REPLICAS: Final = ("zero_exposed", "param_gather_exposed", "grad_reduce_exposed")
GROUPED: Final = ("tp_exposed", "cp_exposed", "ep_exposed", *REPLICAS)
"""Parts of the step that are communication of a group."""


def limits(problem: Problem, plan: Plan, report: StepReport, best_s: float) -> PlanLimits:
    """Determine the limits of a plan; ``best_s`` is the step of the best known plan, which rules are compared
    with."""
    layout = plan.layout
    return PlanLimits(
        headroom_bytes=tuple(stage.usable_memory_bytes - stage.memory.peak_bytes for stage in report.stages),
        bubble_share=report.breakdown_s["bubble"] / report.step_time_s,
        num_micro_batches=layout.num_micro_batches,
        exposed=tuple(
            Exposed(
                part=name,
                seconds=report.breakdown_s[name],
                share=report.breakdown_s[name] / report.step_time_s,
                num_ranks=group_shape(layout, name)[0],
                tier=tier(problem, *group_shape(layout, name)),
            )
            for name in sorted(GROUPED, key=lambda part: -report.breakdown_s[part])
            if report.breakdown_s[name] > 0
        ),
        rules=rule_effects(problem, best_s) if np.isfinite(best_s) else (),
    )


def group_shape(layout: Layout, part: str) -> tuple[int, int]:
    """Return (ranks, stride) of the group that communicates in a part of the step.

    Ranks are ordered tp, cp, dp, pp from the inside, and etp, ep for the experts. Shards and replicas are those of
    the dense layers.
    """
    if part == "param_gather_exposed":
        return layout.num_shards, layout.tp
    if part in REPLICAS:
        return layout.cp * layout.dp, layout.tp
    shapes = {
        "tp_exposed": (layout.tp, 1),
        "cp_exposed": (layout.cp, layout.tp),
        "ep_exposed": (layout.ep, layout.etp),
    }
    return shapes[part]


def tier(problem: Problem, num_ranks: int, stride: int) -> str:
    """Return the slowest tier that a group of ranks uses, on the first node type where it leaves the domain."""
    for hardware in problem.node_types:
        place = group_place(hardware, num_ranks, stride)
        if hardware.pods is not None and place.beyond is not None and place.beyond.pods > 1:
            return hardware.pods.name
        if int(place.members) < num_ranks:
            return hardware.scale_out.name
    return problem.hardware.scale_up.name


Wish = Mapping[str, object]
WISHABLE = tuple(name for name in Space.model_fields if name in {*Layout.model_fields, "recompute"})
"""Names that a wish may have: the fields of a layout that a space has, and the recomputation of all layers."""


def wished(problem: Problem, wish: Wish) -> Problem:
    """Grant a wish, whatever the problem's own space says about its fields.

    Raises:
        InvalidInputError: a name that no wish can have, or an invalid value.
    """
    unknown = [name for name in wish if name not in WISHABLE]
    if unknown or not wish:
        raise InvalidInputError(
            f"A wish names {', '.join(map(repr, unknown)) or 'nothing'}.",
            f"Expected one of {', '.join(WISHABLE)}.",
            "Check the spelling.",
        )
    values = {name: value for name, value in wish.items() if name != "recompute"}
    try:
        Layout.model_validate({"global_batch_size": 1, **values}, strict=True)
    except ValidationError as error:
        raise InvalidInputError(
            f"A wish is {wish_words(wish)}: {plain_reason(error.errors(include_url=False)[0])}.",
            "Expected values that a layout can have.",
            "Correct it; `milpplan schema plan` describes the fields.",
        ) from error
    granted = fixed(problem, values) if values else problem
    if "recompute" not in wish:
        return granted
    modes = Space().recompute
    if wish["recompute"] not in modes:
        raise InvalidInputError(
            f"A wish names recompute={wish['recompute']!r}.", f"Expected one of {', '.join(modes)}.", "Correct it."
        )
    return with_space(granted, recompute=(wish["recompute"],))


def wish_words(wish: Wish) -> str:
    """Write a wish as on the command line."""
    return ",".join(f"{name}={_word(value)}" for name, value in wish.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def neighbours(problem: Problem, plan: Plan) -> Iterator[Wish]:
    """Iterate over the plan's neighbours: every degree halved and doubled, every switch flipped, every other value
    that the space offers for a choice, and every recomputation."""
    layout = plan.layout.model_dump()
    default = Space()
    for name in WISHABLE:
        own = layout.get(name)
        if isinstance(own, bool):
            yield {name: not own}
        elif name == "recompute" or (
            getattr(default, name) is not None and getattr(problem.space, name) is not None
        ):
            yield from ({name: value} for value in getattr(problem.space, name) if not _has(plan, {name: value}))
        elif isinstance(own, int) and not (name in ("ep", "etp") and not problem.model.has_experts):
            values = ([own // 2] if own % 2 == 0 else []) + [own * 2]
            yield from ({name: value} for value in values if _divides(problem, name, value))


def _divides(problem: Problem, name: str, value: int) -> bool:
    """Test whether a degree divides the number of GPUs; otherwise it is not a neighbour."""
    return name not in ("tp", "cp", "pp", "dp") or any(n % value == 0 for n in problem.job.num_gpus_values)


def _has(plan: Plan, wish: Wish) -> bool:
    """Test whether a plan already has the wish."""
    return all(_has_one(plan, name, value) for name, value in wish.items())


def _has_one(plan: Plan, name: str, value: object) -> bool:
    if name != "recompute":
        return bool(getattr(plan.layout, name) == value)
    full, selective = (
        sum(getattr(s.recompute, mode) for s in plan.virtual_stages) for mode in ("full", "selective")
    )
    layers = sum(stage.num_layers for stage in plan.virtual_stages)
    counts = {"full": full, "selective": selective, "none": layers - full - selective}
    return counts.get(str(value)) == layers


def _in_space(problem: Problem, wish: Wish) -> bool:
    """Test whether the declared space has plans with the wish, so that such a plan cannot beat the best."""
    for name, value in wish.items():
        offered = getattr(problem.space, name)
        if offered is None:
            if name == "vpp" and problem.space.vpp_values != "all":
                return False
        elif value not in offered:
            return False
    return True


def answer(
    yardstick: Yardstick, problem: Problem, wish: Wish, best: Optimum, limit_s: float | None, asked: bool = True
) -> WishAnswer:
    """Solve for the best plan with a wish and its price, or determine the reason that forbids it.

    Args:
        yardstick: the unit and the tolerance.
        problem: the problem of the plan.
        wish: fields and values.
        best: the proved best of the problem.
        limit_s: seconds to spend.
        asked: the user asked; False for a neighbour.
    """
    granted = wished(problem, wish)
    inside = _in_space(problem, wish) and granted.space.zero_pipeline == problem.space.zero_pipeline
    wish_answer = WishAnswer(wish, wish_words(wish), "open", None, None, None, "", inside, asked)
    if inside and best.plan is not None and _has(best.plan, wish):
        same = replace(wish_answer, outcome="chosen", best=best, reason="the best plan found has it")
        return _priced(same, best.bounds, best.bounds, at_least_zero=True)
    legal = layout_space(granted)
    if not len(legal):
        return replace(wish_answer, outcome="forbidden", reason=_forbidden(granted, legal.rejected, wish))
    start = next(
        (candidate for candidate in (best.plan, *best.runners_up) if candidate and _has(candidate, wish)), None
    )
    optimum = yardstick.optimum(granted, limit_s, start)
    if optimum.infeasible:
        return _impossible(replace(wish_answer, best=optimum), granted, optimum)
    bounds = optimum.bounds
    if inside:
        bounds = Interval(min(max(bounds.low, best.bounds.low), bounds.high), bounds.high)
    outcome: Outcome = "open" if optimum.plan is None else "priced"
    reason = "" if inside else "outside the declared space"
    return _priced(replace(wish_answer, outcome=outcome, best=optimum, reason=reason), bounds, best.bounds, inside)


def _priced(wish_answer: WishAnswer, with_it: Interval, without: Interval, at_least_zero: bool) -> WishAnswer:
    """Add the price to an answer; a plan with a wish that the space offers is provably no better than the best."""
    minimum = 0.0 if at_least_zero else -math.inf
    price = Interval(
        max(minimum, ratio(with_it.low, without.high) - 1.0), max(minimum, ratio(with_it.high, without.low) - 1.0)
    )
    low = with_it.low - without.high if math.isfinite(without.high) else -math.inf
    amount = Interval(max(minimum, low), max(minimum, with_it.high - without.low))
    best = None if wish_answer.best is None else replace(wish_answer.best, bounds=with_it)
    return replace(wish_answer, best=best, price=price, amount=amount)


def _forbidden(granted: Problem, rejected: Mapping[str, int], wish: Wish) -> str:
    """Describe the minimal set of rules that leaves no layout; without rules to blame, the numbers that do."""
    rules = _together(granted, refusing_rules(granted, rejected))
    if rules:
        return "; ".join(rule_words(granted, name) for name in rules)
    job, space = granted.job, granted.space
    degrees = (space.tp, space.cp, space.pp, space.dp)
    product = math.prod(values[0] for values in degrees if values and len(values) == 1)
    counts = " or ".join(f"{count:,}" for count in job.num_gpus_values)
    if all(count % product for count in job.num_gpus_values):
        return f"{wish_words(wish)} does not divide {counts} GPUs"
    batches = " or ".join(f"{batch:,}" for batch in job.global_batch_values)
    return f"no degrees and micro-batches with {wish_words(wish)} give {counts} GPUs and a batch of {batches}"


def _together(granted: Problem, refusing: Sequence[str]) -> list[str]:
    """Find a minimal set of rules whose removal leaves a layout; empty where no rule is to blame."""
    removed = list(refusing)
    if not len(layout_space(granted, without=removed)):
        return []
    for name in refusing:
        rest = [other for other in removed if other != name]
        if len(layout_space(granted, without=rest)):
            removed = rest
    return removed


def _impossible(wish_answer: WishAnswer, granted: Problem, optimum: Optimum) -> WishAnswer:
    """Answer that every layout with the wish is provably too large, or too slow for the deadline."""
    usable = usable_memory_bytes(granted)
    peak_bytes = optimum.least_peak_bytes
    if peak_bytes is None:
        bounds = floor(granted, layout_space(granted))
        peak_bytes = bounds.memory_bytes if bounds is not None else 0.0
    if peak_bytes > usable:
        reason = f"does not fit: the least peak is at least {gib_text(peak_bytes)} of {gib_text(usable)} usable"
        return replace(wish_answer, outcome="does_not_fit", reason=reason)
    if granted.job.deadline_s is not None:
        return replace(
            wish_answer, outcome="too_late", reason="every layout is too large, or misses the deadline (proved)"
        )
    reason = (
        f"does not fit: every layout was proved to need more than {gib_text(usable)}, one by one (the bound "
        f"of all at once is {gib_text(peak_bytes)})"
    )
    return replace(wish_answer, outcome="does_not_fit", reason=reason)


def checked(problem: Problem, wishes: Sequence[Wish]) -> None:
    """Refuse invalid wishes before time is spent on valid ones."""
    for wish in wishes:
        wished(problem, wish)
