"""What is decided: a layout (degrees and switches of the whole run) and what every virtual stage holds."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

from pydantic import Field, model_validator

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
"""Schedules with two chunks a rank, the second in reverse order of the ranks: the first rank holds both ends."""
PAIRED_SCHEDULES: frozenset[Schedule] = frozenset({"dualpipe-v"})
"""Schedules that run pairs: a forward and the whole backward of another micro-batch beside each other."""

Degree = TypeVar("Degree", int, "npt.NDArray[np.int64]")
"""A whole number, or an array of them."""


def expert_replicas(tp: Degree, cp: Degree, dp: Degree, ep: Degree, etp: Degree) -> Degree:
    """Replicas of every expert shard: tp cp dp / (ep etp). Broadcasts.

    Source: Megatron-LM core/parallel_state.py, expert_data_parallel_size.
    """
    return (tp * cp * dp) // (ep * etp)


@lru_cache(maxsize=1024)
def rank_stages(schedule: Schedule, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """The virtual stages of every pipeline rank, chunk by chunk: [pp][vpp]. Chunk c of rank r is virtual stage
    c * pp + r, in the second chunk of a V schedule 2 * pp - 1 - r."""
    turns = schedule in V_SCHEDULES
    return tuple(
        tuple((chunk + 1) * pp - 1 - rank if turns and chunk % 2 else chunk * pp + rank for chunk in range(vpp))
        for rank in range(pp)
    )


@lru_cache(maxsize=1024)
def stage_ranks(schedule: Schedule, pp: int, vpp: int) -> tuple[int, ...]:
    """The pipeline rank of every virtual stage, [pp * vpp]."""
    rank_of = {stage: rank for rank, held in enumerate(rank_stages(schedule, pp, vpp)) for stage in held}
    return tuple(rank_of[stage] for stage in range(pp * vpp))


RankOrder = Literal[
    "tp-cp-dp-pp", "tp-cp-pp-dp", "tp-dp-cp-pp", "tp-dp-pp-cp", "tp-pp-cp-dp", "tp-pp-dp-cp",
    "cp-tp-dp-pp", "cp-tp-pp-dp", "cp-dp-tp-pp", "cp-dp-pp-tp", "cp-pp-tp-dp", "cp-pp-dp-tp",
    "dp-tp-cp-pp", "dp-tp-pp-cp", "dp-cp-tp-pp", "dp-cp-pp-tp", "dp-pp-tp-cp", "dp-pp-cp-tp",
    "pp-tp-cp-dp", "pp-tp-dp-cp", "pp-cp-tp-dp", "pp-cp-dp-tp", "pp-dp-tp-cp", "pp-dp-cp-tp",
]  # fmt: skip
"""Degrees from the inside of a domain to the outside."""
RANK_ORDERS: tuple[RankOrder, ...] = get_args(RankOrder)


NodeOrder = tuple[Count, ...]
_CODE_BASE = 8


def order_code(order: NodeOrder) -> int:
    """An order of node types as one integer for columns: a leading 1 and a digit to base 8 for each type; 0 for
    the empty order of a cluster with one type."""
    code = int(len(order) > 0)
    for node_type in order:
        code = code * _CODE_BASE + node_type
    return code


def order_of(code: int) -> NodeOrder:
    """The order that a code stands for."""
    digits: list[int] = []
    while code > 1:
        code, digit = divmod(code, _CODE_BASE)
        digits.append(digit)
    return tuple(reversed(digits))


SHARE_BASES = {2: 1 << 21, 3: 1 << 20, 4: 1 << 15}
"""By the number of node types: more than the micro-batches of any replica, so that a code has 62 bits."""
_NUM_TYPES = 1 << 60
MicroBatchShares = tuple[Annotated[int, Field(ge=1, lt=SHARE_BASES[2])], ...]


def shares_code(shares: MicroBatchShares) -> int:
    """The micro-batches of replicas on two to four node types as one integer for columns, the number of types
    above them; 0 where all are alike."""
    code = 0
    for share in shares:
        code = code * SHARE_BASES[len(shares)] + share
    return code + (len(shares) - 2) * _NUM_TYPES if shares else 0


def shares_of(code: int) -> MicroBatchShares:
    """The micro-batches that a code stands for."""
    if not code:
        return ()
    extra, code = divmod(code, _NUM_TYPES)
    shares: list[int] = []
    for _ in range(extra + 2):
        code, share = divmod(code, SHARE_BASES[extra + 2])
        shares.append(share)
    return tuple(reversed(shares))


class Layout(Record):
    """The degrees and switches chosen for the whole run.

    ``tp * cp * dp * pp`` is the number of GPUs; ``ep`` and ``etp`` are carved out of ``tp * cp * dp`` for
    the routed experts. ``rank_stages`` says which virtual stages a pipeline rank runs. ``rank_order`` says which
    degree's ranks are neighbours: the first degree's are consecutive. The experts' grid has the same order with
    etp for tp, ep and the experts' replicas for dp, and nothing for cp (Megatron-LM's ``order``, ep before dp).
    ``node_order`` says, in a cluster of several node types, in which order the pipeline passes them: all ranks of
    its first type, then those of the next (0 is ``Problem.hardware``, 1 the first of ``Problem.other_hardware``).
    Empty where there is one type.
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
    schedule: Schedule = "1f1b"
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_overlap: TpOverlap = "none"
    """Tensor-parallel communication in ``tp`` tiles beside the tiles of its own product: from neighbour to
    neighbour (``ring``), or a tile of one beside the next tile of the other (``pipelined``)."""
    pp_scatter_gather: bool = False
    """Without sequence parallelism: each tensor-parallel rank sends its share of an activation to the next stage,
    where it is gathered."""
    gather_again: bool = True
    """With sequence parallelism: inputs of products are gathered again in the backward, not kept gathered."""
    offload_weights: bool = False
    offload_activations: bool = False
    offload_optimizer: bool = False
    """What lies in the memory of the host and is streamed beside the work of the layers."""
    rank_order: RankOrder = "tp-cp-dp-pp"

    @property
    def offloads(self) -> bool:
        """Whether anything lies in the memory of the host."""
        return self.offload_weights or self.offload_activations or self.offload_optimizer

    node_order: NodeOrder = ()
    replica_micro_batches: MicroBatchShares = ()
    """Replicas of different make: micro-batches of every replica on the first node type, on the second, and so on,
    each replica wholly on one type. Empty: all replicas are alike."""

    @model_validator(mode="after")
    def _replicas_or_stages(self) -> Layout:
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
        return self

    @model_validator(mode="after")
    def _every_type_once(self) -> Layout:
        if sorted(self.node_order) != list(range(len(self.node_order))):
            raise ValueError(
                f"node_order must name every node type once, from 0 to {max(0, len(self.node_order) - 1)}, "
                f"got {list(self.node_order)}"
            )
        return self

    @property
    def num_gpus(self) -> int:
        """Accelerators the layout occupies."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of every expert shard."""
        return expert_replicas(self.tp, self.cp, self.dp, self.ep, self.etp)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches a pipeline runs in a step (whole only for a legal layout); the most of any replica."""
        if self.replica_micro_batches:
            return max(self.replica_micro_batches)
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def num_virtual_stages(self) -> int:
        """Virtual stages of one pipeline."""
        return self.pp * self.vpp

    @property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of every pipeline rank, chunk by chunk, [pp][vpp]."""
        return rank_stages(self.schedule, self.pp, self.vpp)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of every virtual stage, [pp * vpp]."""
        return stage_ranks(self.schedule, self.pp, self.vpp)

    def rank_of(self, stage: int) -> int:
        """Pipeline rank of a virtual stage."""
        return self.stage_ranks[stage]


class Recompute(Record):
    """How many layers of a virtual stage are recomputed in the backward pass: its first ``full`` layers
    wholly, the next ``selective`` ones selectively, the rest not at all."""

    full: Count = 0
    selective: Count = 0


class VirtualStage(Record):
    """Layers ``layers[0]`` to ``layers[1] - 1`` of the model and their recomputation."""

    layers: tuple[Count, Count]
    recompute: Recompute = Recompute()

    @property
    def num_layers(self) -> int:
        """Layers held."""
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
    """A layout and its virtual stages, in model order (``Layout.rank_stages`` says on which rank each is)."""

    schema_version: Literal[1] = 1
    layout: Layout
    virtual_stages: tuple[VirtualStage, ...] = Field(min_length=1)
    other_recompute: tuple[Recompute, ...] = ()
    """Replicas of different make: recomputation of every virtual stage in the replicas on the second node type,
    which hold the same layers as those on the first, then of those on the third. Empty where all are alike."""

    def of_replicas(self, node_type: int, layout: Layout) -> Plan:
        """What the replicas on one node type run, with ``layout`` as theirs."""
        stages, count = self.virtual_stages, len(self.virtual_stages)
        if node_type:
            recompute = self.other_recompute[count * (node_type - 1) : count * node_type]
            stages = tuple(
                stage.model_copy(update={"recompute": own}) for stage, own in zip(stages, recompute, strict=True)
            )
        return Plan(layout=layout, virtual_stages=stages)

    @model_validator(mode="after")
    def _recompute_of_all_types(self) -> Plan:
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
        return self

    @model_validator(mode="after")
    def _covers(self) -> Plan:
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
