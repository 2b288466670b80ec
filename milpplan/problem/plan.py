"""The decision: a layout (degrees and switches of the whole run) and the layers of every virtual stage."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import compress, product
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, model_validator

from milpplan.problem.records import Count, PositiveInt, Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
TpOverlap = Literal["none", "ring", "pipelined"]
TP_OVERLAPS: tuple[TpOverlap, ...] = ("none", "ring", "pipelined")
SPLIT_SCHEDULES: frozenset[Schedule] = frozenset({"zb-h1", "zb-v", "dualpipe-v"})
"""Schedules that run weight gradients as work items of their own."""
V_SCHEDULES: frozenset[Schedule] = frozenset({"zb-v", "dualpipe-v"})
"""Schedules with two chunks per rank, the second in reverse order of the ranks, so that the first rank holds both
ends of the model."""
PAIRED_SCHEDULES: frozenset[Schedule] = frozenset({"dualpipe-v"})
"""Schedules that run pairs: a forward and the whole backward of another micro-batch beside each other."""

Degree = TypeVar("Degree", int, "npt.NDArray[np.int64]")
"""Integer, or array of integers."""


def expert_replicas(tp: Degree, cp: Degree, dp: Degree, ep: Degree, etp: Degree) -> Degree:
    """Count the replicas of every expert shard: tp cp dp / (ep etp). Broadcasts.

    Source: Megatron-LM core/parallel_state.py, expert_data_parallel_size.
    """
    return (tp * cp * dp) // (ep * etp)


@lru_cache(maxsize=1024)
def rank_stages(schedule: Schedule, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """List the virtual stages of every pipeline rank, chunk by chunk: [pp][vpp].

    Chunk c of rank r is virtual stage c * pp + r; in the second chunk of a V schedule it is 2 * pp - 1 - r.
    """
    is_v = schedule in V_SCHEDULES
    return tuple(
        tuple((chunk + 1) * pp - 1 - rank if is_v and chunk % 2 else chunk * pp + rank for chunk in range(vpp))
        for rank in range(pp)
    )


@lru_cache(maxsize=1024)
def stage_ranks(schedule: Schedule, pp: int, vpp: int) -> tuple[int, ...]:
    """List the pipeline rank of every virtual stage, [pp * vpp]."""
    rank_of = {stage: rank for rank, chunks in enumerate(rank_stages(schedule, pp, vpp)) for stage in chunks}
    return tuple(rank_of[stage] for stage in range(pp * vpp))


RankOrder = Literal[
    "tp-cp-dp-pp", "tp-cp-pp-dp", "tp-dp-cp-pp", "tp-dp-pp-cp", "tp-pp-cp-dp", "tp-pp-dp-cp",
    "cp-tp-dp-pp", "cp-tp-pp-dp", "cp-dp-tp-pp", "cp-dp-pp-tp", "cp-pp-tp-dp", "cp-pp-dp-tp",
    "dp-tp-cp-pp", "dp-tp-pp-cp", "dp-cp-tp-pp", "dp-cp-pp-tp", "dp-pp-tp-cp", "dp-pp-cp-tp",
    "pp-tp-cp-dp", "pp-tp-dp-cp", "pp-cp-tp-dp", "pp-cp-dp-tp", "pp-dp-tp-cp", "pp-dp-cp-tp",
]  # fmt: skip
"""Order of the degrees in the numbering of ranks: the ranks of the first degree are consecutive."""
RANK_ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)


NodeOrder = tuple[Count, ...]
"""Order of the node types along the pipeline, as indices in ``Problem.node_types``."""
_CODE_BASE = 8


def order_code(order: NodeOrder) -> int:
    """Encode an order of node types as an integer for columns.

    The code has a leading 1 and a digit to base 8 for each type. The empty order of a cluster with a single type
    has the code 0.
    """
    code = int(len(order) > 0)
    for node_type in order:
        code = code * _CODE_BASE + node_type
    return code


def order_of(code: int) -> NodeOrder:
    """Decode an order of node types (see ``order_code``)."""
    digits: list[int] = []
    while code > 1:
        code, digit = divmod(code, _CODE_BASE)
        digits.append(digit)
    return tuple(reversed(digits))


SHARE_BASES = {2: 1 << 21, 3: 1 << 20, 4: 1 << 15}
"""Base of the digits of ``shares_code``, by the number of node types. A base is above the number of micro-batches
of any replica, and a code has at most 62 bits."""
_NUM_TYPES = 1 << 60
MicroBatchShares = tuple[Annotated[int, Field(ge=1, lt=SHARE_BASES[2])], ...]
"""Micro-batches of a replica on each node type."""


def shares_code(shares: MicroBatchShares) -> int:
    """Encode the micro-batches of replicas on two to four node types as an integer for columns.

    The highest digit is the number of types less two, and each type has a digit. No shares have the code 0.
    """
    code = 0
    for share in shares:
        code = code * SHARE_BASES[len(shares)] + share
    return code + (len(shares) - 2) * _NUM_TYPES if shares else 0


def shares_of(code: int) -> MicroBatchShares:
    """Decode the micro-batches of replicas (see ``shares_code``)."""
    if not code:
        return ()
    extra, code = divmod(code, _NUM_TYPES)
    shares: list[int] = []
    for _ in range(extra + 2):
        code, share = divmod(code, SHARE_BASES[extra + 2])
        shares.append(share)
    return tuple(reversed(shares))


ExpertDispatch = Literal["default", "allgather", "alltoall", "deepep"]
EXPERT_DISPATCHES: tuple[ExpertDispatch, ...] = get_args(ExpertDispatch)

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
"""Modules of a layer that selective recomputation may replay. Source: Megatron-LM at d98e8a64,
core/transformer/transformer_config.py (``recompute_modules``)."""
HELD_BY_MOE: frozenset[RecomputeModule] = frozenset({"moe_act", "shared_experts"})
"""Modules inside the module ``moe``; together they are not priced."""
NO_MODULES = "default"


OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
OFFLOAD_MODULES: tuple[OffloadModule, ...] = get_args(OffloadModule)
"""Modules of a layer whose inputs may lie in host memory. Source: Megatron-LM at d98e8a64,
core/transformer/transformer_config.py (``offload_modules``)."""


INSIDE_MOE: tuple[OffloadModule, ...] = ("expert_fc1", "moe_act")
"""Those inside the module ``moe`` of recomputation, which keeps none of their inputs."""


def module_set(modules: Iterable[str], known: tuple[str, ...] = RECOMPUTE_MODULES) -> str:
    """Write a set of modules as a layout has it: in the order of the known ones, with + between them."""
    given = set(modules)
    return "+".join(name for name in known if name in given) or NO_MODULES


def _all_sets(known: tuple[str, ...]) -> tuple[str, ...]:
    bits = product((0, 1), repeat=len(known))
    return tuple(module_set(compress(known, chosen[::-1]), known) for chosen in bits)


MODULE_SETS, OFFLOAD_SETS = _all_sets(RECOMPUTE_MODULES), _all_sets(OFFLOAD_MODULES)
"""All sets of modules; bit i of an index stands for module i."""


def _checked_modules(known: tuple[str, ...], text: str) -> str:
    names = text.split("+")
    if text != NO_MODULES and (len(set(names)) < len(names) or not set(names) <= set(known)):
        raise ValueError(f"modules are {NO_MODULES}, or some of {', '.join(known)} once each, with +")
    return module_set(names, known)


ModuleSet = Annotated[str, AfterValidator(partial(_checked_modules, RECOMPUTE_MODULES))]
OffloadSet = Annotated[str, AfterValidator(partial(_checked_modules, OFFLOAD_MODULES))]


class Layout(Record):
    """Degrees and switches of the whole run.

    ``tp * cp * dp * pp`` is the number of GPUs; ``ep`` and ``etp`` are carved out of ``tp * cp * dp`` for the
    routed experts. ``rank_stages`` lists the virtual stages of each pipeline rank.
    """

    tp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    pp: PositiveInt = 1
    dp: PositiveInt = 1
    vpp: PositiveInt = 1
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt
    sequence_parallel: bool = False
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    dp_replicate: PositiveInt = 1
    """Groups of replicas that each shard the states by themselves and hold copies of the others' shards (hybrid
    sharding, HSDP). 1: ZeRO shards over all cp * dp ranks."""
    keep_weights: bool = False
    """With ZeRO 3: weights that a forward gathers stay until its backward, which gathers none (FSDP2's
    ``reshard_after_forward=False``)."""
    schedule: Schedule = "1f1b"
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_overlap: TpOverlap = "none"
    """Tensor-parallel communication in ``tp`` tiles beside the tiles of its own product. ``ring``: from neighbour
    to neighbour. ``pipelined``: a tile of the communication beside the next tile of the product."""
    pp_scatter_gather: bool = False
    """Without sequence parallelism: each tensor-parallel rank sends its share of an activation to the next stage,
    which gathers it."""
    gather_again: bool = True
    """With sequence parallelism: the backward gathers the inputs of products again; they are not kept gathered."""
    recompute_vision: bool = False
    """The layers of the vision encoder are recomputed wholly."""
    vision_data_parallel: bool = False
    """Context-parallel ranks share the images of a micro-batch and gather their embeddings (Megatron-Bridge's
    ``vision_dp_when_cp``), where otherwise each computes all images."""
    recompute_modules: ModuleSet = NO_MODULES
    """Modules that selective recomputation replays, with + between them. ``default``: attention scores with
    unfused attention, else norms, activations, and the expanded queries, keys and values of latent attention."""
    ulysses: PositiveInt = 1
    """Neighbours in a context-parallel group that exchange parts of the sequence for heads, by all-to-alls around
    attention (DeepSpeed-Ulysses); ``cp / ulysses`` ranks pass keys and values around a ring. 1: the ring alone.
    cp: the all-to-alls alone. Megatron-LM's ``--cp-comm-type`` p2p, a2a, and a2a+p2p between them."""
    expert_dispatch: ExpertDispatch = "default"
    """Dispatch of tokens to experts on other ranks. ``deepep``: once to each domain that holds some of a token's
    experts; ``alltoall``: once to each of its experts; ``allgather``: every rank gathers all tokens. ``default``:
    the first or second, as ``Software.deduplicated_dispatch`` says."""
    offload_weights: bool = False
    """Weights lie in host memory and are streamed beside the work of the layers."""
    offload_activations: bool = False
    """Activations lie in host memory and are streamed beside the work of the layers."""
    offload_modules: OffloadSet = NO_MODULES
    """Modules whose inputs lie in host memory, with + between them, instead of all activations. ``default``:
    none."""
    offload_optimizer: bool = False
    """Optimizer states lie in host memory and are streamed beside the update."""
    rank_order: RankOrder = "tp-cp-dp-pp"
    """Order of the degrees in the numbering of ranks. The experts' grid has the same order with etp for tp, ep and
    the experts' replicas for dp, and no cp (Megatron-LM's ``order``, ep before dp)."""

    @property
    def offloads(self) -> bool:
        """True if weights, activations or optimizer states lie in host memory."""
        by_module = self.offload_modules != NO_MODULES
        return by_module or self.offload_weights or self.offload_activations or self.offload_optimizer

    node_order: NodeOrder = ()
    """Order in which the pipeline passes the node types of a cluster of several types: all ranks of the first
    type, then those of the next. 0 is ``Problem.hardware``, 1 the first of ``Problem.other_hardware``. Empty in a
    cluster of a single type."""
    replica_micro_batches: MicroBatchShares = ()
    """Heterogeneous replicas, each wholly on one node type: micro-batches of every replica on the first node type,
    on the second type, and so on. Empty: all replicas are alike."""

    @model_validator(mode="after")
    def _node_types_agree(self) -> Layout:
        shares = self.replica_micro_batches
        if len(shares) not in (0, *SHARE_BASES) or (shares and self.node_order):
            raise ValueError(
                "replica_micro_batches must be empty, or one number for each of two to four node types and no "
                f"node_order, got {list(shares)} and node_order={list(self.node_order)}"
            )
        if shares and max(shares) >= SHARE_BASES[len(shares)]:
            raise ValueError(
                f"replica_micro_batches of {len(shares)} node types must be below {SHARE_BASES[len(shares)]:,}, "
                f"got {list(shares)}"
            )
        if sorted(self.node_order) != list(range(len(self.node_order))):
            raise ValueError(
                f"node_order must name every node type once, from 0 to {max(0, len(self.node_order) - 1)}, "
                f"got {list(self.node_order)}"
            )
        return self

    @property
    def main_fields(self) -> str:
        """Fields that tell most layouts apart, on one line."""
        names = ("tp", "cp", "ep", "pp", "dp", "vpp", "micro_batch_size", "zero_stage", "schedule")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def num_gpus(self) -> int:
        """Accelerators that the layout occupies."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_shards(self) -> int:
        """Ranks that ZeRO shards the dense weights over."""
        return self.cp * self.dp // self.dp_replicate

    @property
    def expert_dp(self) -> int:
        """Replicas of every expert shard."""
        return expert_replicas(self.tp, self.cp, self.dp, self.ep, self.etp)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pipeline in a step, a maximum over replicas (exact for legal layouts)."""
        if self.replica_micro_batches:
            return max(self.replica_micro_batches)
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages of one pipeline."""
        return self.pp * self.vpp

    @property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """Virtual stages of every pipeline rank, chunk by chunk, [pp][vpp]."""
        return rank_stages(self.schedule, self.pp, self.vpp)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every virtual stage, [pp * vpp]."""
        return stage_ranks(self.schedule, self.pp, self.vpp)

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a virtual stage."""
        return self.stage_ranks[stage]


def layout_words(own: Layout, other: Layout, lead: str = "") -> str:
    """Write the values in which another layout differs, as ``tp=4 dp=2``, with that of ``lead`` first."""
    names = [name for name in Layout.model_fields if getattr(own, name) != getattr(other, name)]
    ordered = sorted(names, key=lambda name: name != lead)
    values = {name: getattr(other, name) for name in ordered}
    return " ".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in values.items())


class Recompute(Record):
    """Numbers of layers of a virtual stage that the backward recomputes.

    Its first ``full`` layers are recomputed wholly, the next ``selective`` layers selectively, the rest not at
    all.
    """

    full: Count = 0
    selective: Count = 0


class VirtualStage(Record):
    """Layers ``layers[0]`` to ``layers[1] - 1`` of the model and their recomputation."""

    layers: tuple[Count, Count]
    recompute: Recompute = Recompute()

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.layers[1] - self.layers[0]

    @model_validator(mode="after")
    def _in_order(self) -> VirtualStage:
        if self.layers[1] < self.layers[0]:
            raise ValueError(f"layers must be [first, last + 1], got {list(self.layers)}")
        if self.recompute.full + self.recompute.selective > self.num_layers:
            raise ValueError(
                f"recompute names {self.recompute.full + self.recompute.selective} layers "
                f"but the virtual stage holds {self.num_layers}"
            )
        return self


class Plan(Record):
    """Layout and virtual stages in model order. ``Layout.rank_stages`` gives the rank of each stage."""

    schema_version: Literal[1] = 1
    layout: Layout
    virtual_stages: tuple[VirtualStage, ...] = Field(min_length=1)
    other_recompute: tuple[Recompute, ...] = ()
    """Heterogeneous replicas: recomputation of every virtual stage in the replicas on the second node type, then
    in those on the third type, and so on. All replicas hold the same layers. Empty: all replicas are alike."""

    @property
    def selects(self) -> bool:
        """True if some layers are recomputed selectively: ``Layout.recompute_modules`` is about them."""
        counts = [stage.recompute for stage in self.virtual_stages]
        return any(count.selective for count in (*counts, *self.other_recompute))

    def of_replicas(self, node_type: int, layout: Layout) -> Plan:
        """Build the plan of the replicas on one node type; ``layout`` is their layout."""
        stages, count = self.virtual_stages, len(self.virtual_stages)
        if node_type:
            recompute = self.other_recompute[count * (node_type - 1) : count * node_type]
            stages = tuple(
                stage.model_copy(update={"recompute": own}) for stage, own in zip(stages, recompute, strict=True)
            )
        return Plan(layout=layout, virtual_stages=stages)

    @model_validator(mode="after")
    def _stages_agree(self) -> Plan:
        others = max(0, len(self.layout.replica_micro_batches) - 1)
        expected = others * len(self.virtual_stages)
        if len(self.other_recompute) != expected:
            raise ValueError(
                f"other_recompute names {len(self.other_recompute)} virtual stages, expected {expected} (with "
                "replicas of different make each of every node type but the first, else none)"
            )
        for stage, own in zip(self.virtual_stages * others, self.other_recompute, strict=True):
            if own.full + own.selective > stage.num_layers:
                raise ValueError(
                    f"other_recompute names {own.full + own.selective} layers but the virtual stage holds "
                    f"{stage.num_layers}"
                )
        if len(self.virtual_stages) != self.layout.num_virtual_stages:
            raise ValueError(
                f"pp={self.layout.pp} x vpp={self.layout.vpp} needs {self.layout.num_virtual_stages} "
                f"virtual stages, got {len(self.virtual_stages)}"
            )
        expected = 0
        for index, stage in enumerate(self.virtual_stages):
            if stage.layers[0] != expected:
                raise ValueError(f"virtual stage {index} starts at layer {stage.layers[0]}, expected {expected}")
            expected = stage.layers[1]
        return self
