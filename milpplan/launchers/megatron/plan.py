"""Launch of a plan by Megatron-LM: arguments, environment and notes."""

from __future__ import annotations

from milpplan.errors import IllegalPlanError
from milpplan.launchers.arguments import Values
from milpplan.launchers.capabilities import MEGATRON
from milpplan.launchers.expressible import title_of
from milpplan.launchers.megatron.model import model_arguments
from milpplan.launchers.megatron.recompute import kept_notes, recompute_arguments
from milpplan.launchers.megatron.stage_strings import stage_string
from milpplan.launchers.megatron.versions import check_version
from milpplan.launchers.records import Launch, Section
from milpplan.launchers.same_placement import placed_alike
from milpplan.problem.plan import Layout, Plan
from milpplan.problem.problem import Problem

Pairs = dict[str, Values]

ORDERS = {"tp-cp-dp-pp": (), "tp-cp-pp-dp": ("--use-tp-pp-dp-mapping",)}
FSDP = {2: "optim_grads", 3: "optim_grads_params"}
"""Values of ``--data-parallel-sharding-strategy`` for the ZeRO stages of Megatron-FSDP."""


def megatron_launch(problem: Problem, plan: Plan, version: str) -> Launch:
    """Build the launch of a plan by Megatron-LM's ``pretrain_gpt.py``.

    Raises:
        IllegalPlanError: Megatron-LM cannot express the plan; the message says what makes the next plan
            expressible.
    """
    _check_expressible(problem, plan, version)
    layout, model, job = plan.layout, problem.model, problem.job
    num_nodes, per_node = _nodes(problem, layout)
    recompute = recompute_arguments(model, job, plan)
    selective = "--recompute-modules" in recompute
    sections = (
        Section("MODEL_ARGS", f"The model: {model.name}.", model_arguments(model, job.sequence_length)),
        Section("PARALLEL_ARGS", "Degrees and the places of ranks.", _degrees(problem, layout)),
        Section("STAGE_ARGS", "Which layers are where, and what is recomputed.", _stages(plan) | recompute),
        Section("BATCH_ARGS", f"{layout.num_micro_batches} micro-batches a pipeline.", _batch(layout)),
        Section("STATE_ARGS", "Sharding of states, and what overlaps.", _states(problem, layout)),
        Section("KERNEL_ARGS", "Precision and kernels.", _kernels(problem)),
    )
    return Launch(
        target=MEGATRON.name,
        version=version,
        title=title_of(problem, plan),
        num_nodes=num_nodes,
        gpus_per_node=per_node,
        environment=_environment(layout),
        sections=tuple(part for part in sections if part.arguments),
        notes=_notes(problem, layout) + (kept_notes(model, job) if selective else ()),
    )


def expert_replicas(problem: Problem, layout: Layout) -> int:
    """Return the number of replicas of the experts' weights; 1 without experts."""
    return layout.expert_dp if problem.model.has_experts else 1


def check_problem(problem: Problem, version: str) -> None:
    """Refuse a problem for which Megatron-LM can run no plan.

    Raises:
        IllegalPlanError: Megatron-LM cannot build the model, or does not support such a job or cluster.
    """
    if problem.inference:
        raise IllegalPlanError(
            "The plan is one of forwards alone (inference).",
            "Expected a plan of training: pretrain_gpt.py trains.",
            "Solve again without --inference.",
        )
    if problem.other_hardware:
        names = ", ".join(hardware.name for hardware in problem.node_types)
        raise IllegalPlanError(
            f"The cluster has several node types ({names}).",
            "Expected nodes of one type: torchrun starts them in any order, and the plan says which come first.",
            "Solve again with one of these types alone.",
        )
    check_version(version, model_arguments(problem.model, problem.job.sequence_length))


def _check_expressible(problem: Problem, plan: Plan, version: str) -> None:
    check_problem(problem, version)
    layout = plan.layout
    refused = MEGATRON.refused(layout)
    replicas = expert_replicas(problem, layout)
    if any(placed_alike(layout, order, replicas) for order in ORDERS):  # type: ignore[arg-type]
        refused.pop("rank_order", None)
    for name, limit in refused.items():
        allowed = [str(value).lower() for value in limit.values]
        raise IllegalPlanError(
            f"The plan has {name}={str(getattr(layout, name)).lower()}, which Megatron-LM does not have: "
            f"{limit.why}.",
            f"Expected {name} {' or '.join(allowed)}.",
            f"Solve again with --fix {name}={allowed[0]}.",
        )


def _nodes(problem: Problem, layout: Layout) -> tuple[int, int]:
    """Return the number of nodes, and of processes on each."""
    per_node = min(problem.hardware.gpus_per_node, layout.num_gpus)
    if layout.num_gpus % per_node:
        raise IllegalPlanError(
            f"{layout.num_gpus} GPUs are no whole nodes of {per_node} ({problem.hardware.name}).",
            "Expected as many processes on every node (torchrun --nproc-per-node).",
            f"Solve for a multiple of {per_node} GPUs.",
        )
    return layout.num_gpus // per_node, per_node


def _degrees(problem: Problem, layout: Layout) -> Pairs:
    pairs: Pairs = {
        "--tensor-model-parallel-size": (str(layout.tp),),
        "--context-parallel-size": (str(layout.cp),),
        "--pipeline-model-parallel-size": (str(layout.pp),),
    }
    if layout.cp > 1:
        pairs["--cp-comm-type"] = ("p2p",)
    if problem.model.has_experts:
        pairs |= {
            "--expert-model-parallel-size": (str(layout.ep),),
            "--expert-tensor-parallel-size": (str(layout.etp),),
            "--moe-token-dispatcher-type": (_dispatcher(problem, layout),),
        }
    if layout.sequence_parallel:
        pairs["--sequence-parallel"] = ()
    if layout.tp_overlap != "none":
        pairs["--tp-comm-overlap"] = ()
    replicas = expert_replicas(problem, layout)
    order = next(order for order in ORDERS if placed_alike(layout, order, replicas))  # type: ignore[arg-type]
    return pairs | dict.fromkeys(ORDERS[order], ())


def _dispatcher(problem: Problem, layout: Layout) -> str:
    """Choose the dispatcher. ``flex`` (DeepEP) sends a token once to each domain; it needs several expert
    ranks."""
    return "flex" if problem.hardware.software.deduplicated_dispatch and layout.ep > 1 else "alltoall"


def _stages(plan: Plan) -> Pairs:
    layout = plan.layout
    sizes = tuple(stage.num_layers for stage in plan.virtual_stages)
    if len(sizes) == 1:
        return {}
    if len(set(sizes)) > 1:
        return {"--pipeline-model-parallel-layout": (stage_string(sizes),)}
    return {"--num-virtual-stages-per-pipeline-rank": (str(layout.vpp),)} if layout.vpp > 1 else {}


def _batch(layout: Layout) -> Pairs:
    return {
        "--micro-batch-size": (str(layout.micro_batch_size),),
        "--global-batch-size": (str(layout.global_batch_size),),
    }


def _states(problem: Problem, layout: Layout) -> Pairs:
    pairs: Pairs = {"--use-distributed-optimizer": ()} if layout.zero_stage else {}
    if layout.zero_stage in FSDP:
        pairs |= {
            "--use-megatron-fsdp": (),
            "--data-parallel-sharding-strategy": (FSDP[layout.zero_stage],),
            "--ckpt-format": ("fsdp_dtensor",),
        }
    if layout.overlap_grad_reduce:
        pairs["--overlap-grad-reduce"] = ()
    if layout.overlap_param_gather:
        pairs["--overlap-param-gather"] = ()
    if problem.job.grad_dtype == "bf16":
        pairs["--grad-reduce-in-bf16"] = ()
    return pairs


def _kernels(problem: Problem) -> Pairs:
    unfused = problem.job.attention_kernel == "unfused"
    pairs: Pairs = {"--bf16": (), "--attention-backend": ("unfused" if unfused else "auto",)}
    if problem.job.precision == "fp8":
        pairs |= {"--fp8-format": ("hybrid",), "--fp8-recipe": ("tensorwise",)}
        if problem.hardware.software.fp8_weights_only:
            pairs["--fp8-param-gather"] = ()
    return pairs | {"--cross-entropy-loss-fusion": (), "--cross-entropy-fusion-impl": ("native",)}


def _environment(layout: Layout) -> dict[str, str]:
    """Set the number of device queues.

    A single queue keeps the order of communication and compute (training/arguments.py, validate_args);
    Megatron-FSDP needs several.
    """
    if layout.zero_stage in FSDP:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _notes(problem: Problem, layout: Layout) -> tuple[str, ...]:
    notes = []
    if not problem.model.learned_positions:
        notes.append("Rotary base and scaling are not part of a plan: add --rotary-base and the like.")
    if problem.model.has_experts:
        notes.append("Nor are the router's scores and losses: add --moe-router-score-function and the like.")
    if problem.model.kinds[0].mlp.gated:
        notes.append(
            "The plan knows that the feed-forward block is gated, not by which function: --swiglu is usual."
        )
    if layout.tp_overlap == "ring":
        notes.append(
            "--tp-comm-overlap: Transformer Engine scatters in pipelined tiles by default; for rings everywhere "
            "give proj_fprop and fc2_fprop the method ring_exchange in the file of --tp-comm-overlap-cfg."
        )
    if layout.zero_stage in FSDP:
        notes.append("Megatron-FSDP shards embedding and head as well, which the plan counts at ZeRO 1.")
        if layout.tp * layout.cp > 1:
            notes.append(
                "Megatron-LM warns: tensor and context parallelism like CUDA_DEVICE_MAX_CONNECTIONS=1, and "
                "Megatron-FSDP refuses it."
            )
    if problem.model.has_experts and _dispatcher(problem, layout) == "flex":
        notes.append("--moe-token-dispatcher-type flex needs DeepEP installed.")
    return tuple(notes)
