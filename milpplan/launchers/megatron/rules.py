"""Megatron-LM's rules, restated: layouts that its argument checks, its configuration or its first step refuse.

Each rule has a name, its source (NVIDIA/Megatron-LM at d98e8a64) and a function that describes the violation, if
there is one. A: training/arguments.py; T: core/transformer/transformer_config.py; M:
core/model_parallel_config.py; P: core/parallel_state.py; S: core/pipeline_parallel/schedules.py; N:
core/num_microbatches_calculator.py; L: core/transformer/pipeline_parallel_layer_layout.py.

``MEGATRON`` declares the layouts that Megatron-LM can run.
**Stages**: layers of every virtual stage and their recomputation; several arguments can give them.
Source: NVIDIA/Megatron-LM at d98e8a64, training/arguments.py:928-1009,
core/transformer/transformer_config.py:2229-2415, core/transformer/transformer_block.py:175-190.

A string gives uneven stages: ``E`` embedding, ``t`` layer, ``m`` layer of multi-token prediction, ``L`` loss,
``|`` between virtual stages. ``x*n`` repeats a character and ``(...)*n`` a group; commas are ignored. The k-th
part is virtual stage k (chunk k // pp of rank k % pp).
Source: megatron/core/transformer/pipeline_parallel_layer_layout.py at d98e8a64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod

from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.capabilities import TRANSFORMER_ENGINE, Capability, Limit, Mode, RowRule, shared_indexers
from milpplan.launchers.megatron.flags import COMMIT, MUON, MUON_SHARDS_ONCE, Arguments
from milpplan.launchers.megatron.recomputation import selective_modules
from milpplan.problem import NO_MODULES, MixtureOfExperts, Problem, module_set
from milpplan.problem.reading import shown

MAX_CHARACTERS = 100_000
"""Maximum length of a string after repetition; no model has more layers."""


def stage_string(layers: tuple[int, ...], mtp_layers: int = 0) -> str:
    """Write the string of stages with given numbers of layers; equal neighbours are written once."""
    parts = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    end = "m" * mtp_layers + "L"
    if len(parts) == 1:
        return f"E{parts[0]}{end}"
    inner = [(part, len(list(same))) for part, same in groupby(parts[1:-1])]
    middle = "".join(f"({part}|)*{times}" if times > 1 and part else f"{part}|" * times for part, times in inner)
    return f"E{parts[0]}|{middle}{parts[-1]}{end}"


def stage_layers(text: str, mtp_layers: int = 0) -> tuple[int, ...]:
    """Return the number of layers of every virtual stage, in model order.

    Raises:
        InvalidInputError: Megatron-LM's ``validate_layer_layout`` refuses the string, or it places the layers of
            multi-token prediction before the last stage, where a plan has them.
    """
    if len(text) > MAX_CHARACTERS:
        raise _wrong(text, "it is too long")
    text = text.replace(",", "")
    for repeated in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        # Sizes are checked first, because repetitions may need more characters than memory holds.
        total = 0
        for match in re.finditer(repeated, text):
            total += MAX_CHARACTERS + 1 if len(match[2]) > 5 else len(match[1]) * int(match[2])
            if total > MAX_CHARACTERS:
                raise _wrong(text, f"{shown(match[0])} repeats too often")
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
        if len(text) > MAX_CHARACTERS:
            raise _wrong(text, "it is too long")
    strange = sorted(set(text) - set("EtmL|"))
    if strange:
        raise _wrong(text, f"it holds {shown(strange[0])}")
    last = "m" * mtp_layers + "L"
    if text.count("m") != mtp_layers or (mtp_layers and not text.endswith(last)):
        there = f"{text.count('m')} layers of multi-token prediction (m), --mtp-num-layers {mtp_layers}"
        raise _wrong(text, f"{there}; a plan has them all, right before the loss")
    if mtp_layers:
        text = text.removesuffix(last) + "L"
    order = text.replace("|", "")
    if order != f"E{'t' * order.count('t')}L":
        raise _wrong(text, "embedding (E), layers (t) and loss (L) do not come once each and in this order")
    if text[0] != "E" or text[-1] != "L":
        raise _wrong(text, "embedding and loss are not in the first and the last part, where a plan has them")
    return tuple(part.count("t") for part in text.split("|"))


def _wrong(text: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"--pipeline-model-parallel-layout is {shown(text)}: {why}.",
        "Expected E first, L last, t for every layer and | between virtual stages, such as 'Et*19|t*21|t*20L'.",
        "Correct the string (core/transformer/pipeline_parallel_layer_layout.py).",
    )


ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
ACCOUNTS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
WAYS = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)


def mtp_layers(given: Arguments) -> int:
    """Return the number of layers of multi-token prediction."""
    return given.number("--mtp-num-layers") or 0


def virtual_stages(given: Arguments, layers: int, pp: int) -> int:
    """Return the number of virtual stages per rank (vpp)."""
    text = given.text(WAYS[2])
    if text is not None:
        return max(len(stage_layers(text, mtp_layers(given))) // pp, 1)
    chunk = given.number(WAYS[0])
    if chunk:
        return max((layers + sum(given.given(flag) for flag in ACCOUNTS)) // pp // chunk, 1)
    return max(given.count(WAYS[1], 1), 1)


def stage_sizes(given: Arguments, layers: int, pp: int) -> tuple[tuple[int, ...], str]:
    """Return the layers of every virtual stage in model order, or an empty tuple and a description of the
    error."""
    given_flags = [flag for flag in WAYS if given.given(flag)]
    ends = [flag for flag in ENDS if given.given(flag)]
    accounts = [flag for flag in ACCOUNTS if given.given(flag)]
    if len(given_flags) > 1:
        return (), f"{' and '.join(given_flags)} are given together"
    if (ends and accounts) or (WAYS[2] in given_flags and ends + accounts) or (WAYS[0] in given_flags and ends):
        return (), f"{' and '.join(given_flags + ends + accounts)} do not go together"
    if WAYS[2] in given_flags:
        return _by_string(given.text(WAYS[2]) or "", layers, pp, mtp_layers(given))
    vpp = virtual_stages(given, layers, pp)
    if ends:
        return _by_ends([given.number(flag) for flag in ENDS], layers, pp, vpp)
    return _evenly(layers, pp, vpp, given.given(ACCOUNTS[0]), given.given(ACCOUNTS[1]), given.number(WAYS[0]))


def _by_string(text: str, layers: int, pp: int, mtp_layers: int) -> tuple[tuple[int, ...], str]:
    sizes = stage_layers(text, mtp_layers)
    if len(sizes) % pp:
        return (), f"the layout string has {len(sizes)} virtual stages for pp={pp}"
    if sum(sizes) != layers:
        return (), f"the layout string places {sum(sizes)} layers of {layers}"
    return sizes, ""


def _evenly(
    layers: int, pp: int, vpp: int, embedding: bool, loss: bool, chunk: int | None
) -> tuple[tuple[int, ...], str]:
    """Split the layers into equal virtual stages; the embedding and the loss may count as a layer each."""
    total = layers + embedding + loss
    if total % pp:
        return (), f"{total} layers are no multiple of pp={pp}; uneven stages need a layout string"
    if (total // pp) % (chunk or vpp):
        return (), f"the {total // pp} layers of a rank are no multiple of {chunk or vpp}"
    sizes = [total // pp // vpp] * (pp * vpp)
    sizes[0] -= embedding
    sizes[-1] -= loss
    return (tuple(sizes), "") if min(sizes) >= 0 else ((), "a virtual stage would hold fewer layers than none")


def _by_ends(ends: list[int | None], layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], str]:
    """Split the layers where the first and last rank have their own numbers and the others equal shares."""
    named = [size for size in ends if size is not None]
    inner = pp - len(named)
    left = layers - sum(named)
    if min(named) < 1 or inner < 0 or left < 0 or (left > 0) != (inner > 0):
        return (), f"{' and '.join(map(str, named))} layers at the ends leave {left} for {inner} ranks"
    if inner and left % inner:
        return (), f"the {left} layers left are no multiple of the {inner} ranks left"
    ranks = [left // inner if inner else 0] * pp
    ranks[0] = ends[0] or ranks[0]
    ranks[-1] = ends[1] or ranks[-1]
    if any(size % vpp for size in ranks):
        return (), f"layers of the ranks ({', '.join(map(str, ranks))}) are no multiples of vpp={vpp}"
    return tuple(ranks[rank] // vpp for _ in range(vpp) for rank in range(pp)), ""


MAX_LAYERS = 10_000
"""Maximum number of layers, equal to that of a run of layers in a model."""
MODULES = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts",
    "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc",
)  # fmt: skip
"""Values of ``--recompute-modules`` (T:1940-1962)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that most rules depend on. ``dp`` and ``edp`` are rounded down, because rules of divisibility come
    first."""

    given: Arguments
    world: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    experts: int
    layers: int
    vpp: int

    @property
    def dp(self) -> int:
        """Number of replicas of dense layers, without context parallelism."""
        return max(self.world // (self.tp * self.cp * self.pp), 1)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a pipeline per step."""
        size = self.given.needed("--micro-batch-size") * self.dp
        return self.given.count("--global-batch-size", size) // size


def sizes_of(given: Arguments, world: int) -> Sizes:
    """Compute the sizes that arguments give on a number of processes."""
    experts = given.count("--num-experts", 0)
    tp = given.needed("--tensor-model-parallel-size")
    pp, layers = given.needed("--pipeline-model-parallel-size"), given.needed("--num-layers")
    # Without experts it has no effect.
    etp = given.count("--expert-tensor-parallel-size", tp)
    if layers > MAX_LAYERS:
        raise InvalidInputError(
            f"--num-layers is {layers}.", f"Expected at most {MAX_LAYERS} layers.", "Correct --num-layers."
        )
    return Sizes(
        given=given,
        world=world,
        tp=tp,
        cp=given.needed("--context-parallel-size"),
        pp=pp,
        ep=given.needed("--expert-model-parallel-size"),
        etp=etp if experts else 1,
        experts=experts,
        layers=layers,
        vpp=virtual_stages(given, layers, pp),
    )


Check = Callable[[Sizes], str]


def _divides(small: int, large: int, words: str) -> str:
    return "" if large % small == 0 else f"{words}: {large} is no multiple of {small}"


def _heads(s: Sizes) -> str:
    heads = s.given.needed("--num-attention-heads")
    groups = s.given.number("--num-query-groups") if s.given.given("--group-query-attention") else None
    if groups and groups % s.tp and s.tp % groups:
        return f"{groups} query groups are neither a multiple nor a divisor of tp={s.tp}"
    return _divides(s.tp, heads, "attention heads over tp")


def _widths(s: Sizes) -> str:
    shared = s.given.count("--moe-shared-expert-intermediate-size", 0)
    width = s.given.number("--ffn-hidden-size")
    own = s.given.number("--moe-ffn-hidden-size") or width
    frequency = s.given.text("--moe-layer-freq")
    dense = width if not s.experts or frequency not in (None, "1") else None
    parts = ((dense, s.tp, "feed-forward width over tp"), (shared, s.tp, "shared experts' width over tp"),
             (own if s.experts else None, s.etp, "experts' width over etp"))  # fmt: skip
    violations = [_divides(by, size, words) for size, by, words in parts if size]
    return next((text for text in violations if text), "")


def _experts(s: Sizes) -> str:
    if not s.experts:
        return "" if s.ep == 1 else f"ep={s.ep} without --num-experts"
    return _divides(s.ep, s.experts, "experts over ep")


def _expert_order(s: Sizes) -> str:
    if not s.given.given("--use-tp-pp-dp-mapping") or s.pp == 1 or not s.experts:
        return ""
    replicas = s.world // (s.etp * s.ep * s.pp)
    return "" if replicas == s.dp else f"{replicas} replicas of experts and {s.dp} of the attention"


def _instances(s: Sizes) -> str:
    groups = s.given.count("--num-distributed-optimizer-instances", 1)
    violation = _divides(groups, s.dp * s.cp, "dp * cp over instances of the optimizer")
    experts = s.world // (s.etp * s.ep * s.pp)
    return violation or (_divides(groups, experts, "replicas of experts over instances") if s.experts else "")


def _interleaving(s: Sizes) -> str:
    if s.vpp == 1:
        return ""
    if s.pp == 1:
        return f"vpp={s.vpp} with one pipeline rank"
    if s.given.given("--no-overlap-p2p-communication") and s.pp == 2:
        return "interleaving over two ranks without overlapped transfers"
    group = s.given.count("--microbatch-group-size-per-virtual-pipeline-stage", s.pp)
    count = s.micro_batches
    if not s.pp <= group <= count:
        return f"{count} micro-batches in groups of {group} for pp={s.pp}"
    return f"{count} micro-batches leave {count % group} in the last group" if 0 < count % group < s.pp else ""


def _recompute(s: Sizes) -> str:
    method, number = s.given.text("--recompute-method"), s.given.number("--recompute-num-layers")
    granularity = s.given.text("--recompute-granularity")
    if granularity == "full":
        if method is None or number is None:
            return "full without --recompute-method and --recompute-num-layers"
        return "" if number > 0 else "--recompute-num-layers 0 never ends (core/recompute.py)"
    if granularity == "selective" and (method or number is not None):
        return "selective with --recompute-method or --recompute-num-layers"
    return ""


DELAYED = frozenset(("moe_act", "layernorm"))
"""Modules that delayed scaling of fp8 does not recompute."""


def _modules(s: Sizes) -> str:
    if not s.given.given("--recompute-modules"):
        return ""
    modules = s.given.texts("--recompute-modules")
    unknown = [name for name in modules if name not in MODULES]
    if unknown:
        return f"there is no module {unknown[0]}"
    if "moe_act" in modules and not s.given.given("--moe-grouped-gemm"):
        return "moe_act without --moe-grouped-gemm"
    if "mla_up_proj" in modules and not s.given.given("--multi-latent-attention"):
        return "mla_up_proj without --multi-latent-attention"
    delayed = s.given.given("--fp8-format") and s.given.text("--fp8-recipe") == "delayed"
    return "moe_act or layernorm with delayed fp8" if delayed and DELAYED & set(modules) else ""


def _gather(s: Sizes) -> str:
    if not s.given.given("--overlap-param-gather"):
        return ""
    sharded = s.given.given("--use-distributed-optimizer") or s.given.given("--use-megatron-fsdp")
    sharded |= s.given.text("--optimizer") == "dist_muon"
    overlaps = sharded and s.given.given("--overlap-grad-reduce")
    return "" if overlaps else "without sharding or --overlap-grad-reduce"


def _needs(flag: str, *others: str) -> Check:
    """Make the check for a flag that needs at least one of several others."""

    def check(s: Sizes) -> str:
        if not s.given.given(flag) or any(s.given.given(other) for other in others):
            return ""
        return f"{flag} without {' or '.join(others)}"

    return check


def _excludes(flag: str, other: str) -> Check:
    """Make the check for two flags that exclude each other."""

    def check(s: Sizes) -> str:
        return f"{flag} together with {other}" if s.given.given(flag) and s.given.given(other) else ""

    return check


def _fsdp(s: Sizes) -> str:
    if not s.given.given("--use-megatron-fsdp"):
        apart = s.given.text("--ckpt-format") == "fsdp_dtensor"
        return "--ckpt-format fsdp_dtensor without Megatron-FSDP" if apart else ""
    if s.given.text("--optimizer") in MUON:
        return "Megatron-FSDP with --optimizer muon"
    stored = s.given.text("--ckpt-format") == "fsdp_dtensor"
    return "" if stored else "Megatron-FSDP without --ckpt-format fsdp_dtensor"


def _torch_fsdp(s: Sizes) -> str:
    """Check what PyTorch's FSDP excludes and needs."""
    if not s.given.given("--use-torch-fsdp2"):
        return ""
    excluded = [flag for flag in ("--use-distributed-optimizer", "--fp16") if s.given.given(flag)]
    excluded += [f"{name} above 1" for name, size in (("pp", s.pp), ("ep", s.ep)) if size > 1]
    if excluded:
        return f"PyTorch's FSDP with {excluded[0]}"
    needed = ("--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights")
    missing = [flag for flag in needed if not s.given.given(flag)]
    if s.given.text("--ckpt-format") not in ("torch_dist", "torch_dcp"):
        missing.append("--ckpt-format torch_dist or torch_dcp")
    return f"PyTorch's FSDP without {missing[0]}" if missing else ""


def _sequence(s: Sizes) -> str:
    length = s.given.needed("--seq-length")
    if s.cp > 1 and length % (2 * s.cp):
        return _divides(2 * s.cp, length, "tokens over twice cp")
    if s.tp > 1 and s.given.given("--sequence-parallel"):
        return _divides(s.tp, length // s.cp, "tokens of a context-parallel rank over tp")
    return ""


def _windows(s: Sizes) -> str:
    sinks, kinds = s.given.text("--softmax-type") != "vanilla", set(s.given.texts("--cp-comm-type"))
    if s.cp == 1 or kinds == {"a2a"} or not (sinks or s.given.given("--window-size")):
        return ""
    return f"{'sinks' if sinks else 'sliding windows'} with --cp-comm-type {' '.join(sorted(kinds))}, not a2a"


def _levels(s: Sizes) -> str:
    levels = s.given.texts("--hierarchical-context-parallel-sizes")
    if not levels:
        return "a2a+p2p without sizes" if "a2a+p2p" in s.given.texts("--cp-comm-type") else ""
    return (
        "" if prod(map(int, levels)) == s.cp else f"{' x '.join(levels)} context-parallel ranks are not cp={s.cp}"
    )


RULES: Mapping[str, tuple[str, Check]] = {
    "world_is_whole_replicas": (
        "A:426-447", lambda s: _divides(s.tp * s.cp * s.pp, s.world, "processes over tp * cp * pp")),
    "heads_divide": ("T:1446-1468", _heads),
    "widths_divide": ("core/utils.py:592", _widths),
    "experts_divide": ("A:1655-1658, T:1595", _experts),
    "expert_grid_divides_world": (
        "P:881", lambda s: _divides(s.etp * s.ep * s.pp, s.world, "processes over etp * ep * pp")
        if s.experts else ""),
    "biased_experts_are_not_split": (
        "T:2612-2615", lambda s: "etp above 1 with biases" if s.experts and s.etp > 1
        and not s.given.given("--disable-bias-linear") else ""),
    "experts_keep_stages_and_replicas": ("P:898-902", _expert_order),
    "sequence_parallel_with_experts": (
        "M:560-565, an error up to core 0.16", lambda s: "ep and tp above 1 without --sequence-parallel"
        if min(s.ep, s.tp) > 1 and not s.given.given("--sequence-parallel") else ""),
    "sequence_divides": ("A:1335-1338, core/tensor_parallel/mappings.py:74", _sequence),
    "context_levels_multiply": ("A:580-585", _levels),
    "whole_windows": ("TransformerEngine, context_parallel.py:5057-5067", _windows),
    "positions_suffice": (
        "A:1353-1355", lambda s: "--max-position-embeddings is below --seq-length"
        if s.given.needed("--max-position-embeddings") < s.given.needed("--seq-length") else ""),
    "mtp_positions": (
        "A:882-887", lambda s: "--mtp-num-layers without rotary positions"
        if mtp_layers(s.given) and s.given.text("--position-embedding-type") not in ("rope", "none") else ""),
    "layers_divide": (
        "A:928-998, L:86-110, T:2229-2415, core/transformer/transformer_block.py:175",
        lambda s: stage_sizes(s.given, s.layers, s.pp)[1]),
    "batch_divides": (
        "N:381", lambda s: _divides(
            s.given.needed("--micro-batch-size") * s.dp,
            s.given.count("--global-batch-size", s.given.needed("--micro-batch-size") * s.dp),
            "the global batch over micro-batch * dp")),
    "optimizer_instances_divide": ("P:921-931, P:1447-1449", _instances),
    "interleaving": ("A:1000-1009, S:1160-1180", _interleaving),
    "recompute": ("T:1913-1932, A:1425-1428", _recompute),
    "recompute_modules": ("T:1940-2006", _modules),
    "param_gather_overlap": ("A:1024-1029", _gather),
    "tp_overlap_needs_sequence_parallel": ("A:1441", _needs("--tp-comm-overlap", "--sequence-parallel")),
    "fp8_gather_is_sharded": (
        "A:1095",
        _needs("--fp8-param-gather", "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2")),
    "fp8_gather_is_fp8": ("A:1090-1098", _needs("--fp8-param-gather", "--fp8-format")),
    "fp4_gather_is_fp4": ("A:1104", _needs("--fp4-param-gather", "--fp4-format")),
    "fp4_or_fp8": ("A:1100", _excludes("--fp4-format", "--fp8-format")),
    "mxfp8_gather_is_fp8": (
        "core/distributed/distributed_data_parallel_config.py:259",
        _needs("--reuse-grad-buf-for-mxfp8-param-ag", "--fp8-param-gather")),
    "fsdp_checkpoints": ("A:1150-1170, A:1684", _fsdp),
    "torch_fsdp": ("A:1031-1045", _torch_fsdp),
    "latent_attention_has_no_groups": ("A:1973", _excludes("--multi-latent-attention", "--group-query-attention")),
    "one_number_format": ("A:1195", _excludes("--fp16", "--bf16")),
    "one_activation": ("A, core_transformer_config_from_args", lambda s: _excludes("--swiglu", "--quick-geglu")(s)
        or _excludes("--swiglu", "--squared-relu")(s)),
    "loss_fusion": (
        "A:1697-1702", lambda s: "--cross-entropy-fusion-impl te is switched off"
        if s.given.given("--cross-entropy-loss-fusion") and s.given.text("--cross-entropy-fusion-impl") == "te"
        else ""),
}  # fmt: skip
"""Rules by name, with source and check. Rules that other rules rely on come first."""


def broken_rules(given: Arguments, world: int) -> dict[str, str]:
    """List the rules that arguments break on a number of processes, with descriptions.

    The check does not mark arguments as looked up.
    """
    sizes = sizes_of(Arguments(given.values), world)
    violations = {name: check(sizes) for name, (_, check) in RULES.items()}
    return {name: text for name, text in violations.items() if text}


def check_rules(given: Arguments, world: int, do: str) -> None:
    """Raise for the first rule that arguments break.

    Raises:
        IllegalPlanError: names the rule, its source and the violation.
    """
    for name, text in broken_rules(given, world).items():
        raise IllegalPlanError(
            f"Megatron-LM refuses it, rule {name} ({RULES[name][0]} at {COMMIT}): {text}.",
            "Expected arguments that its own checks admit.",
            do,
        )


def check_environment(given: Arguments, environment: Mapping[str, str]) -> None:
    """Check the number of device queues: one with tensor or context parallelism, never one with FSDP.

    Raises:
        IllegalPlanError: the environment sets another number.

    Source: A:1453-1479 and A:1150-1170.
    """
    queues = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    sharded = "--use-megatron-fsdp" in given.values
    degrees = [given.values.get(f"--{name}-parallel-size", ("1",)) for name in ("tensor-model", "context")]
    if (queues == "1") == sharded and (sharded or degrees != [("1",), ("1",)]):
        raise IllegalPlanError(
            f"Megatron-LM refuses it, rule device_queues (A:1453-1479 at {COMMIT}): CUDA_DEVICE_MAX_CONNECTIONS "
            f"is {queues}.",
            f"Expected {'more than 1 with Megatron-FSDP' if sharded else '1 with tensor or context parallelism'}.",
            "Set it in the environment.",
        )


def _experts_have_biases(problem: Problem) -> bool:
    mlps = [kind.mlp for kind in problem.model.kinds]
    return any(isinstance(mlp, MixtureOfExperts) and mlp.bias for mlp in mlps)


def megatron_modes(problem: Problem) -> tuple[Mode, ...]:
    """List the recompute modes that Megatron-LM has for the model's layers."""
    unnamed = selective_modules(problem.model, problem.job)
    named = problem.recompute_modules and problem.space.recompute_modules != (NO_MODULES,)
    return ("none", "selective", "full") if unnamed or named else ("none", "full")


def megatron_modules(problem: Problem) -> str:
    """Name the modules that an export of selective recomputation writes; ``NO_MODULES`` where these are all that a
    plan counts, or where they have no price of their own."""
    modules = selective_modules(problem.model, problem.job)
    named = module_set(modules) if modules and problem.job.attention_kernel == "flash" else NO_MODULES
    return named if problem.prices_modules(named) else NO_MODULES


def megatron_limits(problem: Problem) -> dict[str, Limit]:
    """Return the limits that depend on the problem.

    Source: Megatron-LM training/arguments.py:1095, core/transformer/transformer_config.py:2612.
    """
    limits, sets = {}, problem.module_sets
    if problem.space.recompute_modules != (NO_MODULES,) and not selective_modules(problem.model, problem.job):
        sets = tuple(modules for modules in sets if modules != NO_MODULES) or sets
    if problem.job.precision == "fp8":
        sets = tuple(modules for modules in sets if not DELAYED & {*modules.split("+")}) or (NO_MODULES,)
    if sets != problem.module_sets:
        why = "--recompute-modules names no other part of dense layers with grouped queries, and with delayed fp8 "
        limits["recompute_modules"] = Limit(sets, f"{why}neither {' nor '.join(sorted(DELAYED))}")
    if problem.job.precision != "bf16" and problem.hardware.software.fp8_weights_only:
        limits["zero_stage"] = Limit((1, 2, 3), "gathers of quantized weights need --use-distributed-optimizer")
    if _experts_have_biases(problem):
        limits["etp"] = Limit((1,), "it splits no experts with biases (core/transformer/transformer_config.py)")
    if problem.job.optimizer == "muon":
        limits["dp_replicate"] = Limit((1,), MUON_SHARDS_ONCE)
    return limits


_NO_HOST = "Megatron-LM keeps on the host what this plan streams beside the layers only in other ways"
MEGATRON_LIMITS = {
    "schedule": Limit(
        ("1f1b", "interleaved"),
        "its schedules are 1F1B and interleaved 1F1B (core/pipeline_parallel/schedules.py)",
    ),
    "tp_overlap": Limit(
        ("none", "ring"),
        "Transformer Engine gathers in a ring only, --tp-comm-overlap has no pipelined gather",
    ),
    "pp_scatter_gather": Limit(
        (False,),
        "core/pipeline_parallel sends whole activations; without sequence parallelism none is scattered",
    ),
    "gather_again": Limit(
        (True,), "core/tensor_parallel/layers.py keeps the sharded input and gathers it again in the backward"
    ),
    "offload_weights": Limit((False,), _NO_HOST),
    "offload_activations": Limit((False,), _NO_HOST),
    "offload_modules": Limit((NO_MODULES,), "modules on the host are written for Megatron-LM's own script alone"),
    "offload_optimizer": Limit((False,), f"{_NO_HOST} (--optimizer-cpu-offload updates on the processor)"),
    "rank_order": Limit(
        ("tp-cp-dp-pp", "tp-cp-pp-dp"),
        "its orders are tp-cp-ep-dp-pp, and tp-cp-ep-pp-dp with --use-tp-pp-dp-mapping",
    ),
}
MEGATRON = Capability(
    name="Megatron-LM",
    versions=("d98e8a64", *(f"core_v0.{minor}.0" for minor in range(19, 13, -1))),
    limits={name: limit for name, limit in MEGATRON_LIMITS.items() if name != "offload_modules"},
    rules=TRANSFORMER_ENGINE
    | {
        "indexers_need_sequence_parallelism": RowRule(
            shared_indexers,
            "its attention to selected keys needs --sequence-parallel with tensor parallelism "
            "(core/transformer/experimental_attention_variant/absorbed_mla.py)",
        )
    },
    # Megatron-FSDP adds the groups up once a step (core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py).
    hybrid_stages=(1,),
    recompute_counts="block",
    batch_settings={"micro-batch": "micro_batch_size", "seq-len": "seq_length"},
    modes=megatron_modes,
    more_limits=megatron_limits,
    own_modules=megatron_modules,
    complete=True,
)
