"""Run of torchtitan in one form for its three dialects, and the plan of such a run.

Sharding, from pytorch/torchtitan at 0.2.2, 0.3.0 and b5bcd76c (models/llama3/infra/parallelize.py, later
distributed/fsdp.py) and PyTorch (distributed/pipelining/stage.py, ``perform_backward``):

- without a pipeline ``fully_shard`` gathers weights for every forward and reduces gradients after every backward,
  of each micro-batch. ``fsdp_reshard_after_forward`` ``always`` frees and gathers again between the two: ZeRO 3.
  ``never`` keeps them until the backward is over: ZeRO 2, if there is one micro-batch per step.
- with a pipeline it neither reshards nor reduces before the last micro-batch, and reduces after it: ZeRO 1 without
  overlap, where nothing is resharded after the forward (``never``, the default with a pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from milpplan.errors import InvalidInputError
from milpplan.launchers.torchtitan.flavors import Pair
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.reading import validated

NEWEST, V030, V022 = "b5bcd76c", "0.3.0", "0.2.2"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""PyTorch's names of the schedules (distributed/pipelining/schedules.py, ``get_schedule_class``)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run that a configuration describes.

    ``replicate`` and ``shard`` are data_parallel_*_degree. ``stages`` holds the layers of every virtual stage in
    model order. A step of the optimizer takes ``accumulations`` runs of ``micro_batches`` micro-batches.
    ``recompute`` applies to whole layers.
    """

    version: str
    flavor: Pair
    experts: bool
    sequence_length: int
    replicate: int
    shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    etp: int
    sequence_parallel: bool
    schedule: str
    stages: tuple[int, ...]
    micro_batch_size: int
    micro_batches: int
    accumulations: int
    reshard: str
    recompute: bool
    deduplicated: bool

    @property
    def dp(self) -> int:
        """Number of replicas, sharded or not."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""
        return self.micro_batch_size * self.micro_batches * self.accumulations * self.dp

    @property
    def expert_tensor(self) -> int:
        """Number of ranks that share the tensors of an expert: without expert parallelism those of ``tp``
        (models/common/moe_sharding.py, 0.2.2: distributed/expert_parallel.py)."""
        if not self.experts:
            return 1
        return self.etp if self.ep > 1 else self.tp


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding and overlap of a run. ``loss`` describes a difference between the run and the plan."""

    zero_stage: int
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    why: str
    loss: str = ""


def sharding_of(run: Run) -> Sharding:
    """Determine the ZeRO stage of a run, by the rules in the module's docstring."""
    once = run.accumulations * (1 if run.pp > 1 else run.micro_batches) == 1
    if run.dp * run.cp == 1:
        return Sharding(0, False, False, "there is one replica")
    if run.shard * run.cp == 1:
        why = "data_parallel_replicate_degree alone replicates everything"
        if run.pp > 1:
            return Sharding(0, False, False, f"{why}, and gradients are reduced after the pipeline has run")
        loss = "" if once else "replicas reduce gradients in every micro-batch, a plan at ZeRO 0 once a step"
        return Sharding(0, True, False, f"{why}, and reduces gradients beside the backward", loss)
    hybrid = ""
    if run.replicate > 1:
        hybrid = (
            f"states sharded over some of the replicas (HSDP, data_parallel_replicate_degree {run.replicate}) "
        )
        hybrid += "are not priced"
    if run.pp > 1:
        why = (
            "fully_shard under a pipeline keeps weights and gradients whole until all micro-batches have run, and "
        )
        why += "reduces after them: ZeRO 1 without overlap"
        reshards = (
            "weights that are gathered again for every micro-batch of a pipeline, with whole gradients, are "
        )
        reshards += "no ZeRO stage (fsdp_reshard_after_forward always)"
        return Sharding(1, False, False, why, hybrid or (reshards if run.reshard == "always" else ""))
    if run.reshard == "never":
        why = "fully_shard without resharding after the forward is ZeRO 2"
        loss = "" if once else "fully_shard gathers weights in every micro-batch, a plan at ZeRO 2 once a step"
        return Sharding(2, True, True, why, hybrid or loss)
    return Sharding(3, True, True, "fully_shard gathers weights beside forward and backward: ZeRO 3", hybrid)


def plan_losses(run: Run) -> list[str]:
    """List properties of a run that a plan cannot express; empty where ``plan_of_run`` describes the whole run."""
    losses = [sharding_of(run).loss]
    if run.cp > 1:
        losses.append("context parallelism gathers keys and values, and what is priced is a ring")
    if run.pp > 1 and run.accumulations > 1:
        losses.append("the pipeline runs several times a step (gradient accumulation), a plan's runs once")
    if run.schedule not in SCHEDULES.values():
        losses.append(f"schedule {run.schedule} is none of {', '.join(SCHEDULES.values())}")
    return [text for text in losses if text]


def layout_of_run(run: Run) -> Layout:
    """Build the layout of a run, as far as a layout can express it."""
    sharding = sharding_of(run)
    schedule = {name: word for word, name in SCHEDULES.items()}.get(run.schedule, "1f1b")
    sequence_parallel = run.sequence_parallel and run.tp > 1
    data: dict[str, Any] = {
        "tp": run.tp,
        "cp": run.cp,
        "ep": run.ep if run.experts else 1,
        "etp": run.expert_tensor,
        "pp": run.pp,
        "dp": run.dp,
        "vpp": len(run.stages) // run.pp,
        "micro_batch_size": run.micro_batch_size,
        "global_batch_size": run.global_batch_size,
        "sequence_parallel": sequence_parallel,
        "zero_stage": sharding.zero_stage,
        "schedule": schedule if run.pp > 1 else "1f1b",
        "overlap_grad_reduce": sharding.overlap_grad_reduce,
        "overlap_param_gather": sharding.overlap_param_gather,
        # Autograd keeps the gathered input of a product.
        "gather_again": not sequence_parallel,
    }
    return validated(Layout, data, "the layout that the configuration describes")


def plan_of_run(run: Run) -> Plan:
    """Build the plan of a run.

    Raises:
        InvalidInputError: no plan can express the run.
    """
    losses = plan_losses(run)
    if losses:
        raise InvalidInputError(
            f"The run is not one that is priced: {'; '.join(losses)}.",
            "Expected a run that a plan can tell without loss.",
            "Change the settings to compare it as the nearest run that is.",
        )
    spans = pairwise(accumulate(run.stages, initial=0))
    stages = [{"layers": list(span), "recompute": {"full": (span[1] - span[0]) * run.recompute}} for span in spans]
    data = {"layout": layout_of_run(run).model_dump(), "virtual_stages": stages}
    return validated(Plan, data, "the plan that the configuration describes")


def run_of_plan(
    version: str, flavor: Pair, experts: bool, sequence_length: int, deduplicated: bool, plan: Plan
) -> Run:
    """Build the run that is nearest to a plan; the export compares it with the plan by reading it back."""
    layout = plan.layout
    sharded = layout.zero_stage > 0
    pipelined = layout.pp > 1
    whole = sum(stage.recompute.full for stage in plan.virtual_stages)
    return Run(
        version=version,
        flavor=flavor,
        experts=experts,
        sequence_length=sequence_length,
        replicate=1 if sharded else layout.dp,
        shard=layout.dp if sharded else 1,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp if version == V022 else 1,
        sequence_parallel=layout.sequence_parallel or (version == V022 and layout.tp > 1),
        schedule=SCHEDULES.get(layout.schedule, "1F1B"),
        stages=tuple(stage.num_layers for stage in plan.virtual_stages),
        micro_batch_size=layout.micro_batch_size,
        micro_batches=layout.num_micro_batches if pipelined else 1,
        accumulations=1 if pipelined else layout.num_micro_batches,
        reshard="always" if layout.zero_stage == 3 and not pipelined else "never",
        recompute=whole > 0,
        deduplicated=deduplicated and layout.ep > 1,
    )
