"""Checks for plans that a launcher cannot run, with reasons and values to fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milpplan.errors import IllegalPlanError
from milpplan.launchers.capabilities import Capability, Limit, Mode
from milpplan.launchers.records import ConfigLaunch, Imported, ImportRequest, Refusal
from milpplan.problem import SCHEDULES, Job, Layout, Method, ModelSpec, Plan, Problem, RankOrder, Reference
from milpplan.units import counted


def placed_alike(layout: Layout, order: RankOrder, num_replicas: int) -> bool:
    """Test whether another rank order gives every group of the layout the same ranks.

    Degrees of one may stand anywhere in the order.

    Args:
        layout: degrees, and their order.
        order: the other order.
        num_replicas: replicas of the experts' weights, tp * cp * dp / (ep * etp); 1 without experts.
    """
    return _orders(layout, layout.rank_order, num_replicas) == _orders(layout, order, num_replicas)


def _orders(layout: Layout, order: RankOrder, num_replicas: int) -> tuple[list[str], list[str]]:
    """List the degrees above one, innermost first, of dense layers and of experts."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    experts = {"tp": [("etp", layout.etp)], "cp": [], "pp": [("pp", layout.pp)]}
    experts["dp"] = [("ep", layout.ep), ("edp", num_replicas)]
    names = order.split("-")
    dense = [name for name in names if sizes[name] > 1]
    return dense, [part for name in names for part, size in experts[name] if size > 1]


def model_differences(first: ModelSpec, other: ModelSpec) -> list[str]:
    """List the fields in which the layers, embedding or head of two models differ.

    Names do not matter, nor published layers of multi-token prediction, and positions only if they are learned.
    """
    apart = {"name", "default_sequence_length", "schema_version", "layers", "ignored_keys", "stored_weights"}
    apart |= {"num_nextn_predict_layers", "mtp_layer", "embedding_dropout", "attention_dropout"}
    fields = set(ModelSpec.model_fields) - apart
    fields |= {"drops_embedding", "drops_scores"}
    if not first.learned_positions:
        fields.discard("max_position_embeddings")
    different = sorted(name for name in fields if getattr(first, name) != getattr(other, name))
    kinds = [[spec.kinds[index] for index in spec.layer_kinds] for spec in (first, other)]
    return different if kinds[0] == kinds[1] else [*different, "layers"]


def word(value: object) -> str:
    """Write a value of a layout as ``--fix`` takes it."""
    return str(value).lower()


ALIGNED: Mapping[Method, Mapping[str, tuple[Reference, ...]]] = {
    "dpo": {"TRL": ("none",), "LLaMA-Factory": ("frozen",), "ms-swift": ("frozen",)},
    "grpo": {"verl": ("frozen", "none")},
}
"""References beside which exports train by a method, by name of the launcher.

Under FSDP2 TRL gathers a whole reference at once, which is not priced, and LLaMA-Factory layer by layer. ms-swift
computes no outputs of a reference beforehand. slime moves a reference between host and device.

Source: trl 1.16.0, models/utils.py, prepare_fsdp; llamafactory 0.9.5, train/dpo/trainer.py; ms-swift 4.6.0,
swift/megatron/trainers/rlhf_mixin.py; verl 0.9.1, trainer/ppo/ray_trainer.py; slime at 624b824a,
slime/backends/megatron_utils/actor.py."""


def _alignment_refusals(job: Job, name: str) -> list[Refusal]:
    """Refuse training on preferences or rewards that the exports of a launcher do not write."""
    if job.alignment is None:
        return []
    reference, writers = job.alignment.reference, ALIGNED.get(job.alignment.method, {})
    if reference not in writers.get(name, ()):
        others = [other for other, references in writers.items() if reference in references]
        there = f"exports to {' and '.join(others)} do" if others else "no export does"
        return [Refusal(f"{job.alignment_text}: the writer does not train so, {there}")]
    apart = job.rollout is not None and job.rollout.apart
    return [Refusal("rollouts on other accelerators: the writer has them on the same")] if apart else []


def job_refusals(problem: Problem, name: str) -> list[Refusal]:
    """Refuse what no export of a launcher writes: encoders, inference, frozen parts, preferences, unusual states,
    several node types."""
    refusals = []
    if problem.model.vision is not None:
        refusals.append(Refusal(f"{problem.model.name} has a vision encoder, and exports write none"))
    if problem.model.num_labels is not None:
        refusals.append(Refusal(f"{problem.model.name} has a head of scores, and exports write logits of words"))
    if problem.inference:
        refusals.append(Refusal("it is a plan of forwards alone (inference), and this trains"))
    if problem.job.frozen_text:
        refusals.append(Refusal(f"{problem.job.frozen_text}: the writer sets no adapters and freezes nothing"))
    if unwritten := problem.hardware.software.unwritten_text:
        refusals.append(Refusal(f"{unwritten}: the writer has states in fp32, and a ring of keys and values"))
    refusals += _alignment_refusals(problem.job, name)
    if problem.other_hardware:
        names = ", ".join(hardware.name for hardware in problem.node_types)
        refusals.append(
            Refusal(f"the cluster has several node types ({names}), and torchrun starts nodes in any order")
        )
    return refusals


def plain_job_refusals(problem: Problem, name: str) -> list[Refusal]:
    """Refuse what Megatron-LM's export alone writes, indexers, Muon and layers of multi-token prediction, and
    ``job_refusals``."""
    refusals = []
    if problem.job.optimizer != "adam":
        refusals.append(Refusal(f"the job has the optimizer {problem.job.optimizer}, and the writer sets Adam"))
    if problem.model.has_indexers:
        refusals.append(
            Refusal(f"{problem.model.name} attends to selected or compressed keys, and exports write none")
        )
    if problem.job.mtp_layers:
        refusals.append(Refusal("the job trains layers of multi-token prediction, and this has none"))
    return refusals + job_refusals(problem, name)


FORMATS = {
    "precision": "precision {}",
    "grad_dtype": "gradients in {}",
    "attention_kernel": "an {} attention kernel",
}
"""Words for fields of ``Job`` that a target's declaration may fix."""


def format_refusals(capability: Capability, job: Job) -> list[Refusal]:
    """Refuse number formats and an attention kernel that the target does not have."""
    given = {name: getattr(job, name) for name in capability.formats}
    return [
        Refusal(f"{FORMATS[name].format(value)}: {capability.formats[name]}")
        for name, value in given.items()
        if value != Job.model_fields[name].default
    ]


def field_refusals(capability: Capability, layout: Layout, num_replicas: int | None = None) -> list[Refusal]:
    """Refuse fields of the layout whose values the target does not support.

    ``num_replicas`` counts replicas of the experts' weights (1 without experts). If given, another order of ranks
    is accepted when it places every group alike.
    """
    refused = capability.refused(layout)
    if num_replicas is not None and placed_alike(layout, "tp-cp-dp-pp", num_replicas):
        refused.pop("rank_order", None)
    return _refused_values(layout, refused)


def _refused_values(layout: Layout, limits: Mapping[str, Limit]) -> list[Refusal]:
    return [
        Refusal(f"{name}={word(getattr(layout, name))}: {limit.why}", f"{name}={word(limit.values[0])}")
        for name, limit in limits.items()
        if getattr(layout, name) not in limit.values
    ]


def layout_refusals(
    capability: Capability, problem: Problem, layout: Layout, num_replicas: int | None = None
) -> list[Refusal]:
    """Refuse fields (as ``field_refusals``) and combinations of fields that the declaration does not have."""
    fields = field_refusals(capability, layout, num_replicas)
    fields += _refused_values(layout, capability.more_limits(problem))
    return [*fields, *rule_refusals(capability, problem, layout)]


def layout_differences(
    plan: Plan, runs: Layout, reasons: Mapping[str, str], num_replicas: int = 1
) -> list[Refusal]:
    """Refuse fields in which the target's run would differ from the plan.

    Args:
        plan: the plan to run.
        runs: the layout read back from the target's file.
        reasons: why a field of ``runs`` has its value.
        num_replicas: replicas of the experts' weights; 1 without experts.
    """
    refusals = []
    # The cluster of heterogeneous replicas has already been refused, and no other share of the batch would help.
    shared = {"replica_micro_batches", "global_batch_size"} if plan.layout.replica_micro_batches else set()
    for name in Layout.model_fields:
        wanted, there = getattr(plan.layout, name), getattr(runs, name)
        if wanted == there or name in shared:
            continue
        if name == "rank_order" and placed_alike(plan.layout, runs.rank_order, num_replicas):
            continue
        refusals.append(
            Refusal(
                f"{name}={word(wanted)}: {reasons.get(name, 'its file cannot say it')}", f"{name}={word(there)}"
            )
        )
    return refusals


def recompute_refusals(plan: Plan, modes: Sequence[Mode]) -> list[Refusal]:
    """Refuse recomputation of some layers only: the target has one of the ``modes`` for all layers."""
    full = [stage.recompute.full for stage in plan.virtual_stages]
    if plan.selects:
        if "selective" not in modes:
            return [Refusal("some layers recompute selectively: it recomputes whole layers", "recompute=none")]
        if any(stage.recompute.selective < stage.num_layers for stage in plan.virtual_stages):
            return [Refusal("some layers recompute selectively: it recomputes all alike", "recompute=selective")]
        return []
    if any(full) and full != [stage.num_layers for stage in plan.virtual_stages]:
        counts = ", ".join(map(str, full[:16]))
        return [Refusal(f"the stages recompute {counts} layers: it recomputes all or none", "recompute=none")]
    return []


def whole_nodes(problem: Problem, layout: Layout) -> tuple[int, int, list[Refusal]]:
    """Return the number of nodes, processes per node, and refusals of their combination."""
    per_node = min(problem.hardware.gpus_per_node, layout.num_gpus)
    if layout.num_gpus % per_node:
        why = f"{counted(layout.num_gpus, 'GPU')} are no whole nodes of {per_node} ({problem.hardware.name})"
        return 1, layout.num_gpus, [Refusal(why)]
    return layout.num_gpus // per_node, per_node, []


def title_of(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Describe the plan in sentences."""
    layout, job = plan.layout, problem.job
    degrees = ", ".join(f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep", "etp", "pp", "dp", "vpp"))
    return (
        f"{problem.model.name} on {counted(str(layout.num_gpus), 'GPU')} ({problem.hardware.name}), "
        f"{counted(str(layout.global_batch_size), 'sequence')} of {counted(str(job.sequence_length), 'token')} "
        "a step.",
        f"Layout: {degrees}; ZeRO {layout.zero_stage}, {layout.schedule}.",
    )


def start_of(capability: Capability, version: str, problem: Problem, plan: Plan) -> dict[str, Any]:
    """Return the fields of a launch that follow from the plan alone: target, version, title and processes.

    Raises:
        IllegalPlanError: the GPUs are no whole nodes.
    """
    num_nodes, gpus_per_node, uneven = whole_nodes(problem, plan.layout)
    refuse(capability.name, uneven)
    return {
        "target": capability.name,
        "version": version,
        "title": title_of(problem, plan),
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
    }


def config_launch(
    capability: Capability,
    version: str,
    problem: Problem,
    plan: Plan,
    settings: Mapping[str, Any],
    notes: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> ConfigLaunch:
    """Build the launch of a plan by a configuration file with the given settings and remarks."""
    start = start_of(capability, version, problem, plan)
    return ConfigLaunch(**start, environment=dict(environment or {}), settings=settings, notes=tuple(notes))


def check_replicas(capability: Capability, plan: Plan) -> None:
    """Refuse a plan with heterogeneous replicas.

    Raises:
        IllegalPlanError: the replicas run different numbers of micro-batches.
    """
    shares = " and ".join(map(str, plan.layout.replica_micro_batches))
    if shares:
        raise IllegalPlanError(
            f"The plan has replicas of different make: they run {shares} micro-batches a step, and "
            f"{capability.name} gives every data-parallel replica as many.",
            "Expected replicas that are alike, on nodes of one type.",
            "Solve again on one of these node types alone; `milpplan report` shows this plan.",
        )


Rules = Mapping[str, tuple[str, Callable[..., str]]]
"""Rules of a target by name, with source and check, which describes a violation or returns an empty text."""


def broken_rules(rules: Rules, *checked: Any) -> dict[str, str]:
    """List the rules that the arguments of their checks break, with sources and descriptions."""
    violations = {name: (source, check(*checked)) for name, (source, check) in rules.items()}
    return {name: f"rule {name} ({source}): {text}" for name, (source, text) in violations.items() if text}


def check_rules(target: str, broken: Mapping[str, str], do: str) -> None:
    """Raise an error for the rules that a file breaks.

    Raises:
        IllegalPlanError: names the rules, their sources and the violations.
    """
    if broken:
        texts = "; ".join(broken.values())
        raise IllegalPlanError(
            f"{target} refuses it, {texts}.", "Expected settings that its own checks admit.", do
        )


def refuse(target: str, refusals: Sequence[Refusal]) -> None:
    """Raise an error with every reason, if there are any.

    Raises:
        IllegalPlanError: names the reasons and the values to fix in the next solve.
    """
    if not refusals:
        return
    whys = "; ".join(f"({number}) {refusal.why}" for number, refusal in enumerate(refusals, 1))
    # A field has one value: that of the last reason.
    values = dict(part.split("=") for refusal in refusals if refusal.fix for part in refusal.fix.split(","))
    fixes = ",".join(f"{name}={value}" for name, value in values.items())
    others = ", ".join(f"({number})" for number, refusal in enumerate(refusals, 1) if not refusal.fix)
    remedy = f"Solve again with --fix {fixes}." if fixes else "Export to another target, or change the problem."
    raise IllegalPlanError(
        f"{target} cannot run this plan as it is, for {len(refusals)} reason(s): {whys}.",
        "Expected a plan that its files can tell without loss.",
        f"{remedy} No --fix is known for {others}." if fixes and others else remedy,
    )


NUMBERS = (
    *("tp", "cp", "ep", "etp", "pp", "dp", "vpp", "micro_batch_size", "global_batch_size", "num_micro_batches"),
    "ulysses",
    *("sequence_parallel", "zero_stage", "dp_replicate", "overlap_grad_reduce", "overlap_param_gather"),
    "keep_weights",
)


def rule_refusals(capability: Capability, problem: Problem, layout: Layout) -> list[Refusal]:
    """Refuse a layout whose fields are supported but whose combination breaks a rule of the target."""
    columns = {name: np.array([int(getattr(layout, name))]) for name in NUMBERS}
    columns["schedule"] = np.array([SCHEDULES.index(layout.schedule)])
    refusals = [
        Refusal(rule.why) for rule in capability.rules.values() if not bool(rule.keeps(problem, columns).all())
    ]
    if not bool(capability.shards_within_groups(problem, columns).all()):
        why = f"hybrid sharding at ZeRO {layout.zero_stage} (dp_replicate={layout.dp_replicate}) is not priced"
        refusals.append(Refusal(f"{why} as it runs", "dp_replicate=1"))
    return refusals


@dataclass(frozen=True, slots=True)
class ConfigLauncher:
    """Launcher of a program that reads one configuration file.

    Export: a plan is refused for properties of the problem, for fields that the declaration does not have, and for
    combinations of fields: those that break a rule, or that the run of the files does not have.
    """

    capability: Capability
    """Layouts that the program can run."""
    settings: Callable[[Problem, Plan, str], Mapping[str, Any]]
    """Writes a plan that nothing refuses as settings of a version."""
    notes: Callable[[Problem, Plan, str], Sequence[str]]
    """Lists remarks on the launch of such a plan."""
    files: Callable[[ConfigLaunch, str], dict[str, str]]
    """Writes a launch as files by name, for milpplan's version."""
    read: Callable[[ImportRequest], Imported]
    """Reads such a file, or a script that has one, into a problem and a plan."""
    losses: Callable[[ModelSpec], list[str]] = lambda model: []
    """Lists the parts of a model that the program does not build."""
    differences: Callable[[Problem, Plan, str], list[Refusal]] | None = None
    """Compares a plan of a model that the program builds with the run that the files start; None: the rules of
    ``capability`` decide instead."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every process needs."""

    def export(self, problem: Problem, plan: Plan, version: str) -> ConfigLaunch:
        """Turn a plan into a launch of a version.

        Raises:
            IllegalPlanError: the program cannot express the plan or would refuse it; gives all reasons.
        """
        check_replicas(self.capability, plan)
        layout, capability = plan.layout, self.capability
        refusals = [*self._refusals(problem), *recompute_refusals(plan, self.capability.modes(problem))]
        if self.differences is None:
            num_replicas = layout.expert_dp if problem.model.has_experts else 1
            refusals += layout_refusals(capability, problem, layout, num_replicas)
        else:
            refusals += [*whole_nodes(problem, layout)[2], *field_refusals(capability, layout)]
            named = {refusal.why.split("=")[0] for refusal in refusals}
            found = [] if self.losses(problem.model) else self.differences(problem, plan, version)
            refusals += [refusal for refusal in found if refusal.why.split("=")[0] not in named]
        refuse(capability.name, refusals)
        settings, notes = self.settings(problem, plan, version), self.notes(problem, plan, version)
        return config_launch(capability, version, problem, plan, settings, notes, self.environment)

    def check(self, problem: Problem, version: str) -> None:
        """Refuse a problem for which the program can run no plan.

        Raises:
            IllegalPlanError: gives all reasons.
        """
        refuse(self.capability.name, self._refusals(problem))

    def _refusals(self, problem: Problem) -> list[Refusal]:
        """List the properties of a problem that no run of the program has."""
        losses = [Refusal(text) for text in self.losses(problem.model)]
        return [
            *plain_job_refusals(problem, self.capability.name),
            *format_refusals(self.capability, problem.job),
            *losses,
        ]
