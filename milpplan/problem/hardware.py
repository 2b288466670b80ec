"""Hardware descriptions: an accelerator, the network tiers that join accelerators, measured tables, software.

All rates are dense, per accelerator, in one direction, in SI units. The formulas stand elsewhere: interpolation in
``milpplan.simulation.layers.kernels``, collectives in ``milpplan.simulation.network.collectives``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from milpplan.problem.records import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Record

Ascending = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
Efficiency = Annotated[float, Field(gt=0, le=1.5)]
Share = Annotated[float, Field(ge=0, le=1)]


def _check_ascending(name: str, values: tuple[float, ...]) -> None:
    if any(low >= high for low, high in pairwise(values)):
        raise ValueError(f"{name} must be strictly ascending, got {values}")


class GemmTable(Record):
    """Fraction of dense peak that an (m x k) by (k x n) product reaches.

    ``efficiency[i][j][l]`` belongs to ``m[i]``, ``n[j]``, ``k[l]``. Values between are interpolated linearly in
    the logarithms; values outside are constant.
    """

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
    """Ratio as a function of a size, interpolated linearly in log(size), constant outside."""

    size: Ascending
    value: Annotated[tuple[Efficiency, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _shape(self) -> SizeCurve:
        _check_ascending("size", self.size)
        if len(self.size) != len(self.value):
            raise ValueError(f"{len(self.size)} sizes but {len(self.value)} values")
        return self


class Precision(Record):
    """Matrix engine of a number format."""

    peak_flops_per_s: PositiveFloat
    gemm: GemmTable
    sustained: Fraction = 1.0
    """Rate of a product inside training over its rate in ``gemm``: short measurements run at higher clocks."""


PrecisionName = Literal["bf16", "fp8", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"]
PRECISIONS: Final[tuple[PrecisionName, ...]] = get_args(PrecisionName)


class Quantization(NamedTuple):
    """Bytes of an operand of a matrix product in a number format."""

    engine: Literal["bf16", "fp8", "nvfp4"]
    copy_bytes: float = 1
    """Bytes of an element of a copy, with its scales."""
    pass_bytes: float = 4
    """Bytes that the kernels which make both copies, by rows and by columns, read and write per element."""
    gathered_bytes: float = 1
    """Bytes of a weight that ranks gather where weights have no bf16 copy."""
    rate: Literal["fp8_blockwise", "mxfp8"] | None = None
    """Field of ``Accelerator`` with the rate of these products over the engine's table; None: equal rates."""


QUANTIZATIONS: Final[dict[PrecisionName, Quantization]] = {
    "bf16": Quantization("bf16", copy_bytes=2, pass_bytes=0, gathered_bytes=2),
    "fp8": Quantization("fp8"),
    "fp8-tensorwise": Quantization("fp8", pass_bytes=6),
    "fp8-blockwise": Quantization("fp8", 1 + 4 / 128, 2 + 2 * (1 + 4 / 128), rate="fp8_blockwise"),
    "mxfp8": Quantization("fp8", 1 + 1 / 32, 2 + 2 * (1 + 1 / 32), gathered_bytes=2, rate="mxfp8"),
    "nvfp4": Quantization("nvfp4", 1 / 2 + 1 / 16, 4 + 2 * (1 / 2 + 1 / 16), gathered_bytes=1 / 2),
}
"""Recipes of Transformer Engine for the products of layers: forward, input and weight gradients.

A copy has a value of 8 or 4 bits, and a scale of 4 bytes in 128 values (``fp8-blockwise``) or of a byte in 32
(``mxfp8``) or 16 (``nvfp4``). A kernel reads bf16 and writes both copies. ``fp8`` takes scales from earlier steps
(delayed scaling); ``fp8-tensorwise`` and ``nvfp4`` first read the tensor for its maximum. Products of Blackwell
need no second copy where a tensor has one scale: an upper bound there. Gathers of MXFP8 weights are in bf16,
because each copy comes from unquantized values. Weights are quantized once a step, which is left out: a lower
bound.

Source: Transformer Engine at d0067d0d, common/recipe/__init__.py, pytorch/tensor/ and common/cast/; Megatron-LM at
d98e8a64, core/distributed/param_and_grad_buffer.py and ``--reuse-grad-buf-for-mxfp8-param-ag``; NVIDIA 2025,
arXiv 2509.25149 (NVFP4), section 3.
"""


class Accelerator(Record):
    """Accelerator as the framework sees it (a GPU; a GCD where a package holds two)."""

    name: str = Field(min_length=1)
    memory_bytes: PositiveInt
    memory_bandwidth_bytes_per_s: PositiveFloat
    memory_bandwidth_efficiency: Fraction
    kernel_latency_s: NonNegativeFloat
    """Fixed cost of one kernel on the critical path."""
    num_processors: Annotated[int, Field(ge=0)] = 0
    """Streaming multiprocessors or compute units. A short attention waits for the last tile of each. 0:
    unknown."""
    vector_flops_per_s: PositiveFloat | None = None
    """fp32 rate outside the matrix engine, for products of sizes that the engine does not support; None: the rate
    of the matrix engine."""
    bf16: Precision
    fp8: Precision | None = None
    """None: the accelerator has no fp8 engine."""
    fp8_blockwise: Efficiency | None = None
    """Rate of fp8 products with a scale in 128 values over that of ``fp8``; None: it has none."""
    mxfp8: Efficiency | None = None
    """Rate of fp8 products with a scale in 32 values over that of ``fp8``; None: it has none."""
    nvfp4: Precision | None = None
    """None: the accelerator has no engine for NVFP4."""
    attention_forward: SizeCurve
    """Fraction of bf16 peak of a causal flash-attention forward, by sequence length."""
    attention_backward: SizeCurve
    """Fraction of bf16 peak of a causal flash-attention backward, by sequence length."""

    def engine(self, precision: PrecisionName) -> Precision | None:
        """Return the matrix engine of a number format, at the rate of its products; None: there is none."""
        row = QUANTIZATIONS[precision]
        engine: Precision | None = getattr(self, row.engine)
        rate: float | None = 1.0 if row.rate is None else getattr(self, row.rate)
        if engine is None or rate is None or rate == 1.0:
            return None if rate is None else engine
        return engine.model_copy(update={"sustained": engine.sustained * rate})

    @property
    def memory_rate_bytes_per_s(self) -> float:
        """Memory bandwidth of an operator that only reads and writes memory."""
        return self.memory_bandwidth_bytes_per_s * self.memory_bandwidth_efficiency


class BusTable(Record):
    """Measured bus bandwidth (nccl-tests' definition) of an operation inside a tier.

    ``bus_bandwidth_bytes_per_s[i][j]`` belongs to ``num_gpus[i]`` ranks and a message of ``message_bytes[j]``.
    """

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
    """Network tier inside a fast domain (NVLink, xGMI or PCIe of a node or a rack)."""

    name: str = Field(min_length=1)
    num_gpus: PositiveInt
    """Accelerators of a domain."""
    segments: tuple[PositiveInt, ...] = ()
    """Numbers of consecutive ranks that a scheduler may place in a domain; empty: it fills domains."""
    bandwidth_bytes_per_s: PositiveFloat
    p2p_efficiency: Fraction
    p2p_latency_s: NonNegativeFloat
    hop_latency_s: NonNegativeFloat = 0.0
    """Latency of every hop inside the domain in a ring across several domains."""
    processor_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the accelerator's compute that a collective uses while it runs beside kernels."""
    in_network_reduction: bool = False
    """True if switches reduce (NVLink SHARP), so that every rank sends the message of an all-reduce once instead
    of 2 (n - 1) / n times. Only for an ``all_reduce`` table of rings: a table measured with NVLink SHARP already
    contains the effect."""
    all_reduce: BusTable
    all_gather: BusTable
    reduce_scatter: BusTable
    all_to_all: BusTable


class HostMemory(Record):
    """An accelerator's share of the host memory: a second memory tier behind the link to the host."""

    capacity_bytes: PositiveInt
    """Bytes that a process may fill: the memory of the node divided by its accelerators."""
    bandwidth_bytes_per_s: PositiveFloat
    """Bandwidth in one direction, per accelerator, with all accelerators of the node at work. Both directions run
    at the same time."""
    efficiency: SizeCurve
    """Share of the bandwidth that a transfer reaches, by its bytes."""


class CollectiveVariant(Record):
    """Algorithm that the library can use for a collective across domains; the fastest algorithm counts.

    A ``tree`` is for all-reduce only: its network hops grow with log2 of the domains, not with their number.
    """

    name: str = Field(min_length=1)
    shape: Literal["ring", "tree"]
    base_latency_s: NonNegativeFloat
    scale_up_hop_latency_s: NonNegativeFloat
    scale_out_hop_latency_s: NonNegativeFloat
    bandwidth_fraction: Fraction
    """Share of the ring's bandwidth."""


class Rails(Record):
    """Rail-optimised wiring: accelerators with equal positions in their domains share a leaf switch."""

    bandwidth_fraction: Fraction = 1.0
    """Rate of a pair on different rails over the rate of a pair on the same rail."""
    latency_s: NonNegativeFloat = 0.0
    """Latency added to a message between rails, and to every hop of a ring or tree that changes the rail."""


class Network(Record):
    """Network tier outside a domain. All accelerators share its bandwidth equally."""

    name: str = Field(min_length=1)
    bandwidth_bytes_per_s: PositiveFloat
    """Bandwidth per accelerator, in one direction."""
    efficiency: Fraction
    """Share of the wire rate that a large message reaches."""
    p2p_latency_s: NonNegativeFloat
    collective_base_latency_s: NonNegativeFloat
    """Base latency of a collective that crosses this network; it replaces the base latency of nearer tiers."""
    hop_latency_s: NonNegativeFloat
    """Latency of every domain (or pod) that a ring passes."""
    processor_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the accelerator's compute that a collective uses while it runs beside kernels."""
    in_network_reduction: bool = False
    """True if switches reduce (InfiniBand SHARP): the data of a domain (or pod) leaves it once in an
    all-reduce."""

    @property
    def rate_bytes_per_s(self) -> float:
        """Bandwidth of an accelerator's large messages, in one direction."""
        return self.bandwidth_bytes_per_s * self.efficiency


class ScaleOut(Network):
    """Network tier between domains."""

    variants: tuple[CollectiveVariant, ...] = ()
    """Algorithms beside the ring that ``collective_base_latency_s`` and the hop latencies describe."""
    congestion_s_per_byte: NonNegativeFloat = 0.0
    """Time that each byte of a ring or tree takes longer for every domain that it passes: traffic of other groups
    and jobs on shared links, and the slowest link of many."""
    ring_bytes_per_s: PositiveFloat | None = None
    """Most bytes/s of a ring or tree between domains, however many members a domain has: a library that does not
    use all NICs of a node. None: the members' NICs."""
    rails: Rails | None = None
    """None: all pairs of accelerators in different domains are alike."""


class Pods(Network):
    """Third network tier: ``scale_out`` joins the domains of a pod, and this network joins the pods."""

    num_gpus: PositiveInt
    """Accelerators of a pod; a pod holds whole domains."""


OWN_COST_MODEL = "milpplan"
"""Name of milpplan's own cost model, beside the plug-ins of ``milpplan.cost_models``."""


FP32_STATE_BYTES = 12
"""Bytes of a master weight and two Adam moments in fp32."""


class Software(Record):
    """Costs of a framework on this hardware that the hardware tables do not contain. The defaults add nothing."""

    name: str = Field(default="none", min_length=1, max_length=200)
    cost_model: str = Field(default=OWN_COST_MODEL, min_length=1, max_length=200)
    """Cost model of the layers: milpplan's own, or an installed plug-in of ``milpplan.cost_models``."""
    layer_launch_s: NonNegativeFloat = 0.0
    """Minimum time of a layer's forward, and half of the minimum time of its backward: the host launches kernels
    in turn, and small kernels wait for their launch."""
    collective_rank_s: NonNegativeFloat = 0.0
    """Host time of a layer's collective for every other rank of its group, added to its launches. It stands for a
    library that checks each call on all ranks before the call starts; message sizes do not matter. The norm of the
    gradients calls all ranks once a step."""
    collective_call_s: NonNegativeFloat = 0.0
    """Host time of every collective call, independent of the number of ranks; 0 for a group of a single rank."""
    collective_far_rank_s: NonNegativeFloat = 0.0
    """Host time of every collective call, beside ``collective_rank_s``, for each rank of the group in another
    domain."""
    far_micro_batch_s: NonNegativeFloat = 0.0
    """Time of a micro-batch outside its layers for every pair of domains that a tensor-parallel group spans."""
    far_step_s: NonNegativeFloat = 0.0
    """Time of a step for every pair of domains that a tensor-parallel group spans: small all-reduces of the norms'
    gradients and of the global gradient norm."""
    far_reduce_s: NonNegativeFloat = 0.0
    """Time of a reduction without ZeRO for every pair of domains that a tensor-parallel group spans: buckets
    beside the calls of the last backward."""
    message_s: NonNegativeFloat = 0.0
    """Host time of a message between pipeline stages, independent of its size, for each of the two stages."""
    reduce_call_bytes: NonNegativeFloat = 0.0
    """Bytes of 16-bit gradients that a call of an unsharded reduction takes; 0: the calls cost nothing."""
    slice_copy_s: NonNegativeFloat = 0.0
    """Host time of a slice in the gather of ``single_calls``: every rank's slice of every weight and norm is
    copied by itself."""
    step_overhead_s: NonNegativeFloat = 0.0
    """Exposed time of a step for data, logging, the optimizer's launches and synchronisation."""
    hidden_gather_fraction: Share = 1.0
    """Part of a parameter gather beside compute that is hidden, of the shorter of both. 1: as much as the compute
    covers; 0: a framework without prefetch, whose gathers and compute follow each other."""
    hidden_reduce_fraction: Share = 1.0
    """Part of a gradient reduction beside compute that is hidden, as ``hidden_gather_fraction``."""
    overlap_tensor_parallel: bool = True
    """True if the backward's tensor-parallel collectives run beside its weight and input gradients."""
    norm_traffic: Annotated[float, Field(ge=1, le=32)] = 1.0
    """Bytes that a norm moves over the bytes of a fused kernel: a norm in single operators copies to fp32,
    squares, averages, scales and copies back."""
    attention_efficiency: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Rate of the flash-attention kernel over the rate in the hardware's table (which names its generation)."""
    dispatch_efficiency: Annotated[float, Field(gt=0, le=50)] = 1.0
    """Rate of the experts' dispatch and combination over the rate in the collectives' tables. Padding to a
    capacity lowers it, and so do concurrent collectives on the same network."""
    norm_kept_bytes: Annotated[float, Field(ge=0, le=32)] = 0.0
    """Bytes that a layer keeps for every element of the input of each of its two norms, beside the tensors of
    fused kernels (input and output): copies in fp32 and the normalised values of a norm in single operators."""
    fused_activation: bool = True
    """True if a gated activation is a single kernel. Otherwise the activation of the gate, 2 bytes an element of
    the feed-forward width, is kept beside its input and the product. For dense MLPs and shared experts."""
    activate_again: bool = False
    """True if the backward applies the activation of a dense or shared MLP again, inside neighbouring kernels, and
    does not keep its output: Calculon's fused activation, which keeps either input or output."""
    fused_gradient_sums: bool = True
    """True if the product of a weight gradient adds to the accumulated gradient itself (Megatron-LM's gradient
    accumulation fusion). Otherwise it writes 16 bits, and another kernel adds them."""
    gathered_inputs: bool = False
    """True if, with sequence parallelism, the inputs of products keep their gathered size from forward to backward
    in every layout. It concerns bytes only; ``Layout.gather_again`` also decides on the second gather in the
    backward. Megatron-LM keeps its share and gathers again."""
    gathered_keys: bool = False
    """True if context-parallel ranks gather all keys and values beside the attention to their own (PyTorch's
    default, ``allgather``). Otherwise they pass blocks of them around a ring. Gradients always go around the
    ring."""
    copied_inputs: bool = False
    """True if every tensor-parallel product of queries, keys, values, gate and up keeps its own copy of its input.
    Otherwise products with the same input share it."""
    operator_checkpoints: bool = False
    """True if selective recomputation keeps the results of the attention kernel, of every second matrix product
    and of exchanges of tokens, and replays all other operators (torchtitan), with flash attention, grouped-query
    attention, and a dense MLP or routed experts. Otherwise it drops the results of norms and activations."""
    fused_qkv: bool = True
    """True if queries, keys and values are one product, of which operator-wise checkpoints keep the result.
    Otherwise they are three, and the keys are replayed."""
    keeps_unread_results: bool = True
    """True if operator-wise checkpoints also keep the result of the last product, which no backward reads; a
    compiled layer does not keep it."""
    score_kept_bytes: Annotated[float, Field(ge=2, le=32)] = 2.0
    """Bytes of every attention score from forward to backward without a flash kernel: the softmax that a fused
    kernel keeps in 16 bits. Dropout adds 3."""
    logit_kept_bytes: Annotated[float, Field(ge=2, le=64)] = 4.0
    """Bytes of every logit from the forward of the loss to its backward: the fp32 softmax of Megatron-LM's fused
    loss; 10 or more where the loss makes copies in fp32."""
    gathered_logits: bool = False
    """True if every tensor-parallel rank holds the logits of the whole vocabulary."""
    deduplicated_dispatch: bool = True
    """True if a token goes once to each domain that holds some of its experts (DeepEP, HybridEP). Otherwise it
    goes once to each of its experts (the all-to-all dispatcher of Megatron-LM)."""
    dummy_weight_gradients: bool = True
    """True if a bf16 buffer stays for every shape of weight. Transformer Engine from 2.3 on hands it to autograd
    where the gradient itself is accumulated elsewhere."""
    gradient_bucket_bytes: Annotated[float, Field(ge=0, le=8)] = 0.0
    """Bytes per parameter of buckets for the reduction, beside the accumulated gradients, where there are replicas
    and gradients are not sharded."""
    reduced_gradient_bytes: Annotated[float, Field(ge=0, le=8)] = 0.0
    """Bytes of a gradient as the replicas send it; 0: those of the accumulated gradient."""
    optimizer_state_bytes: Annotated[float, Field(ge=2, le=16)] = FP32_STATE_BYTES
    """Bytes of the optimizer's states per trained parameter. 12: a master weight and two moments in fp32; 4: two
    moments in 16 bits, of weights that are updated in 16 bits themselves."""
    all_reduces_gradients: bool = False
    """True if replicas all-reduce gradients although ZeRO shards the states. Otherwise they reduce-scatter."""
    single_calls: bool = False
    """True if, with ZeRO 1, one call reduces all gradients of a rank and another gathers all its weights, as lists
    of slices: latencies and calls count once a step. Otherwise they count for every layer."""
    master_shards_only: bool = False
    """True if ZeRO 3 shards only the fp32 weights that the optimizer updates; the 16-bit copies exist only while a
    layer is gathered."""
    fp8_weights_only: bool = False
    """True if weights of 8 or 4 bits have no bf16 copy beside them, and ranks gather them in
    ``Quantization.gathered_bytes`` (Megatron-LM's ``--fp8-param-gather`` and ``--fp4-param-gather``)."""
    allocator_share: Annotated[float, Field(ge=0, le=4)] = 0.0
    """Memory that the caching allocator reserves beyond fragmentation while memory is free, over the allocated
    peak. PyTorch's CUDA caching allocator returns it before an allocation fails, so it does not decide whether a
    plan fits."""

    @property
    def states_text(self) -> str:
        """Words for optimizer states that are not in fp32; empty if they are."""
        size = self.optimizer_state_bytes
        return "" if size == FP32_STATE_BYTES else f"optimizer states of {size:g} bytes per parameter"

    @property
    def unwritten_text(self) -> str:
        """Words for what imported launches may have and no written launch has; empty for none of it."""
        gathered = "gathered keys and values" if self.gathered_keys else ""
        return " and ".join(filter(None, (self.states_text, gathered)))


class Uncertainty(Record):
    """Standard deviations of the constants; 0 stands for an exact constant.

    Efficiencies, ``residual_fraction`` and ``sources_fraction`` are relative (0.05: 5 %), hidden fractions are
    shares, that of the congestion is of its logarithm, all others are seconds.
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
    slice_copy_s: NonNegativeFloat = 0.0
    scale_out_hop_s: NonNegativeFloat = 0.0
    kernel_latency_s: NonNegativeFloat = 0.0
    step_overhead_s: NonNegativeFloat = 0.0
    hidden_gather_fraction: NonNegativeFloat = 0.0
    hidden_reduce_fraction: NonNegativeFloat = 0.0
    congestion_s_per_byte: NonNegativeFloat = 0.0
    residual_fraction: NonNegativeFloat = 0.0
    """Scatter of the measured steps around the fit, which no constant explains."""
    sources_fraction: NonNegativeFloat = 0.0
    """Spread of step times between the measured clusters and others that run the framework."""


MEMORY_MARGIN: Final = 0.05
"""Share of the device's memory that a plan leaves where neither the space nor the hardware says otherwise.

It is the smallest whole per cent for which fewer than 2 % of the published runs that leave it ran out of memory,
in every source of at least 100 runs (``validation.summary.memory_margin``; docs/accuracy.md, Memory)."""


class HardwareSpec(Record):
    """Building blocks of a homogeneous cluster. The number of accelerators belongs to the job."""

    schema_version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=200)
    gpus_per_node: PositiveInt
    accelerator: Accelerator
    scale_up: ScaleUp
    scale_out: ScaleOut
    pods: Pods | None = None
    """None: a single network joins all domains."""
    reserved_bytes: Annotated[int, Field(ge=0)]
    """Memory of context, libraries and communicator buffers, which no plan can use."""
    fragmentation_fraction: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the memory that the caching allocator loses to fragmentation."""
    memory_margin_fraction: Annotated[float, Field(ge=0, le=0.5)] = MEMORY_MARGIN
    """Share of the memory that a safe plan leaves, because peaks are predicted with an error."""
    host_memory: HostMemory | None = None
    """Memory to offload weights, activations and optimizer states to; None: offloading is impossible."""
    software: Software = Software()
    uncertainty: Uncertainty | None = None
    """Uncertainty of the constants; None: that of the priors (``milpplan.problem.overlay``)."""

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
        """Device memory that a plan may fill: the driver's total less fragmentation and the reserve, in bytes."""
        total = self.accelerator.memory_bytes
        return int(total * (1 - self.fragmentation_fraction)) - self.reserved_bytes

    def margin_fraction(self, asked: float | None) -> float:
        """Return the share of the memory to leave: the share asked for, or that of a safe plan."""
        return self.memory_margin_fraction if asked is None else asked

    def capacity_bytes(self, margin_fraction: float | None = None) -> int:
        """Return the usable bytes less a share of the installed memory (None: the margin of a safe plan)."""
        return self.usable_bytes - int(self.margin_fraction(margin_fraction) * self.accelerator.memory_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory that an accelerator may fill, in bytes; 0 without ``host_memory``."""
        return 0 if self.host_memory is None else self.host_memory.capacity_bytes


MAX_NODE_TYPES = 4
"""Maximum number of node types of a cluster: all their orders along the pipeline are tried, 24 for four types."""


class NodeGroup(Record):
    """Nodes of one type in a cluster of several types."""

    hardware: HardwareSpec
    num_gpus: PositiveInt
    """Accelerators of all nodes of this type together."""
