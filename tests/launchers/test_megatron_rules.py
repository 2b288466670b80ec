"""Megatron-LM's rules as they are restated here, and its own list of arguments."""

from __future__ import annotations

import pytest

from milpplan import load_model
from milpplan.errors import IllegalPlanError, InvalidInputError
from milpplan.launchers.megatron.flags import Arguments, checked, megatron_flags, model_arguments
from milpplan.launchers.megatron.rules import RULES, broken_rules, check_environment, check_rules
from milpplan.launchers.shell import pairs_of

DENSE = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 28672 --swiglu --seq-length 4096 --max-position-embeddings 4096 --disable-bias-linear "
    "--micro-batch-size 1 --global-batch-size 128 "
)
EXPERTS = (
    "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --multi-latent-attention "
    "--ffn-hidden-size 18432 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 --seq-length 4096 "
    "--disable-bias-linear --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024 "
    "--moe-layer-freq ([0]*3+[1]*58) "
)
STAGES = "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "

PASSING = {
    # Sets that passed the parser, validate_args and TransformerConfig of Megatron-LM at d98e8a64.
    "vpp": (64, DENSE + "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8 "
            "--num-virtual-stages-per-pipeline-rank 5 --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --tp-comm-overlap"),
    "uneven": (64, DENSE + STAGES + "--pipeline-model-parallel-layout Et*19|t*21|t*21|t*19L "
               "--recompute-granularity full --recompute-method block --recompute-num-layers 5"),
    "chunks": (64, DENSE + STAGES + "--pipeline-model-parallel-layout E,(t*7|)*4,(t*6|)*2,(t*7|)*5,tttttL"),
    "empty stage": (32, DENSE + STAGES + "--pipeline-model-parallel-layout Et*40|t*40||L"),
    "ends": (64, DENSE + STAGES + "--decoder-first-pipeline-num-layers 18 --decoder-last-pipeline-num-layers 20"),
    "experts": (256, EXPERTS + "--pipeline-model-parallel-size 8 --expert-model-parallel-size 32 "
                "--expert-tensor-parallel-size 1 --pipeline-model-parallel-layout Et*4|(t*4|)*14,tL"),
    "few key heads": (32, DENSE + "--tensor-model-parallel-size 16 --sequence-parallel"),
}  # fmt: skip

BREAKING = {
    "world_is_whole_replicas": (60, DENSE + STAGES),
    "heads_divide": (64, DENSE + "--tensor-model-parallel-size 8 --num-query-groups 6"),
    "widths_divide": (64, DENSE + "--tensor-model-parallel-size 64 --sequence-parallel --ffn-hidden-size 28704"),
    "experts_divide": (288, EXPERTS + "--expert-model-parallel-size 3 --global-batch-size 288"),
    "expert_grid_divides_world": (48, EXPERTS + "--expert-model-parallel-size 32 --global-batch-size 96"),
    "biased_experts_are_not_split": (
        16, EXPERTS.replace("--disable-bias-linear", "") + "--tensor-model-parallel-size 2 --sequence-parallel"),
    "experts_keep_stages_and_replicas": (
        64, EXPERTS + "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --expert-model-parallel-size 8 "
        "--pipeline-model-parallel-layout Et*30|t*31L"),
    "sequence_parallel_with_experts": (
        16, EXPERTS + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2"),
    "sequence_divides": (64, DENSE + "--context-parallel-size 8 --seq-length 4088"),
    "context_levels_multiply": (
        64, DENSE + "--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    "whole_windows": (64, DENSE + "--context-parallel-size 8 --window-size 1024,0"),
    "positions_suffice": (64, DENSE + "--max-position-embeddings 2048"),
    "mtp_positions": (64, DENSE + "--mtp-num-layers 1 --position-embedding-type learned_absolute"),
    "layers_divide": (96, DENSE + "--pipeline-model-parallel-size 3 --global-batch-size 96"),
    "batch_divides": (64, DENSE + "--global-batch-size 100"),
    "optimizer_instances_divide": (64, DENSE + "--num-distributed-optimizer-instances 3"),
    "interleaving": (
        32, DENSE + STAGES + "--num-virtual-stages-per-pipeline-rank 5 --global-batch-size 6"),
    "recompute": (64, DENSE + "--recompute-granularity full"),
    "recompute_modules": (64, DENSE + "--recompute-granularity selective --recompute-modules mla_up_proj"),
    "param_gather_overlap": (64, DENSE + "--use-distributed-optimizer --overlap-param-gather"),
    "tp_overlap_needs_sequence_parallel": (64, DENSE + "--tensor-model-parallel-size 2 --tp-comm-overlap"),
    "fp8_gather_is_sharded": (64, DENSE + "--fp8-format hybrid --fp8-param-gather"),
    "fp8_gather_is_fp8": (64, DENSE + "--fp8-param-gather --use-distributed-optimizer"),
    "fp4_gather_is_fp4": (64, DENSE + "--fp4-param-gather"),
    "fp4_or_fp8": (64, DENSE + "--fp4-format e2m1 --fp8-format hybrid"),
    "mxfp8_gather_is_fp8": (64, DENSE + "--fp8-format e4m3 --reuse-grad-buf-for-mxfp8-param-ag"),
    "fsdp_checkpoints": (64, DENSE + "--use-megatron-fsdp"),
    "torch_fsdp": (64, DENSE + "--use-torch-fsdp2 --use-distributed-optimizer"),
    "latent_attention_has_no_groups": (64, EXPERTS + "--group-query-attention"),
    "one_number_format": (64, DENSE + "--bf16 --fp16"),
    "one_activation": (64, DENSE + "--squared-relu"),
    "loss_fusion": (64, DENSE + "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"),
}  # fmt: skip


def arguments_of(text: str) -> Arguments:
    """Arguments of a line; the last of two spellings counts."""
    given, unknown = checked(pairs_of(text.split())[0], "the line")
    assert unknown == ()
    return given


@pytest.mark.parametrize("name", PASSING)
def test_what_megatron_admits_breaks_no_rule(name: str) -> None:
    """Sets that Megatron-LM's own code admitted."""
    world, text = PASSING[name]
    assert broken_rules(arguments_of(text), world) == {}


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_an_example_that_breaks_it(name: str) -> None:
    """The example breaks this rule and no other; the error names the rule and its place."""
    world, text = BREAKING[name]
    given = arguments_of(text)
    assert list(broken_rules(given, world)) == [name]
    with pytest.raises(IllegalPlanError, match=name) as caught:
        check_rules(given, world, "Do this.")
    assert caught.value.do == "Do this."


def test_the_device_has_one_queue_or_several() -> None:
    """One with tensor parallelism, more with Megatron-FSDP, either way without both."""
    split, sharded, plain = (arguments_of(DENSE + more) for more in (STAGES, "--use-megatron-fsdp", ""))
    for given, queues, admitted in (
        (split, "1", True), (split, "8", False), (sharded, "8", True), (sharded, "1", False), (plain, "8", True),
    ):  # fmt: skip
        if admitted:
            check_environment(given, {"CUDA_DEVICE_MAX_CONNECTIONS": queues})
            continue
        with pytest.raises(IllegalPlanError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
            check_environment(given, {"CUDA_DEVICE_MAX_CONNECTIONS": queues})


def test_the_list_of_arguments_is_megatrons() -> None:
    """838 arguments beside --help; the four that older versions and other forks have are not among them."""
    flags = megatron_flags()
    assert len({flag.name for flag in flags.values()}) == 838
    for absent in (
        "--virtual-pipeline-model-parallel-size", "--zero-stage", "--standalone-embedding-stage",
        "--variable-seq-lengths",
    ):  # fmt: skip
        assert absent not in flags
    assert flags["--recompute-method"].choices == ("uniform", "block")
    assert flags["--disable-tp-comm-bulk-wgrad"].name == "--no-tp-comm-bulk-wgrad"
    assert flags["--moe-token-dispatcher-type"].default == "allgather"


@pytest.mark.parametrize(
    "words",
    ["--num-layers x", "--num-layers", "--num-layers 1 2", "--bf16 yes", "--recompute-method both",
     "--rampup-batch-size 1 2", "--cp-comm-type", "--lr fast"],
)  # fmt: skip
def test_values_that_the_parser_refuses(words: str) -> None:
    """Types, choices and numbers of values are checked as argparse does."""
    with pytest.raises(InvalidInputError, match=words.split()[0]):
        arguments_of(words)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("qwen3-next-80b", "gated attention and linear recurrences"),
        ("kimi-linear-48b", "linear recurrences"),
        ("nemotron-3-nano", "layers of one block and linear recurrences"),
    ],
)
def test_models_that_no_arguments_build_are_refused_by_their_parts(name: str, parts: str) -> None:
    """The refusal names what the model has, and nothing else."""
    with pytest.raises(IllegalPlanError, match=f"^{name} has {parts}, which Megatron-LM cannot build"):
        model_arguments(load_model(name), 4_096)
