"""What it is trained on: an accelerator, the tiers of network that join it, and measured tables.

All rates are dense, per accelerator, one direction, SI units. No formulas here: interpolation is in
``milpplan.simulation.layers.kernels``, collectives in ``milpplan.simulation.network.collectives``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from milpplan.problem.records import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Record

Ascending = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
Efficiency = Annotated[float, Field(gt=0, le=1.5)]


def _check_ascending(name: str, values: tuple[float, ...]) -> None:
    if any(low >= high for low, high in pairwise(values)):
        raise ValueError(f"{name} must be strictly ascending, got {values}")


class GemmTable(Record):
    """Fraction of dense peak that an (m x k) by (k x n) product reaches: ``efficiency[i][j][l]`` belongs to
    ``m[i]``, ``n[j]``, ``k[l]``; interpolated linearly in the logarithms, constant outside."""

    m: Ascending
    n: Ascending
    k: Ascending
    efficiency: tuple[tuple[tuple[Efficiency, ...], ...], ...]

    @model_validator(mode="after")
    def _shape(self) -> GemmTable:
        for axis in ("m", "n", "k"):
            _check_ascending(axis, getattr(self, axis))
        shape = (len(self.m), len(self.n), len(self.k))
        if (
            len(self.efficiency) != shape[0]
            or any(len(plane) != shape[1] for plane in self.efficiency)
            or any(len(row) != shape[2] for plane in self.efficiency for row in plane)
        ):
            raise ValueError(f"efficiency must have the shape {shape} of its axes")
        return self


class SizeCurve(Record):
    """A ratio as a function of one size, interpolated linearly in log(size), constant outside."""

    size: Ascending
    value: Annotated[tuple[Efficiency, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _shape(self) -> SizeCurve:
        _check_ascending("size", self.size)
        if len(self.size) != len(self.value):
            raise ValueError(f"{len(self.size)} sizes but {len(self.value)} values")
        return self


class Precision(Record):
    """One number format's matrix engine."""

    peak_flops_per_s: PositiveFloat
    gemm: GemmTable
    sustained: Fraction = 1.0
    """Rate of a product inside training over that of ``gemm``, whose short measurements run at higher clocks."""


class Accelerator(Record):
    """One accelerator as the framework sees it (a GPU; a GCD where a package holds two)."""

    name: str = Field(min_length=1)
    memory_bytes: PositiveInt
    memory_bandwidth_bytes_per_s: PositiveFloat
    memory_bandwidth_efficiency: Fraction
    kernel_latency_s: NonNegativeFloat
    """Fixed cost of one kernel on the critical path."""
    num_processors: Annotated[int, Field(ge=0)] = 0
    """Streaming multiprocessors (compute units); a short attention waits for the last tile of each. 0: unknown."""
    vector_flops_per_s: PositiveFloat | None = None
    """fp32 rate outside the matrix engine, which serves products of sizes that the engine cannot take; None: as
    the matrix engine."""
    bf16: Precision
    fp8: Precision | None = None
    attention_forward: SizeCurve
    """Fraction of bf16 peak of a causal flash-attention forward, by sequence length."""
    attention_backward: SizeCurve

    @property
    def memory_rate_bytes_per_s(self) -> float:
        """What an operator that only reads and writes memory reaches."""
        return self.memory_bandwidth_bytes_per_s * self.memory_bandwidth_efficiency


class BusTable(Record):
    """Measured bus bandwidth (nccl-tests' definition) of one operation inside a tier:
    ``bus_bandwidth_bytes_per_s[i][j]`` for ``num_gpus[i]`` ranks and a message of ``message_bytes[j]``."""

    num_gpus: Ascending
    message_bytes: Ascending
    bus_bandwidth_bytes_per_s: tuple[tuple[PositiveFloat, ...], ...]

    @model_validator(mode="after")
    def _shape(self) -> BusTable:
        _check_ascending("num_gpus", self.num_gpus)
        _check_ascending("message_bytes", self.message_bytes)
        rows = self.bus_bandwidth_bytes_per_s
        if len(rows) != len(self.num_gpus) or any(len(row) != len(self.message_bytes) for row in rows):
            raise ValueError(
                f"bus_bandwidth_bytes_per_s must be {len(self.num_gpus)} rows of {len(self.message_bytes)}"
            )
        return self


class ScaleUp(Record):
    """The fast domain (NVLink, xGMI, PCIe inside a node, or a rack)."""

    name: str = Field(min_length=1)
    num_gpus: PositiveInt
    """Accelerators in one domain."""
    segments: tuple[PositiveInt, ...] = ()
    """Numbers of consecutive ranks that a scheduler may place in one domain; empty: it fills domains."""
    bandwidth_bytes_per_s: PositiveFloat
    p2p_efficiency: Fraction
    p2p_latency_s: NonNegativeFloat
    hop_latency_s: NonNegativeFloat = 0.0
    """Added for every neighbour inside the domain that a ring across several domains passes."""
    processor_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the accelerator's compute that a collective takes while it runs beside kernels."""
    in_network_reduction: bool = False
    """Whether switches add up an all-reduce (NVLink SHARP), so that every rank sends the message once instead of
    2 (n - 1) / n times. Only where ``all_reduce`` is a table of rings: one measured with NVLink SHARP has it."""
    all_reduce: BusTable
    all_gather: BusTable
    reduce_scatter: BusTable
    all_to_all: BusTable


class HostMemory(Record):
    """The memory of the host as one accelerator's share of it: a second tier, behind the link to the host."""

    capacity_bytes: PositiveInt
    """What a process may fill: the memory of the node over its accelerators."""
    bandwidth_bytes_per_s: PositiveFloat
    """One direction, per accelerator, all accelerators of the node at once; both directions run at a time."""
    efficiency: SizeCurve
    """Share of the bandwidth that a transfer reaches, by its bytes."""


class CollectiveVariant(Record):
    """Another way the library can run a collective across domains; the fastest of all is used.

    A ``tree`` serves all-reduce only: its network hops grow with log2 of the domains, not with their number.
    """

    name: str = Field(min_length=1)
    shape: Literal["ring", "tree"]
    base_latency_s: NonNegativeFloat
    scale_up_hop_latency_s: NonNegativeFloat
    scale_out_hop_latency_s: NonNegativeFloat
    bandwidth_fraction: Fraction
    """Share of the ring's bandwidth."""


class Rails(Record):
    """Rail-optimised wiring: accelerators with the same place in their domains share a leaf switch, and pairs on
    different rails pay."""

    bandwidth_fraction: Fraction = 1.0
    """Rate of a pair on different rails over that of a pair on the same one."""
    latency_s: NonNegativeFloat = 0.0
    """Added to a message between rails, and to every hop of a ring or tree that changes the rail."""


class Network(Record):
    """A network beyond a domain; every accelerator has an equal share of what leaves its domain or pod."""

    name: str = Field(min_length=1)
    bandwidth_bytes_per_s: PositiveFloat
    """Per accelerator, one direction."""
    efficiency: Fraction
    """Share of the wire rate that a large message reaches."""
    p2p_latency_s: NonNegativeFloat
    collective_base_latency_s: NonNegativeFloat
    """Of a collective that crosses this network, in the place of that of a nearer one."""
    hop_latency_s: NonNegativeFloat
    """Added for every domain (or pod) that a ring passes."""
    processor_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the accelerator's compute that a collective takes while it runs beside kernels."""
    in_network_reduction: bool = False
    """Whether switches add up an all-reduce (InfiniBand SHARP): what the accelerators of a domain (or pod) hold
    together leaves it once."""

    @property
    def rate_bytes_per_s(self) -> float:
        """What a large message of one accelerator reaches, one direction."""
        return self.bandwidth_bytes_per_s * self.efficiency


class ScaleOut(Network):
    """The network between domains."""

    variants: tuple[CollectiveVariant, ...] = ()
    """Besides the ring that ``collective_base_latency_s`` and the hop latencies describe."""
    rails: Rails | None = None
    """None: all pairs of domains are alike."""


class Pods(Network):
    """A third tier: ``scale_out`` joins the domains of a pod, and this network joins the pods."""

    num_gpus: PositiveInt
    """Accelerators of a pod: whole domains."""


OWN_COST_MODEL = "milpplan"


class Software(Record):
    """What a framework does on this hardware that no table of the hardware says; the defaults add nothing."""

    name: str = Field(default="none", min_length=1, max_length=200)
    cost_model: str = Field(default=OWN_COST_MODEL, min_length=1, max_length=200)
    """Whose times the layers have: ours, or those of an installed plug-in of ``milpplan.cost_models``."""
    layer_launch_s: NonNegativeFloat = 0.0
    """Least time of a layer's forward, and half of the least time of its backward: the host launches the kernels
    one after another, and small ones wait for it."""
    collective_rank_s: NonNegativeFloat = 0.0
    """Host time of a layer's collective for every other rank of its group, added to its launches: a library that
    checks each call on all ranks before it starts, whatever the size of the message. The norm of the gradients
    calls all ranks once a step."""
    collective_call_s: NonNegativeFloat = 0.0
    """Host time of every such call, however many ranks its group has; none for a group of one."""
    collective_far_rank_s: NonNegativeFloat = 0.0
    """Host time of every such call, beside ``collective_rank_s``, for each rank of its group in another domain."""
    far_micro_batch_s: NonNegativeFloat = 0.0
    """Time of a micro-batch outside its layers for every pair of domains that a tensor-parallel group spans."""
    far_step_s: NonNegativeFloat = 0.0
    """The same once a step: small all-reduces of the norms' gradients and of the norm of all."""
    far_reduce_s: NonNegativeFloat = 0.0
    """The same where gradients are reduced without ZeRO: buckets beside the calls of the last backward."""
    message_s: NonNegativeFloat = 0.0
    """Host time of every message between pipeline stages, whatever its size, for each of the two stages."""
    reduce_call_bytes: NonNegativeFloat = 0.0
    """Bytes of 16-bit gradients that one call of an unsharded reduction takes; 0: its calls cost nothing."""
    step_overhead_s: NonNegativeFloat = 0.0
    """Once a step, beside nothing: data, logging, the optimizer's launches, synchronisation."""
    overlap_tensor_parallel: bool = True
    """Whether the backward's tensor-parallel collectives run beside its weight and input gradients."""
    norm_traffic: Annotated[float, Field(ge=1, le=32)] = 1.0
    """Bytes that a norm moves over those of a fused kernel: a norm in single operators copies to fp32, squares,
    averages, scales and copies back."""
    attention_efficiency: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Rate of the flash attention kernel over that of the hardware's table (which names its generation)."""
    dispatch_efficiency: Annotated[float, Field(gt=0, le=50)] = 1.0
    """Rate of the experts' dispatch and combination over that of the collectives' tables: padding to a capacity
    and several collectives at once on one network lower it."""
    norm_kept_bytes: Annotated[float, Field(ge=0, le=32)] = 0.0
    """Bytes that a layer keeps for every element of the input of each of its two norms, beside what fused
    kernels keep (input and output): copies in fp32 and the normalised values of a norm in single operators."""
    fused_activation: bool = True
    """Whether a gated activation is one kernel; if not, the activation of the gate, 2 bytes an element of the
    feed-forward width, is kept beside its input and the product. Of dense and shared experts' MLPs."""
    activate_again: bool = False
    """Whether the backward applies a dense or shared MLP's activation again, inside the kernels beside it, instead
    of keeping what it put out: Calculon's fused activation, which keeps one of input and output."""
    fused_gradient_sums: bool = True
    """Whether the product of a weight gradient adds to the accumulated one itself (Megatron-LM's gradient
    accumulation fusion); if not, it writes 16 bits and another kernel adds them."""
    gathered_inputs: bool = False
    """Whether the inputs of products take their gathered size from forward to backward with sequence parallelism,
    whatever a layout says (``Layout.gather_again``, which also leaves the second gather out of the backward; this
    is about bytes only). Megatron-LM keeps its share and gathers again."""
    copied_inputs: bool = False
    """Whether every tensor-parallel product of queries, keys, values, gate and up keeps a copy of its input of its
    own, where there is tensor parallelism; else those that read the same keep one."""
    operator_checkpoints: bool = False
    """Whether selective recomputation keeps what the attention kernel and every second matrix product of a layer
    give and replays all else (torchtitan), with flash attention, grouped-query attention and a dense MLP; else it
    drops what norms and activations give."""
    keeps_unread_results: bool = True
    """Whether these checkpoints keep the last product's result too, which no backward reads; a compiled layer does
    not."""
    score_kept_bytes: Annotated[float, Field(ge=2, le=32)] = 2.0
    """Bytes of every attention score from forward to backward without a flash kernel: the softmax that a fused
    kernel keeps in 16 bits. Dropout adds 3."""
    logit_kept_bytes: Annotated[float, Field(ge=2, le=64)] = 4.0
    """Bytes of every logit from the forward of the loss to its backward: the fp32 softmax of Megatron-LM's fused
    loss; 10 or more where the loss makes copies in fp32."""
    gathered_logits: bool = False
    """Whether every tensor-parallel rank holds the logits of the whole vocabulary."""
    deduplicated_dispatch: bool = True
    """Whether a token goes once to each domain that holds some of its experts (DeepEP, HybridEP), not once for
    each expert (the all-to-all dispatcher of Megatron-LM)."""
    dummy_weight_gradients: bool = True
    """Whether a bf16 buffer stays for every shape of weight (Transformer Engine from 2.3 on hands it to autograd
    where the gradient itself is accumulated elsewhere)."""
    gradient_bucket_bytes: Annotated[float, Field(ge=0, le=8)] = 0.0
    """Bytes a parameter of buckets for the reduction, beside the accumulated gradients, where there are replicas
    and gradients are not sharded."""
    sharding_group: Annotated[int, Field(ge=0)] = 0
    """Most neighbouring replicas that ZeRO shards over; whole groups hold copies, which all-reduce their shards of
    the gradients (InternEvo's zero1 size, FSDP's hybrid sharding). 0: all replicas."""
    master_shards_only: bool = False
    """Whether ZeRO 3 shards only the fp32 weights that the optimizer updates; their 16-bit copies are there while
    a layer is gathered."""
    fp8_weights_only: bool = False
    """Whether fp8 weights stand alone (Megatron-LM's ``--fp8-param-gather``); else a bf16 copy stays beside
    them."""
    allocator_share: Annotated[float, Field(ge=0, le=4)] = 0.0
    """What the caching allocator reserves beyond fragmentation while there is memory, over the allocated peak. It
    gives this back before it fails (PyTorch's CUDA caching allocator), so it does not decide whether a plan
    fits."""


class Uncertainty(Record):
    """One sigma of what an overlay fitted; zero: exact, or not identified and kept as it was.

    Efficiencies and ``residual_fraction`` are relative (0.05: 5 %), the others seconds.
    """

    overlay: str = Field(min_length=1, max_length=200)
    gemm_efficiency: NonNegativeFloat = 0.0
    gemm_fp8_efficiency: NonNegativeFloat = 0.0
    memory_efficiency: NonNegativeFloat = 0.0
    attention_efficiency: NonNegativeFloat = 0.0
    scale_up_efficiency: NonNegativeFloat = 0.0
    scale_out_efficiency: NonNegativeFloat = 0.0
    dispatch_efficiency: NonNegativeFloat = 0.0
    layer_launch_s: NonNegativeFloat = 0.0
    collective_rank_s: NonNegativeFloat = 0.0
    collective_call_s: NonNegativeFloat = 0.0
    collective_far_rank_s: NonNegativeFloat = 0.0
    far_micro_batch_s: NonNegativeFloat = 0.0
    far_step_s: NonNegativeFloat = 0.0
    far_reduce_s: NonNegativeFloat = 0.0
    message_s: NonNegativeFloat = 0.0
    scale_out_hop_s: NonNegativeFloat = 0.0
    kernel_latency_s: NonNegativeFloat = 0.0
    step_overhead_s: NonNegativeFloat = 0.0
    residual_fraction: NonNegativeFloat = 0.0
    """Scatter of the measured steps around the fit: what no constant explains."""


class HardwareSpec(Record):
    """A homogeneous cluster's building blocks; the number of accelerators belongs to the job."""

    schema_version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=200)
    gpus_per_node: PositiveInt
    accelerator: Accelerator
    scale_up: ScaleUp
    scale_out: ScaleOut
    pods: Pods | None = None
    """None: one network joins all domains."""
    reserved_bytes: Annotated[int, Field(ge=0)]
    """Context, libraries and communicator buffers that no plan can use."""
    fragmentation_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the memory that the caching allocator loses to fragmentation."""
    host_memory: HostMemory | None = None
    """Where weights, activations and optimizer states may be offloaded to; None: nowhere."""
    software: Software = Software()
    uncertainty: Uncertainty | None = None
    """Of constants that an overlay fitted; None where nothing is known."""

    @model_validator(mode="after")
    def _pods_hold_domains(self) -> HardwareSpec:
        domain = self.scale_up.num_gpus
        if self.pods is not None and (self.scale_up.segments or self.pods.num_gpus % domain):
            raise ValueError(
                f"a pod of {self.pods.num_gpus} accelerators must hold whole domains, which have {domain} and no"
                " segments"
            )
        return self

    @property
    def usable_bytes(self) -> int:
        """Bytes of device memory a plan may fill: what the driver shows, less the reserve and fragmentation."""
        whole = self.accelerator.memory_bytes
        return int(whole * (1 - self.fragmentation_fraction)) - self.reserved_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that an accelerator may fill; 0 where the file has none."""
        return 0 if self.host_memory is None else self.host_memory.capacity_bytes
