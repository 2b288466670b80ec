"""Job and plan in Megatron-LM's arguments, environment and notes, written and read.

Older versions lack some arguments and need others in addition. Source: megatron/training/arguments.py,
megatron/core/transformer/transformer_config.py and megatron/core/transformer/moe/token_dispatcher.py at the tags
of NVIDIA/Megatron-LM named here; core_v0.13.0 and before have neither Megatron-FSDP nor windows.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers import Launch
from milpplan.launchers.expressible import job_refusals, placed_alike, refuse, start_of
from milpplan.launchers.megatron.flags import (
    MUON,
    MUON_SHARDS_ONCE,
    Arguments,
    Values,
    has_indexer,
    model_arguments,
)
from milpplan.launchers.megatron.recomputation import (
    granularity_of,
    kept_notes,
    offload_arguments,
    read_counts,
    read_modules,
    read_offload,
    recompute_arguments,
)
from milpplan.launchers.megatron.rules import (
    MEGATRON,
    Sizes,
    mtp_layers,
    sizes_of,
    stage_sizes,
    stage_string,
)
from milpplan.launchers.records import Refusal, Section
from milpplan.problem import (
    NO_MODULES,
    Accelerator,
    ExpertDispatch,
    HardwareSpec,
    Job,
    Layout,
    ModelSpec,
    Plan,
    Problem,
    validated,
)
from milpplan.problem.hardware import QUANTIZATIONS, PrecisionName

NEWEST = MEGATRON.versions[0]
LACKS: dict[str, tuple[str, ...]] = {
    "core_v0.19.0": (),
    "core_v0.18.0": ("--dsa-kernel-backend",),
    "core_v0.17.0": ("--dsa-kernel-backend",),
    "core_v0.16.0": ("--dsa-kernel-backend",),
    "core_v0.15.0": ("--dsa-kernel-backend", "--moe-shared-expert-gate", "--offload-modules"),
    "core_v0.14.0": (
        "--dsa-kernel-backend",
        "--offload-modules",
        "--moe-shared-expert-gate",
        "--softmax-type",
        "--window-size",
        "--window-attn-skip-freq",
    ),
}
"""Arguments that an export may write and the version's parser does not have."""

WANTS_DEEPEP = ("core_v0.15.0", "core_v0.14.0")
"""Versions whose ``flex`` dispatcher needs an argument to use DeepEP (``_DeepepManager``)."""

NULL_TOKENIZER_NOTE = (
    "This version's NullTokenizer counts a token more: on mock data the padded vocabulary may be larger than the "
    "plan's by one multiple of 128 * tp."
)


def check_version(version: str, given: Container[str]) -> None:
    """Refuse arguments that a version's parser does not have.

    Raises:
        IllegalPlanError: the version lacks an argument.
    """
    lacking = [flag for flag in LACKS.get(version, ()) if flag in given]
    if lacking:
        raise IllegalPlanError(
            f"Megatron-LM {version} has no {', '.join(lacking)}, which this model needs.",
            f"Expected a version that has it, such as {NEWEST}.",
            f"Leave --target-version out, or give one after {version}.",
        )


def for_version(launch: Launch) -> Launch:
    """Adapt a launch to its version.

    Raises:
        IllegalPlanError: the version lacks an argument.
    """
    if launch.version == NEWEST:
        return launch
    check_version(launch.version, launch.arguments.values)
    sections = launch.sections
    if launch.version in WANTS_DEEPEP and launch.arguments.text("--moe-token-dispatcher-type") == "flex":
        sections = tuple(_with(part, {"--moe-enable-deepep": ()}) for part in sections)
    return replace(launch, sections=sections, notes=(*launch.notes, NULL_TOKENIZER_NOTE))


def _with(part: Section, added: dict[str, Values]) -> Section:
    """Add arguments to the section that names the dispatcher."""
    if "--moe-token-dispatcher-type" not in part.arguments:
        return part
    return replace(part, arguments=part.arguments | added)


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
    recompute = recompute_arguments(model, job, plan) | offload_arguments(plan)
    selective = "--recompute-modules" in recompute
    sections = (
        Section("MODEL_ARGS", f"The model: {model.name}.", _model(problem)),
        Section("PARALLEL_ARGS", "Degrees and the places of ranks.", _degrees(problem, layout)),
        Section(
            "STAGE_ARGS",
            "Which layers are where, and what is recomputed.",
            _stages(problem, plan) | recompute,
        ),
        Section("BATCH_ARGS", f"{layout.num_micro_batches} micro-batches a pipeline.", _batch(layout)),
        Section("STATE_ARGS", "Sharding of states, and what overlaps.", _states(problem, layout)),
        Section("KERNEL_ARGS", "Precision and kernels.", _kernels(problem)),
    )
    return Launch(
        **start_of(MEGATRON, version, problem, plan),
        environment=_environment(layout),
        sections=tuple(part for part in sections if part.arguments),
        notes=_notes(problem, layout) + (kept_notes(model, job, layout.recompute_modules) if selective else ()),
    )


def expert_replicas(problem: Problem, layout: Layout) -> int:
    """Return the number of replicas of the experts' weights; 1 without experts."""
    return layout.expert_dp if problem.model.has_experts else 1


def check_problem(problem: Problem, version: str) -> None:
    """Refuse a problem for which Megatron-LM can run no plan.

    Raises:
        IllegalPlanError: Megatron-LM cannot build the model, or does not support such a job or cluster.
    """
    refusals = job_refusals(problem, MEGATRON.name)
    if problem.job.mtp_layers and problem.model.learned_positions:
        why = f"the job trains layers of multi-token prediction, and {problem.model.name} has learned positions"
        refusals.append(Refusal(f"{why} (training/arguments.py, validate_args)"))
    if problem.job.optimizer == "muon" and version != MEGATRON.versions[0]:
        why = f"the job has the optimizer muon, and {version} reduces and shards otherwise"
        refusals.append(Refusal(why))
    if problem.job.precision in ("fp8-blockwise", "mxfp8", "nvfp4") and version != MEGATRON.versions[0]:
        refusals.append(Refusal(f"the job is in {problem.job.precision}, which is not written for {version}"))
    refuse(MEGATRON.name, refusals)
    check_version(version, _model(problem))


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
    if problem.model.has_indexers and layout.tp > 1 and not layout.sequence_parallel:
        raise IllegalPlanError(
            f"The plan has tp={layout.tp} without sequence parallelism, and {problem.model.name} has an indexer.",
            "Expected sequence parallelism: Megatron-LM's absorbed_mla.py refuses such attention without it.",
            "Solve again with --fix sequence_parallel=true.",
        )
    if layout.dp_replicate > 1 and problem.job.optimizer == "muon":
        raise IllegalPlanError(
            f"The plan has dp_replicate={layout.dp_replicate} with the optimizer muon.",
            f"Expected 1: {MUON_SHARDS_ONCE}.",
            "Solve again with --target megatron, or --fix dp_replicate=1.",
        )
    if layout.dp_replicate > 1 and layout.zero_stage not in MEGATRON.hybrid_stages:
        raise IllegalPlanError(
            f"The plan has dp_replicate={layout.dp_replicate} at ZeRO {layout.zero_stage}.",
            "Expected ZeRO 1: Megatron-FSDP adds up the groups once a step, not in every micro-batch.",
            "Solve again with --target megatron, or --fix dp_replicate=1.",
        )


def _degrees(problem: Problem, layout: Layout) -> Pairs:
    pairs: Pairs = {
        "--tensor-model-parallel-size": (str(layout.tp),),
        "--context-parallel-size": (str(layout.cp),),
        "--pipeline-model-parallel-size": (str(layout.pp),),
    }
    if layout.cp > 1:
        gathers: Pairs = {"--cp-comm-type": ("allgather",)}
        pairs |= gathers if problem.model.has_indexers else _context(layout)
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


def _context(layout: Layout) -> Pairs:
    """Name the communication of context parallelism, and the sizes of its two levels where it has two."""
    if layout.ulysses in (1, layout.cp):
        return {"--cp-comm-type": ("p2p" if layout.ulysses == 1 else "a2a",)}
    sizes = str(layout.ulysses), str(layout.cp // layout.ulysses)
    return {"--cp-comm-type": ("a2a+p2p",), "--hierarchical-context-parallel-sizes": sizes}


def _dispatcher(problem: Problem, layout: Layout) -> str:
    """Choose the dispatcher; ``flex`` (DeepEP) needs several expert ranks."""
    if layout.expert_dispatch != "default" and layout.ep > 1:
        return "flex" if layout.expert_dispatch == "deepep" else layout.expert_dispatch
    return "flex" if problem.hardware.software.deduplicated_dispatch and layout.ep > 1 else "alltoall"


def _model(problem: Problem) -> Pairs:
    pairs = model_arguments(problem.model, problem.job.sequence_length)
    return pairs | ({"--mtp-num-layers": (str(problem.job.mtp_layers),)} if problem.job.mtp_layers else {})


def _stages(problem: Problem, plan: Plan) -> Pairs:
    layout = plan.layout
    sizes = tuple(stage.num_layers for stage in plan.virtual_stages)
    if len(sizes) == 1:
        return {}
    if len(set(sizes)) > 1:
        return {"--pipeline-model-parallel-layout": (stage_string(sizes, problem.job.mtp_layers),)}
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
    if layout.dp_replicate > 1:
        pairs["--num-distributed-optimizer-instances"] = (str(layout.dp_replicate),)
    if layout.overlap_grad_reduce:
        pairs["--overlap-grad-reduce"] = ()
    if layout.overlap_param_gather:
        pairs["--overlap-param-gather"] = ()
    if problem.job.grad_dtype == "bf16":
        pairs["--grad-reduce-in-bf16"] = ()
    if problem.job.optimizer == "muon":
        pairs |= {"--optimizer": ("muon",), "--muon-tp-mode": (problem.job.muon_tp_mode,)}
    return pairs


def _kernels(problem: Problem) -> Pairs:
    unfused = problem.job.attention_kernel == "unfused"
    pairs: Pairs = {"--bf16": (), "--attention-backend": ("unfused" if unfused else "auto",)}
    pairs |= RECIPES[problem.job.precision]
    if problem.hardware.software.fp8_weights_only:
        pairs |= dict.fromkeys(weight_flags(problem.job.precision), ())
    return pairs | {"--cross-entropy-loss-fusion": (), "--cross-entropy-fusion-impl": ("native",)}


RECIPES: dict[PrecisionName, Pairs] = {
    "bf16": {},
    "fp8": {"--fp8-format": ("hybrid",), "--fp8-recipe": ("delayed",)},
    "fp8-tensorwise": {"--fp8-format": ("hybrid",), "--fp8-recipe": ("tensorwise",)},
    "fp8-blockwise": {"--fp8-format": ("hybrid",), "--fp8-recipe": ("blockwise",)},
    "mxfp8": {"--fp8-format": ("e4m3",), "--fp8-recipe": ("mxfp8",)},
    "nvfp4": {"--fp4-format": ("e2m1",), "--fp4-recipe": ("nvfp4",)},
}
"""Number formats in Megatron-LM's arguments."""


def weight_flags(precision: PrecisionName) -> tuple[str, ...]:
    """Name the switches that keep weights in the number format alone (``Software.fp8_weights_only``)."""
    if precision == "mxfp8":
        return "--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"
    engine = QUANTIZATIONS[precision].engine
    return {"bf16": (), "fp8": ("--fp8-param-gather",), "nvfp4": ("--fp4-param-gather",)}[engine]


def _environment(layout: Layout) -> dict[str, str]:
    """Set the number of device queues, and what Transformer Engine offloads.

    A single queue keeps the order of communication and compute (training/arguments.py, validate_args);
    Megatron-FSDP needs several. Without the other variable weights would be offloaded, too (validate_args).
    """
    hosts = {} if layout.offload_modules == NO_MODULES else {"NVTE_CPU_OFFLOAD_V1": "1"}
    return hosts | {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if layout.zero_stage in FSDP else "1"}


def _notes(problem: Problem, layout: Layout) -> tuple[str, ...]:
    notes = []
    if not problem.model.learned_positions:
        notes.append("Rotary base and scaling are not part of a plan: add --rotary-base and the like.")
    if problem.model.has_experts:
        notes.append("Nor are the router's scores and losses: add --moe-router-score-function and the like.")
    if getattr(problem.model.kinds[0].mlp, "gated", False):
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


def job_of(given: Arguments, world: int) -> Job:
    """Read the training job.

    Raises:
        InvalidInputError: a number format or an optimizer is not priced.
    """
    sizes = sizes_of(given, world)
    half = given.given("--fp16")
    if not given.given("--bf16") and not half:
        raise InvalidInputError(
            "The run is in fp32, without --bf16 or --fp16.",
            "Expected bf16 or fp16, with or without fp8 or fp4: other formats are not priced.",
            "Add --bf16 to compare it as a run in bf16.",
        )
    if given.text("--optimizer") not in ("adam", *MUON):
        raise InvalidInputError(
            f"--optimizer is {given.text('--optimizer')}.",
            "Expected adam or muon, whose states and update are priced.",
            "Use --optimizer adam to compare it as such a run.",
        )
    # Only bf16 accumulates in fp32 by default (A:1195-1219).
    coarse = given.given("--grad-reduce-in-bf16") or half > given.given("--accumulate-allreduce-grads-in-fp32")
    # PyTorch's FSDP keeps and reduces gradients in the format of its weights.
    coarse |= given.given("--use-torch-fsdp2")
    backend = given.text("--attention-backend")
    local = given.text("--transformer-impl") == "local" and not given.given("--use-flash-attn")
    data = {
        "num_gpus": world,
        "global_batch_size": given.count("--global-batch-size", given.needed("--micro-batch-size") * sizes.dp),
        "sequence_length": given.needed("--seq-length"),
        "precision": _precision(given),
        "attention_kernel": "unfused" if backend in ("unfused", "local") or local else "flash",
        "grad_dtype": "bf16" if coarse else "fp32",
        "mtp_layers": mtp_layers(given),
        **_muon(given),
    }
    return validated(Job, data, "the job that the arguments describe")


def _precision(given: Arguments) -> PrecisionName:
    """Read the number format of matrix products.

    Raises:
        InvalidInputError: the recipe is not priced.
    """
    for bits in ("8", "4"):
        recipe = given.text(f"--fp{bits}-recipe") or ""
        if given.given(f"--fp{bits}-format"):
            known = {
                flags[name][0]: key for key, flags in RECIPES.items() if (name := f"--fp{bits}-recipe") in flags
            }
            if recipe not in known:
                raise InvalidInputError(
                    f"--fp{bits}-recipe is {recipe}.",
                    f"Expected one of {', '.join(known)}: what another does is not known.",
                    f"Leave it out to compare it with {next(iter(known))}.",
                )
            return known[recipe]
    return "bf16"


def check_engine(precision: PrecisionName, accelerator: Accelerator) -> None:
    """Refuse a number format without arithmetic on the accelerator.

    Raises:
        InvalidInputError: the accelerator has no such products.
    """
    if accelerator.engine(precision) is None:
        written = " ".join(word for flag, values in RECIPES[precision].items() for word in (flag, *values))
        raise InvalidInputError(
            f"The arguments ask for {written}, which {accelerator.name} does not have.",
            "Expected Blackwell for mxfp8 and nvfp4, Hopper or Blackwell for blockwise, fp8 for the others: "
            "Transformer Engine has none elsewhere (pytorch/quantization.py).",
            "Choose another recipe, or another --hardware.",
        )


def _muon(given: Arguments) -> dict[str, str]:
    """Read the settings of Muon that change its cost.

    Raises:
        InvalidInputError: the orthogonalization is not priced.
    """
    if given.text("--optimizer") not in MUON:
        return {}
    priced = {"--muon-num-ns-steps": "5", "--muon-fp32-matmul-prec": "medium", "--muon-scalar-optimizer": "adam"}
    for flag, value in priced.items():
        if given.text(flag) != value:
            raise InvalidInputError(
                f"{flag} is {given.text(flag)}.",
                f"Expected {value}, which is priced.",
                f"Use {value} to compare it as such a run.",
            )
    return {"optimizer": "muon", "muon_tp_mode": given.text("--muon-tp-mode") or "duplicated"}


def plan_of(given: Arguments, world: int, model: ModelSpec, job: Job) -> Plan:
    """Read the plan.

    Raises:
        InvalidInputError: a plan cannot represent the stages or the recomputation.
    """
    sizes = sizes_of(given, world)
    modules = read_modules(given, model, job) if granularity_of(given) == "selective" else NO_MODULES
    layout = _layout(given, sizes, job, modules or NO_MODULES)
    layout = layout.model_copy(update={"offload_modules": read_offload(given, model)})
    layers, wrong = stage_sizes(given, sizes.layers, sizes.pp)
    if wrong:
        raise InvalidInputError(
            f"Stages: {wrong}.", "Expected stages that hold every layer once.", "Correct them."
        )
    counts = read_counts(given, layers, has_modules=modules != "")
    spans = pairwise(accumulate(layers, initial=0))
    stages = [
        {"layers": list(span), "recompute": recompute} for span, recompute in zip(spans, counts, strict=True)
    ]
    data = {"layout": layout.model_dump(), "virtual_stages": stages}
    return validated(Plan, data, "the plan that the arguments describe")


def _layout(given: Arguments, sizes: Sizes, job: Job, modules: str) -> Layout:
    vpp, replicas = sizes.vpp, sizes.cp * sizes.dp > 1
    zero = _zero_stage(given) * replicas
    reduces, gathers = given.given("--overlap-grad-reduce"), given.given("--overlap-param-gather")
    # Megatron-LM switches sequence parallelism off where there is nothing to split (A:1433-1439).
    data: dict[str, Any] = {
        "tp": sizes.tp,
        "cp": sizes.cp,
        "ep": sizes.ep,
        "etp": sizes.etp,
        "pp": sizes.pp,
        "dp": sizes.dp,
        "vpp": vpp,
        "micro_batch_size": given.needed("--micro-batch-size"),
        "global_batch_size": job.global_batch_size,
        "sequence_parallel": given.given("--sequence-parallel") and sizes.tp > 1,
        "zero_stage": zero,
        "dp_replicate": _instances(given, sizes.dp, zero),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "overlap_grad_reduce": (reduces and replicas) or zero >= 2,
        "overlap_param_gather": (gathers and zero > 0) or zero == 3,
        "tp_overlap": "ring" if given.given("--tp-comm-overlap") else "none",
        "recompute_modules": modules,
        "ulysses": _ulysses(given, sizes),
        "expert_dispatch": _dispatch(given, sizes),
        "rank_order": "tp-cp-pp-dp" if given.given("--use-tp-pp-dp-mapping") else "tp-cp-dp-pp",
    }
    if vpp == 1:
        # Without interleaving Megatron-LM never overlaps these transfers (A:1010-1018).
        given.given("--no-overlap-p2p-communication")
    if given.count("--microbatch-group-size-per-virtual-pipeline-stage", sizes.pp) != sizes.pp and vpp > 1:
        raise InvalidInputError(
            "--microbatch-group-size-per-virtual-pipeline-stage is not the pipeline size.",
            f"Expected groups of {sizes.pp} micro-batches: the order of work that is simulated.",
            "Leave the flag out to compare it with the usual groups.",
        )
    return validated(Layout, data, "the layout that the arguments describe")


def _dispatch(given: Arguments, sizes: Sizes) -> ExpertDispatch:
    """Return how tokens reach experts.

    Raises:
        InvalidInputError: all ranks gather all tokens, and experts are split besides.
    """
    named: dict[str | None, ExpertDispatch] = {"allgather": "allgather", "alltoall": "alltoall", "flex": "deepep"}
    dispatch = named.get(given.text("--moe-token-dispatcher-type"), "default") if sizes.ep > 1 else "default"
    if dispatch == "allgather" and sizes.etp > 1:
        raise InvalidInputError(
            f"--moe-token-dispatcher-type is allgather (the default), and experts are over {sizes.etp} ranks.",
            "Expected whole experts, or alltoall or flex, which are priced.",
            "Name one of them to compare it as such a run.",
        )
    return dispatch


def _ulysses(given: Arguments, sizes: Sizes) -> int:
    """Return the ranks that exchange heads.

    Raises:
        InvalidInputError: layers differ in their communication, or it is not priced.
    """
    kinds, levels = set(given.texts("--cp-comm-type")), given.texts("--hierarchical-context-parallel-sizes")
    ranks = {"p2p": 1, "a2a": sizes.cp} | ({"a2a+p2p": int(levels[0])} if len(levels) == 2 else {})
    if has_indexer(given):
        ranks = {"allgather": 1}
    if sizes.cp == 1:
        return 1
    if len(kinds) > 1 or not kinds <= set(ranks):
        raise InvalidInputError(
            f"--cp-comm-type is {' '.join(sorted(kinds))}, --hierarchical-context-parallel-sizes "
            f"{' '.join(levels) or 'not given'}.",
            "Expected p2p, a2a, or a2a+p2p with two sizes, for all layers alike: nothing else is priced.",
            "Use p2p to compare it as such a run.",
        )
    return ranks[kinds.pop()]


def _instances(given: Arguments, dp: int, zero: int) -> int:
    """Return the number of groups that shard the optimizer by themselves.

    Raises:
        InvalidInputError: a plan does not have these groups.
    """
    groups = given.count("--num-distributed-optimizer-instances", 1)
    if groups > 1 and (zero != 1 or dp % groups or groups == dp):
        raise InvalidInputError(
            f"--num-distributed-optimizer-instances is {groups}, with dp={dp} and ZeRO {zero}.",
            f"Expected a divisor of dp={dp} below it, and --use-distributed-optimizer without Megatron-FSDP.",
            "Correct it, or leave it out to compare it with one instance.",
        )
    return groups


def _zero_stage(given: Arguments) -> int:
    strategy = given.text("--data-parallel-sharding-strategy")
    sharded = given.given("--use-distributed-optimizer") or given.text("--optimizer") == "dist_muon"
    given.given("--ckpt-format")
    if given.given("--use-torch-fsdp2"):
        given.given("--no-gradient-accumulation-fusion")
        return 3
    if not given.given("--use-megatron-fsdp"):
        return int(sharded)
    # Buffers are registered once, at the start.
    given.given("--fsdp-manual-registration")
    names = {name: stage for stage, name in FSDP.items()} | {"no_shard": 0, "optim": 1}
    return names[strategy or "no_shard"]


_CAPACITY = "--moe-expert-capacity-factor"
_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def _state_bytes(given: Arguments) -> int:
    """Return the bytes of a master weight and two moments of the precision-aware optimizer, per parameter.

    Beside a bf16 weight Transformer Engine (from 2.1 on) keeps the lower 16 bits of an fp32 master weight. With
    scales of fp8 that are not delayed, Megatron-Core keeps it whole. Source: core/optimizer/__init__.py and
    core/optimizer/optimizer_config.py at d98e8a64.
    """
    main, first, second = (
        _STATE_BYTES[given.text(name) or "fp32"]
        for name in ("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    )
    whole = given.given("--fp16") or given.given("--fp4-param-gather")
    whole |= given.given("--fp8-format") and given.text("--fp8-recipe") != "delayed"
    return (main if whole else 2) + first + second


def software_of(
    given: Arguments, hardware: HardwareSpec, model: ModelSpec, ep: int
) -> tuple[HardwareSpec, list[str]]:
    """Set the software options of the hardware that the arguments give, with notes."""
    changes: dict[str, float] = {}
    dispatcher = given.text("--moe-token-dispatcher-type")
    if dispatcher in ("alltoall", "flex") and ep > 1 and model.has_experts:
        changes["deduplicated_dispatch"] = dispatcher == "flex"
    if flags := weight_flags(_precision(given)):
        # MXFP8 without the reuse keeps a bf16 buffer of all weights.
        changes["fp8_weights_only"] = set(map(given.given, flags)) == {True}
    if given.given("--use-precision-aware-optimizer"):
        changes["optimizer_state_bytes"] = _state_bytes(given)
    if float(given.values.get(_CAPACITY, ("0",))[0]) >= 1:
        # Experts are priced as evenly loaded: with room for the mean nothing is dropped.
        given.given(_CAPACITY)
    different = {name: on for name, on in changes.items() if getattr(hardware.software, name) != on}
    notes = [f"software.{name} = {str(on).lower()}, as the arguments say." for name, on in different.items()]
    if model.has_experts and not given.given("--moe-grouped-gemm"):
        notes.append("Without --moe-grouped-gemm experts run one after another; they are priced as one launch.")
    if not given.given("--cross-entropy-loss-fusion"):
        notes.append("Without --cross-entropy-loss-fusion the loss may take more memory than is counted.")
    given.text("--cross-entropy-fusion-impl")
    if given.given("--use-megatron-fsdp") and given.given("--fsdp-double-buffer"):
        notes.append("--fsdp-double-buffer: weights of two layers and gradients of one are counted, not of two.")
    software = hardware.software.model_copy(update=different)
    return hardware.model_copy(update={"software": software}), notes
