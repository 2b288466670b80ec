"""Records of measured runs, with exactly the values that their sources printed.

A missing value is ``None``: the source did not print it. Types and ranges are strict;
``milpplan.validation.runs.reader`` separates and names fields that are not listed here, because sources add their
own. Units follow the sources, and the suffix names them: ``_GiB`` is 2**30 bytes, ``_GB`` as printed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from milpplan.errors import MilpplanError
from milpplan.problem.records import Count, NonNegativeFloat, PositiveFloat, PositiveInt


class UnstatedError(MilpplanError):
    """Error for a measured run that cannot be simulated: milpplan cannot express something that it uses or
    hides."""


Text = Annotated[str, Field(max_length=20_000)]
Name = Annotated[str, Field(min_length=1, max_length=400)]
Names = tuple[Annotated[str, Field(max_length=400)], ...]


class Sourced(BaseModel):
    """Frozen part of a record; a source's own fields are accepted and reported to the user."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class LatentDims(Sourced):
    """Ranks and head sizes of latent attention."""

    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class ExpertDims(Sourced):
    """Sizes of the experts."""

    num_experts: PositiveInt
    topk: PositiveInt
    moe_ffn_hidden: PositiveInt | None = None
    shared_experts: Count | None = None
    shared_ffn_hidden: Count | None = None
    first_dense_layers: Count | None = None
    mla: LatentDims | None = None
    hybrid_pattern: Text | None = None


class ModelDims(Sourced):
    """Dimensions of the model."""

    name: Name
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    ffn_hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab: PositiveInt | None = None
    seq_len: PositiveInt | None = None
    gated_mlp: bool | None = None
    tied_embeddings: bool | None = None
    moe: ExpertDims | None = None
    extra: dict[str, Any] | None = None
    dims_source: Text | None = None


class Cluster(Sourced):
    """Cluster of the run."""

    gpu: Name
    gpu_mem_GB: PositiveFloat | None = None  # noqa: N815 - the format's name
    gpus_total: PositiveInt | None = None
    gpus_per_node: PositiveInt | None = None
    interconnect: Text | None = None
    measured_busbw_GBps: dict[str, Any] | None = None  # noqa: N815 - the format's name


class Parallel(Sourced):
    """Layout of the run."""

    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    vpp: PositiveInt | None = None
    dp: PositiveInt | None = None
    cp: PositiveInt | None = None
    ep: PositiveInt | None = None
    etp: PositiveInt | None = None
    sp: bool | None = None
    zero: Annotated[int, Field(ge=0, le=3)] | None = None
    fsdp: bool | None = None
    micro_batch: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    grad_accum: PositiveInt | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    recompute_detail: Text | None = None
    precision: Text | None = None
    schedule: Text | None = None
    extra: dict[str, Any] | None = None

    def noted(self, key: str) -> Any:
        """Return a source's own field, or None."""
        return (self.extra or {}).get(key)


class Measured(Sourced):
    """Measured values. Utilisations are fractions of the source's peak; zero means lost in rounding."""

    status: Literal["ok", "oom", "error", "unsupported"]
    step_time_s: PositiveFloat | None = None
    tokens_per_s_per_gpu: NonNegativeFloat | None = None
    tflops_per_gpu: NonNegativeFloat | None = None
    tflops_kind: Text | None = None
    mfu: NonNegativeFloat | None = None
    hfu: NonNegativeFloat | None = None
    peak_mem_GiB: PositiveFloat | None = None  # noqa: N815 - the format's name
    peak_mem_reported: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


class Run(Sourced):
    """Measured run.

    ``framework``: its name, where ``group`` does not indicate it. ``grade``: A, every field that a simulator needs
    is known; B and C, some or many are missing.
    """

    id: Name
    group: Name
    framework: Name | None = None
    kind: Name = "pretrain"
    sweep_id: Name | None = None
    cluster: Text | None = None
    source: Text | None = None
    url: Text | None = None
    seen: Text | None = None
    grade: Literal["A", "B", "C"]
    missing: Names = ()
    derived: Names = ()
    flags: Names = ()
    model: ModelDims
    hardware: Cluster
    parallel: Parallel
    measured: Measured
    notes: Text | None = None
