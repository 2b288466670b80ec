"""Statement of a measured run as a problem and a plan, with its software and all assumptions.

**Measures** of a source become seconds per step; each conversion is reported, and has an inverse. Sources count
FLOPs in different ways. Here N is the model's FLOPs per token without attention:
- ``model, causal``: N + attention over the causal half (``parameter_counts.model_flops_per_token``);
- ``model, full``: N + attention over the whole matrix;
- ``hardware``: the model's FLOPs plus recomputation: the whole forward of the layers (full), or the forward of the
  attention core (selective).
Source: Narayanan et al. 2021, equation 3 and its appendix; Korthikanti et al. 2022, appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, Literal

from pydantic import ValidationError

from milpplan.errors import IllegalPlanError
from milpplan.problem import (
    V_SCHEDULES,
    HardwareSpec,
    Job,
    Layout,
    ModelSpec,
    Overlay,
    Plan,
    Problem,
    Recompute,
    Schedule,
    VirtualStage,
    applied,
    load_overlay,
    stack_names,
)
from milpplan.problem.reading import plain_reason
from milpplan.simulation import simulate
from milpplan.simulation.layers import model_flops_per_token
from milpplan.simulation.simulator import check_plan
from milpplan.validation.runs.clusters import hardware_of
from milpplan.validation.runs.frameworks import (
    UNKNOWN,
    UNKNOWN_SHARDED,
    FlopCount,
    Framework,
    RecomputeMode,
    framework_of,
    split_with_embeddings,
    stacks_of,
)
from milpplan.validation.runs.models import model_of
from milpplan.validation.runs.records import Measured, Run, UnstatedError
from milpplan.validation.runs.variants import stack_hardware

MAX_DISPATCH: Final = 50.0
"""Maximum ``dispatch_efficiency`` of a description."""


def with_software(
    run: Run, framework: Framework, hardware: HardwareSpec, stacks: bool, notes: list[str]
) -> HardwareSpec:
    """Set the framework's defaults, its kernels, and the constants fitted to it in a description.

    Assumptions are added to ``notes``. ``stacks``: use the fitted constants.
    """
    noted = (run.parallel.noted("attention_kernel"), run.parallel.noted("mode"), run.parallel.precision)
    kernel = ", ".join(str(word or "") for word in noted)
    if run.parallel.noted("fused_rms_norm") is False:
        kernel += ", norm in single operators"
    fields: dict[str, float] = {
        name: value for word, values in framework.kernels if word in kernel for name, value in values
    }
    if _hides_dispatch(run):
        share = hardware.scale_up.processor_fraction
        fields |= {"dispatch_efficiency": min(1 / share, MAX_DISPATCH) if share else MAX_DISPATCH}
        notes.append(f"dispatch of experts behind another micro-batch, of whose compute it takes {share:.0%}")
    hardware = hardware.model_copy(update={"software": framework.software.model_copy(update=fields)})
    measured = run.hardware.measured_busbw_GBps or {}
    if framework.slow_calls_below_bytes_per_s and "allgather_intra" not in measured:
        notes.append(
            "state of the nodes not known (no bandwidth measured before the run): taken as the faster one"
        )
    names = [
        name for stack in stacks_of(run) if (name := f"{stack_hardware(hardware.name)}+{stack}") in _stack_names()
    ]
    if not stacks or not names:
        notes.append(f"no constants fitted to {framework.name} on {hardware.name}")
        return hardware
    return _with_stack(hardware, names[0], notes)


def _with_stack(hardware: HardwareSpec, name: str, notes: list[str]) -> HardwareSpec:
    """Apply a stack's constants to the description, after those of the stack that it is based on."""
    overlay = _overlay(name)
    if overlay is None:
        return hardware
    notes.append(f"constants {name}, fitted to {overlay.provenance.data}")
    return applied(_with_stack(hardware, overlay.base, notes), overlay)


@lru_cache(maxsize=1)
def _stack_names() -> frozenset[str]:
    return frozenset(stack_names())


@lru_cache(maxsize=64)
def _overlay(name: str) -> Overlay | None:
    """Read an overlay once for all runs of a file."""
    return load_overlay(name)


def _hides_dispatch(run: Run) -> bool:
    """Test whether the run overlaps the experts' communication with another micro-batch's compute (Megatron-LM's
    overlap_moe_expert_parallel_comm)."""
    words = [run.parallel.noted(key) for key in ("features", "ep_comm")]
    text = "; ".join(word for word in words if isinstance(word, str)).lower()
    return "ep overlap" in text.replace("no ep overlap", "") or "hybridep, overlap" in text


_MODES: Final[tuple[RecomputeMode, ...]] = ("none", "selective", "full")
MAX_WORK_ITEMS: Final = 4_194_304
"""Maximum number of virtual stages times micro-batches of a run that is simulated."""
MAX_DEGREE: Final = 1_048_576
_NO_SCHEDULE: Final = ("zb", "zero bubble", "zero-bubble", "v-half", "v-min", "dualpipe")
_SPLIT: Final[dict[str, Schedule]] = {
    "zb-h1": "zb-h1",
    "zb-1p": "zb-h1",
    "zbh1": "zb-h1",
    "zb1p": "zb-h1",
    "zb-v": "zb-v",
    "zbv": "zb-v",
    "dualpipe-v": "dualpipe-v",
    "dualpipev": "dualpipe-v",
    "dualpipe": "dualpipe-v",
}
"""Names of schedules with separate weight gradients, and ours. ZB-1p is searched for within the memory of 1F1B,
for which ZB-H1 is the schedule by hand (Qi et al. 2024, arXiv:2401.10241, sections 2.1 and 3). DualPipeV is the
half of DualPipe that holds the weights once (deepseek-ai/DualPipe README)."""
_FEATURES: Final = (
    ("act_cpu_offload", ("True", True), "activations offloaded to the CPU are not modelled"),
    ("cp_comm_type", ("a2a+p2p",), "the source does not say the group sizes of a2a+p2p"),
    ("cp_comm_type", ("all_gather", "allgather"), "context parallelism by all-gather is not modelled"),
)
_KERNELS: Final[tuple[tuple[str, Literal["flash", "unfused"]], ...]] = (
    ("flash", "flash"),
    ("torch", "unfused"),
    ("fused", "unfused"),
)
_16_BIT: Final = ("bf16", "amp_bf16", "fp16", "fp16 o2", "mixed 16-bit", "fp16/bf16")


@dataclass(frozen=True, slots=True)
class Statement:
    """Run as a problem and a plan, with the assumptions made."""

    problem: Problem
    plan: Plan
    assumptions: tuple[str, ...]


def state(
    run: Run, read_as: tuple[str, ...] = (), hardware: HardwareSpec | None = None, stacks: bool = True
) -> Statement:
    """State a run as a problem and a plan.

    Args:
        run: the run.
        read_as: descriptions of values that were ignored in the record, or read as something else.
        hardware: replaces the description that the record's words would choose.
        stacks: use the constants fitted to its framework, if there are any.

    Raises:
        UnstatedError: milpplan cannot express something that the run uses, or too little of the run is known.
    """
    notes = list(read_as)
    _refuse_features(run)
    framework = framework_of(run)
    notes += framework.notes
    if framework in (UNKNOWN, UNKNOWN_SHARDED):
        notes.append(f"source {run.group!r} belongs to {framework.name}")
    told_hardware: list[str] = []
    if hardware is None:
        hardware, told_hardware = hardware_of(run.hardware)
    hardware = with_software(run, framework, hardware, stacks, notes)
    degrees = _degrees(run, notes)
    model, told_model = model_of(run, framework, degrees["tp"])
    try:
        job = _job(run, framework, degrees, notes)
        layout = _layout(run, framework, model, degrees, notes)
        problem = _problem(model, hardware, job)
        plan = _plan(run, framework, problem, layout, notes)
    except ValidationError as error:
        raise UnstatedError(plain_reason(error.errors(include_url=False)[0])) from error
    except IllegalPlanError as error:
        raise UnstatedError(f"{error.seen} {error.expected}".strip()) from error
    return Statement(problem, plan, tuple(dict.fromkeys(told_model + told_hardware + notes)))


def _problem(model: ModelSpec, hardware: HardwareSpec, job: Job) -> Problem:
    if job.precision == "fp8" and hardware.accelerator.fp8 is None:
        raise UnstatedError(f"{hardware.accelerator.name} has no 8-bit matrix engine in its description")
    if model.learned_positions and job.sequence_length > model.max_position_embeddings:
        model = model.model_copy(update={"max_position_embeddings": job.sequence_length})
    return Problem(model=model, hardware=hardware, job=job)


def _refuse_features(run: Run) -> None:
    if run.measured.status in ("error", "unsupported"):
        raise UnstatedError(f"the run has status {run.measured.status}, not a measurement")
    if run.kind != "pretrain":
        raise UnstatedError(f"a run of kind {run.kind} (packed or partly frozen) is not modelled")
    schedule = (run.parallel.schedule or "").lower()
    if schedule not in _SPLIT and any(word in schedule for word in _NO_SCHEDULE):
        raise UnstatedError(f"schedule {run.parallel.schedule} is not modelled")
    if "heterogeneous_stages" in run.flags or run.parallel.noted("uniform") is False:
        raise UnstatedError("stages differ in degrees or recompute single operators")
    if run.parallel.recompute is None and (run.parallel.recompute_detail or "").startswith("per-op"):
        raise UnstatedError("stages recompute single operators")
    if "layout_unknown" in run.flags:
        raise UnstatedError("the layout is not known")
    for key, values, reason in _FEATURES:
        if run.parallel.noted(key) in values:
            raise UnstatedError(reason)


def _degrees(run: Run, notes: list[str]) -> dict[str, int]:
    """Determine tp, pp, cp, dp, whose product is the number of GPUs."""
    parallel, gpus = run.parallel, run.hardware.gpus_total
    known = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp}
    if parallel.fsdp and parallel.tp is None and parallel.pp is None:
        notes.append("tp=1, pp=1, cp=1: plain FSDP")
        known = {name: value or 1 for name, value in known.items()}
    if known["cp"] is None:
        notes.append("cp=1")
    gpus = _completed(known, gpus, parallel.dp, notes)
    missing = [name for name in ("tp", "pp") if known[name] is None]
    if missing or gpus is None:
        missing += ["the number of GPUs"] if gpus is None else []
        raise UnstatedError(f"the source does not say {', '.join(missing)}")
    degrees = {name: value or 1 for name, value in known.items()}
    model_parallel = prod(degrees.values())
    if gpus % model_parallel or gpus > MAX_DEGREE:
        raise UnstatedError(f"{gpus:,} GPUs do not divide into tp x pp x cp = {model_parallel:,}")
    if parallel.dp is not None and parallel.dp * model_parallel != gpus:
        notes.append(f"dp={gpus // model_parallel} from the number of GPUs, not dp={parallel.dp} as printed")
    return degrees | {"dp": gpus // model_parallel}


def _completed(degrees: dict[str, int | None], gpus: int | None, dp: int | None, notes: list[str]) -> int | None:
    """Determine the number of GPUs, and put the degree that is not printed into ``degrees``, from the product of
    the others."""
    missing = [name for name, value in degrees.items() if value is None and name != "cp"]
    given = prod(value or 1 for value in degrees.values())
    if gpus is None and not missing and dp is not None:
        notes.append(f"{given * dp:,} GPUs = dp x tp x pp x cp (not printed)")
        return given * dp
    if gpus is not None and dp is not None and missing and gpus % (given * dp) == 0:
        left = gpus // (given * dp)
        if left == 1 or len(missing) == 1:
            degrees |= dict.fromkeys(missing, 1) | {missing[0]: left}
            notes.append(
                f"{', '.join(f'{name}={degrees[name]}' for name in missing)} from the number of GPUs and dp"
            )
    return gpus


def _job(run: Run, framework: Framework, degrees: dict[str, int], notes: list[str]) -> Job:
    parallel = run.parallel
    length = run.model.seq_len
    if length is None:
        raise UnstatedError("the source does not say the length of the sequences")
    attention = framework.attention
    kernel = parallel.noted("attention_kernel")
    if isinstance(kernel, str):
        attention = next((ours for word, ours in _KERNELS if word in kernel), framework.attention)
        notes.append(f"attention kernel {kernel!r} priced as {attention}")
    elif parallel.noted("flash_attention") is True:
        attention = "flash"
    else:
        notes.append(f"attention kernel {attention}")
    grad: Literal["fp32", "bf16"] = framework.grad_dtype
    if framework.bf16_grad_dtype is not None and "bf16" in (parallel.precision or ""):
        grad = framework.bf16_grad_dtype
    if parallel.noted("mp_mode") == "PURE":
        grad = "bf16"
    return Job(
        num_gpus=prod(degrees.values()),
        global_batch_size=_global_batch(run, degrees["dp"], notes),
        sequence_length=length,
        precision=_precision(parallel.precision, notes),
        attention_kernel=attention,
        grad_dtype=grad,
    )


def _global_batch(run: Run, dp: int, notes: list[str]) -> int:
    parallel = run.parallel
    if parallel.global_batch is not None:
        return parallel.global_batch
    if parallel.grad_accum is None:
        raise UnstatedError("the source does not say the global batch")
    notes.append("global batch = dp x micro-batch x accumulation")
    return dp * (parallel.micro_batch or 1) * parallel.grad_accum


def _precision(text: str | None, notes: list[str]) -> Literal["bf16", "fp8"]:
    word = (text or "").strip().lower()
    if not word:
        notes.append("precision bf16 (not printed)")
        return "bf16"
    if word in _16_BIT:
        if word not in ("bf16", "amp_bf16"):
            notes.append(f"{text} priced as bf16")
        return "bf16"
    if "fp4" in word:
        raise UnstatedError(f"precision {text}: the source does not say which layers stay in bf16")
    if "fp8" in word or "float8" in word:
        if word != "fp8":
            notes.append(f"{text} priced as fp8")
        return "fp8"
    if any(part in word for part in ("bf16", "bfloat16", "fp16", "float16", "mixed")):
        notes.append(f"{text} priced as bf16")
        return "bf16"
    raise UnstatedError(f"precision {text} is not modelled")


def _layout(run: Run, framework: Framework, model: ModelSpec, degrees: dict[str, int], notes: list[str]) -> Layout:
    parallel = run.parallel
    dp, tp = degrees["dp"], degrees["tp"]
    batch = _global_batch(run, dp, [])
    micro = _micro_batch(run, framework, degrees, batch, notes)
    vpp = _interleaving(run, framework, model, degrees["pp"], notes)
    if degrees["pp"] == 1 and vpp > 1:
        notes.append(f"vpp={vpp} without a pipeline counts as 1")
        vpp = 1
    if batch % (dp * micro):
        raise UnstatedError(f"a batch of {batch} does not divide into dp={dp} x micro-batch {micro}")
    if degrees["pp"] * vpp * (batch // (dp * micro)) > MAX_WORK_ITEMS:
        raise UnstatedError(f"more than {MAX_WORK_ITEMS:,} work items a pipeline are too many to simulate")
    moe = model.has_experts
    ep, etp = _expert_degrees(run, framework, degrees, notes) if moe else (1, 1)
    sequence_parallel = _sequence_parallel(run, framework, tp, moe, notes)
    zero = parallel.zero
    if parallel.fsdp and zero is None:
        zero = 3
    if zero is None:
        zero = framework.zero
        notes.append(f"ZeRO {zero} (not printed)")
    if zero >= 2 and degrees["pp"] > 1 and framework.pipelined_zero is not None:
        zero = framework.pipelined_zero
        notes.append(f"sharding in a pipeline priced as ZeRO {zero}: gathered and reduced once a step")
    replicated = dp * degrees["cp"] > 1
    zero = zero if replicated else 0
    groups = _sharding_groups(run, dp * degrees["cp"], notes) if zero else 1
    reduce = replicated and (framework.overlap_grad_reduce or zero >= 2)
    gather = reduce and zero >= 1 and (framework.overlap_param_gather or zero == 3)
    if replicated:
        notes.append(
            f"gradient reduction {'' if reduce else 'not '}overlapped, parameter gather {'' if gather else 'not '}"
        )
    return Layout(
        **degrees,
        ep=ep,
        etp=etp,
        vpp=vpp,
        micro_batch_size=micro,
        global_batch_size=batch,
        sequence_parallel=sequence_parallel,
        zero_stage=zero,
        dp_replicate=groups,
        schedule=_schedule(run, degrees["pp"], vpp, notes),
        overlap_grad_reduce=reduce,
        overlap_param_gather=gather,
        ulysses=degrees["cp"] if parallel.noted("cp_comm_type") == "a2a" else 1,
    )


def _sharding_groups(run: Run, replicas: int, notes: list[str]) -> int:
    """Return the number of groups that shard states by themselves (InternEvo's size of zero1)."""
    size = run.parallel.noted("zero1_group")
    if not isinstance(size, int) or size < 2 or replicas % size:
        return 1
    notes.append(f"ZeRO within groups of {size} replicas")
    return replicas // size


def _schedule(run: Run, pp: int, vpp: int, notes: list[str]) -> Schedule:
    named = _SPLIT.get((run.parallel.schedule or "").lower())
    if named is not None and pp > 1:
        notes.append(f"schedule {run.parallel.schedule} priced as {named}")
        return named
    return "interleaved" if vpp > 1 else "1f1b"


def _interleaving(run: Run, framework: Framework, model: ModelSpec, pp: int, notes: list[str]) -> int:
    """Return the virtual stages per rank: two where the schedule is a V, else the printed number.

    Where none is printed it is one; for a schedule that is named interleaved, the minimum number with equal
    stages, except the first and the last.
    """
    printed = run.parallel.vpp
    if pp == 1:
        return printed or 1
    if _SPLIT.get((run.parallel.schedule or "").lower()) in V_SCHEDULES:
        return 2
    if printed is not None:
        return printed
    if "interleaved" in (run.parallel.schedule or "").lower():
        for vpp in range(2, model.num_layers // pp + 1):
            if len(set(framework.split(model, pp * vpp)[1:-1])) == 1:
                notes.append(f"vpp={vpp} (not printed, interleaved)")
                return vpp
    notes.append("no interleaving (vpp not printed)")
    return 1


def _micro_batch(run: Run, framework: Framework, degrees: dict[str, int], batch: int, notes: list[str]) -> int:
    parallel, dp, pp = run.parallel, degrees["dp"], degrees["pp"]
    if parallel.micro_batch is not None:
        return parallel.micro_batch
    if parallel.grad_accum is not None and batch % (dp * parallel.grad_accum) == 0:
        notes.append("micro-batch from the global batch and the accumulation")
        return batch // (dp * parallel.grad_accum)
    if framework.micro_batch_a_stage and pp > 1 and batch % (dp * pp) == 0:
        notes.append(f"{pp} micro-batches, one a pipeline rank (not printed, {framework.name}'s default)")
        return batch // (dp * pp)
    notes.append("micro-batch 1 (not printed)")
    return 1


def _sequence_parallel(run: Run, framework: Framework, tp: int, moe: bool, notes: list[str]) -> bool:
    given = run.parallel.sp
    if tp == 1:
        return False
    if given is None:
        given = framework.sequence_parallel or moe
        notes.append(f"{'with' if given else 'without'} sequence parallelism (not printed)")
    return given


def _expert_degrees(run: Run, framework: Framework, degrees: dict[str, int], notes: list[str]) -> tuple[int, int]:
    ep, etp = run.parallel.ep, run.parallel.etp
    if ep is None and run.parallel.fsdp:
        raise UnstatedError("the source does not say how the experts are spread")
    if ep is None:
        ep = 1
        notes.append("ep=1 (not printed)")
    if etp is None:
        etp = degrees["tp"] if framework.experts_share_tp else 1
        notes.append(f"etp={etp} (not printed)")
    return ep, etp


def _plan(run: Run, framework: Framework, problem: Problem, layout: Layout, notes: list[str]) -> Plan:
    """Complete the layout with stages and recomputation.

    Recomputation that is not printed is the least that fits, from the framework's default on; a run that was out
    of memory has the default.
    """
    counts = _layers_a_stage(run, framework, problem.model, layout, notes)
    modes = _recompute_modes(run, framework, notes)
    if run.measured.status != "ok":
        modes = modes[:1]
    for mode in modes:
        plan = Plan(layout=layout, virtual_stages=_stages(counts, mode))
        check_plan(problem, plan)
        if len(modes) == 1 or simulate(problem, plan).fits:
            break
    else:
        mode = modes[0]
        plan = Plan(layout=layout, virtual_stages=_stages(counts, mode))
    if run.parallel.recompute is None and not any("recomputation" in note for note in notes):
        why = "the least that fits" if mode != modes[0] else f"{framework.name}'s default"
        notes.append(f"recomputation {mode} (not printed; {why})")
    return plan


def _stages(counts: tuple[int, ...], mode: RecomputeMode) -> tuple[VirtualStage, ...]:
    """Make virtual stages with one recomputation for all layers."""
    stages, first = [], 0
    for count in counts:
        recompute = Recompute(full=count if mode == "full" else 0, selective=count if mode == "selective" else 0)
        stages.append(VirtualStage(layers=(first, first + count), recompute=recompute))
        first += count
    return tuple(stages)


def _recompute_modes(run: Run, framework: Framework, notes: list[str]) -> tuple[RecomputeMode, ...]:
    """Return the recomputation that is printed, or those that may have been used, the least first."""
    mode, detail = run.parallel.recompute, run.parallel.recompute_detail
    if mode is None and "remat" in (detail or ""):
        # NVIDIA/dgxc-benchmarking@v24.11.1 maxtext/configure.sh saves projections, not the inside of the MLP.
        notes.append(f"recomputation {detail!r} priced as full")
        return ("full",)
    if mode is None and run.model.name in framework.selective_models:
        notes.append(f"recomputation selective, as in the recipe of {run.model.name} (not printed)")
        return ("selective",)
    if mode is None:
        return _MODES[_MODES.index(framework.recompute) :]
    if detail and mode == "selective":
        notes.append(f"recomputation {detail[:80]!r} priced as selective")
    return (mode,)


def _layers_a_stage(
    run: Run, framework: Framework, model: ModelSpec, layout: Layout, notes: list[str]
) -> tuple[int, ...]:
    stages = layout.num_virtual_stages
    partition = run.parallel.noted("pp_partition")
    balanced = (run.parallel.extra or {}).get("asymmetric_pp")
    if isinstance(partition, str) and "embedding" in partition:
        counts = split_with_embeddings(model, stages)
    else:
        split = next((how for flag, how in framework.flagged_splits if flag in run.flags), framework.split)
        counts = split(model, stages)
    if balanced:
        notes.append(f"stages: {balanced}")
    if len(set(counts)) > 1:
        notes.append(f"layers a virtual stage: {_counts_text(counts)}")
    return counts


def _counts_text(counts: tuple[int, ...]) -> str:
    """Write runs of equal counts, as ``3, 4 x 30, 3``."""
    parts: list[tuple[int, int]] = []
    for count in counts:
        if parts and parts[-1][0] == count:
            parts[-1] = (count, parts[-1][1] + 1)
        else:
            parts.append((count, 1))
    return ", ".join(f"{count} x {times}" if times > 1 else f"{count}" for count, times in parts)


TERA: Final = 1e12
SOURCE_PEAK: Final = {
    ("dgx-a100-40", "bf16"): 312e12,
    ("dgx-a100-80", "bf16"): 312e12,
    ("dgx-h100", "bf16"): 989e12,
    ("dgx-h100", "fp8"): 1979e12,
    ("gb200-nvl72", "bf16"): 2450e12,
    ("gb200-nvl72", "fp8"): 4900e12,
}
"""FLOP/s that sources divide by, where they are known; else the peak of the hardware description."""


@dataclass(frozen=True, slots=True)
class StepMeasure:
    """Measured step, and the source's quantity that it comes from."""

    step_time_s: float
    how: str


def flops_per_token(problem: Problem, count: FlopCount, recompute: str = "none") -> float:
    """Count FLOPs per token as a source does; ``recompute`` other than ``none`` gives hardware FLOPs.

    Full attention counts twice the keys of the causal half, including those outside a sliding window.
    """
    model, length = problem.model, problem.job.sequence_length
    causal = model_flops_per_token(model, length)
    full = model_flops_per_token(model, 2 * length)
    counted = causal if count == "causal" else full
    if recompute == "full":
        head = 6.0 * model.hidden_size * model.vocab_size
        return counted + (counted - head) / 3
    if recompute == "selective":
        attention = 2 * (full - causal) if count == "full" else full - causal
        return counted + attention / 3
    return counted


def recompute_of(statement: Statement) -> str:
    """Return the plan's only recompute mode."""
    stages = statement.plan.virtual_stages
    if any(stage.recompute.full for stage in stages):
        return "full"
    return "selective" if any(stage.recompute.selective for stage in stages) else "none"


def step_measure(run: Run, statement: Statement) -> StepMeasure | None:
    """Return the step time of a run: as printed, else from tokens/s, else from FLOP/s, else from a utilisation."""
    measured, problem = run.measured, statement.problem
    if measured.status != "ok":
        return None
    if measured.step_time_s is not None:
        return StepMeasure(measured.step_time_s, "step time")
    tokens = statement.plan.layout.global_batch_size * problem.job.sequence_length
    share = tokens / statement.plan.layout.num_gpus
    if measured.tokens_per_s_per_gpu:
        return StepMeasure(share / measured.tokens_per_s_per_gpu, "tokens/s")
    flops_per_s, how = _rate(run, measured, statement)
    if not flops_per_s:
        return None
    count = framework_of(run).flops
    hardware = how.startswith("hardware")
    per_token = flops_per_token(problem, count, recompute_of(statement) if hardware else "none")
    return StepMeasure(per_token * share / flops_per_s, f"{how}, {count} attention")


def _rate(run: Run, measured: Measured, statement: Statement) -> tuple[float, str]:
    """Return FLOP/s per GPU and the kind of FLOPs; (0, "") where none is printed."""
    if measured.tflops_per_gpu:
        words = (measured.tflops_kind or "").lower()
        kind = "hardware" if any(word in words for word in ("hardware", "hfu", "hw ")) else "model"
        return measured.tflops_per_gpu * TERA, f"{kind} FLOP/s"
    hardware, precision = statement.problem.hardware, statement.problem.job.precision
    engine = hardware.accelerator.engine(precision)
    assert engine is not None
    peak = SOURCE_PEAK.get((hardware.name, precision), engine.peak_flops_per_s)
    if measured.mfu:
        return measured.mfu * peak, "model FLOPs utilisation"
    if measured.hfu:
        return measured.hfu * peak, "hardware FLOPs utilisation"
    return 0.0, ""


def rates(statement: Statement, step_time_s: float, count: FlopCount) -> dict[str, float]:
    """Compute tokens/s, model FLOP/s and hardware FLOP/s per GPU from a step time."""
    layout, problem = statement.plan.layout, statement.problem
    tokens = layout.global_batch_size * problem.job.sequence_length / layout.num_gpus / step_time_s
    recompute = recompute_of(statement)
    return {
        "tokens_per_s_per_gpu": tokens,
        "model_flops_per_s_per_gpu": tokens * flops_per_token(problem, count),
        "hardware_flops_per_s_per_gpu": tokens * flops_per_token(problem, count, recompute),
    }
