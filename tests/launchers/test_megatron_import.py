"""Other people's Megatron-LM files: what they mean, and what is refused because nobody could price it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milpplan.errors import IllegalPlanError, InvalidInputError, MilpplanError
from milpplan.launchers import ImportRequest
from milpplan.launchers.megatron.flags import Flag, megatron_flags
from milpplan.launchers.megatron.launcher import Imported, imported, is_quiet
from tests.amounts import long_but
from tests.simulation.cases import shipped_hardware, shipped_model

DATA = Path(__file__).parents[1] / "data" / "launchers"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=8
GPUS_PER_NODE=8
TP=4
PP=${PP:-2}
GPT_ARGS="
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights --vocab-size 128256 --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 1 --global-batch-size 256 --bf16 --lr 3e-4 --train-iters 1000
    --use-distributed-optimizer --overlap-grad-reduce --cross-entropy-loss-fusion
"
torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py $GPT_ARGS --data-path $DATA MORE
"""


def read(text: str = SCRIPT, source: str = "run.sh", **more: Any) -> Imported:
    """The import of a text, on DGX H100."""
    return imported(ImportRequest(text, source, shipped_hardware("dgx-h100"), **more))


def test_a_script_of_the_old_kind() -> None:
    """Flags in one string, nodes from Slurm, processes from torchrun, paths from the environment."""
    found = read(model=shipped_model("llama3-8b"))
    layout = found.plan.layout
    assert (layout.tp, layout.pp, layout.dp, layout.vpp, layout.zero_stage) == (4, 2, 8, 1, 1)
    assert (layout.sequence_parallel, layout.overlap_grad_reduce, layout.overlap_param_gather) == (
        True,
        True,
        False,
    )
    assert [stage.layers for stage in found.plan.virtual_stages] == [(0, 16), (16, 32)]
    assert found.problem.model == shipped_model("llama3-8b")
    assert found.problem.job.num_gpus == 64
    assert found.unknown_flags == ()


def test_a_yaml_says_the_same_as_the_script() -> None:
    """Names with or without dashes, true for switches, false for switches that are off."""
    lines = ["MODEL_ARGS:"]
    flags = SCRIPT.split('"')[1].replace("$TP", "4").replace("$PP", "2").split("--")[1:]
    for flag in flags:
        name, _, value = flag.strip().partition(" ")
        lines.append(f"  {'--' + name if len(name) % 2 else name.replace('-', '_')}: {value or 'true'}")
    text = "\n".join([*lines, "  --tp-comm-overlap: false", "  world_size: 64"])
    found, script = read(text, "args.yaml"), read()
    assert found.plan == script.plan
    assert found.problem == script.problem


def test_flagscale_sorts_the_arguments_into_tables() -> None:
    """Last names are arguments, whatever their table; tokenizers of its own and interpolations of what costs
    nothing are left; the width of a gated block follows from a multiple, by the formula of its parser."""
    flags = SCRIPT.split('"')[1].replace("$TP", "4").replace("$PP", "2").split("--")[1:]
    lines = []
    for flag in flags:
        name, _, value = flag.strip().partition(" ")
        lines.append(f"    {name.replace('-', '_')}: {value or 'true'}")
    half = len(lines) // 2
    tables = ["system:", "  parallel:", *lines[:half], "  logging:", "    save_interval: ${experiment.steps}"]
    tables += [
        "model:",
        "  optimizer:",
        *lines[half:],
        "data:",
        "  tokenizer:",
        "    tokenizer_type: SomeTokenizerFS",
    ]
    text = "\n".join(tables)
    found = read(text, "8b.yaml", num_gpus=64)
    assert (found.plan, found.problem) == (read().plan, read().problem)
    wide = text.replace("    ffn_hidden_size: 14336", "    multiple_of: 1024\n    hidden_dim_multiplier: 1.3")
    assert read(wide, "8b.yaml", num_gpus=64).problem.model == read().problem.model
    with pytest.raises(InvalidInputError, match="hidden-dim-multiplier"):
        read(wide.replace("    multiple_of: 1024\n", ""), "8b.yaml", num_gpus=64)


@pytest.mark.parametrize(
    ("text", "program", "reader"),
    [
        ("stage: sft\nfinetuning_type: full", "LLaMA-Factory", "accelerate"),
        ("base_model: a\ndatasets: []", "axolotl", "accelerate"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP", "Accelerate", "accelerate"),
        ("step_scheduler: {}\nmodel: {}", "NeMo AutoModel", "automodel"),
        ("parallelism: {}\ntokens: {}", "nanotron", "nanotron"),
    ],
)
def test_a_yaml_of_another_program_is_named(text: str, program: str, reader: str) -> None:
    """Its keys are no arguments: the message says whose they are, and who reads them."""
    with pytest.raises(InvalidInputError, match=f"is a configuration of {program}") as caught:
        read(text, "x.yaml")
    assert f"--from {reader}" in caught.value.do


def test_fp16_is_priced_as_bf16_with_gradients_of_16_bits() -> None:
    """The bytes are the same; only bf16 accumulates in fp32 unless a flag says so, and the note tells."""
    half = read(SCRIPT.replace("--bf16", "--fp16"))
    assert half.plan == read().plan
    assert half.problem.job.grad_dtype == "bf16"
    assert any(note.startswith("fp16 is priced as bf16") for note in half.notes)
    whole = read(SCRIPT.replace("--bf16", "--fp16 --accumulate-allreduce-grads-in-fp32"))
    assert whole.problem == read().problem


def test_flags_of_a_fork_are_named_before_its_values() -> None:
    """A tokenizer that only the fork has tells less than the flags whose cost nobody knows."""
    text = SCRIPT.replace("MORE", "--tokenizer-type PretrainedFromHF --glu-activation geglu")
    with pytest.raises(InvalidInputError, match="--glu-activation"):
        read(text)


def test_a_norm_after_the_embedding_is_noted() -> None:
    """A norm after the embedding changes no number, and the answer says what is left out."""
    found = read(SCRIPT.replace("MORE", "--embed-layernorm"))
    assert (found.problem, found.plan) == (read().problem, read().plan)
    assert set(found.notes) - set(read().notes) == {
        "--embed-layernorm is not counted: a norm after the embedding, one of 2 L + 2 norms of L layers, with 2 h "
        "parameters."
    }
    assert not found.ignored_flags


def test_rows_of_another_divisor_are_noted_within_a_thousandth() -> None:
    """128,200 words over tp = 4 make 128,512 rows with 128; 128,256 with 64 are 0.2 % less, 128,576 with 112 are
    0.05 % more."""
    text = SCRIPT.replace("--vocab-size 128256", "--vocab-size 128200")
    with pytest.raises(InvalidInputError, match="--make-vocab-size-divisible-by 64"):
        read(text.replace("MORE", "--make-vocab-size-divisible-by 64"))
    found = read(text.replace("MORE", "--make-vocab-size-divisible-by 112"))
    assert any("makes 128,576 rows" in note and "128,512 are priced" in note for note in found.notes)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("", 2 + 4 + 4),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 2 + 2 + 2),
        ("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 --main-params-dtype fp16", 2 + 1 + 2),
        ("--exp-avg-dtype bf16 --fp8-format e4m3 --fp8-recipe tensorwise", 4 + 2 + 4),
        ("--exp-avg-dtype bf16 --fp8-format e4m3 --fp8-recipe delayed", 2 + 2 + 4),
    ],
)
def test_precision_aware_states_have_the_bytes_of_their_formats(words: str, size: int) -> None:
    """A master weight keeps 16 bits beside a bf16 weight, all 32 where Megatron-Core keeps it; and two moments."""
    found = read(SCRIPT.replace("MORE", f"--use-precision-aware-optimizer {words}"))
    assert found.problem.hardware.software.optimizer_state_bytes == size


def test_a_capacity_above_the_mean_drops_nothing() -> None:
    """Experts are evenly loaded: room for less than the mean drops tokens, and padding adds some."""
    experts = "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm"
    plain = read(SCRIPT.replace("MORE", experts))
    assert read(SCRIPT.replace("MORE", f"{experts} --moe-expert-capacity-factor 1.5")).problem == plain.problem
    for words in ("0.5", "2 --moe-pad-expert-input-to-capacity"):
        with pytest.raises(InvalidInputError, match="capacity"):
            read(SCRIPT.replace("MORE", f"{experts} --moe-expert-capacity-factor {words}"))


def test_groups_act_in_grouped_attention_alone() -> None:
    """Megatron-LM drops a number of groups without --group-query-attention."""
    alone = SCRIPT.replace("--group-query-attention --num-query-groups 8", "GROUPS")
    assert (
        read(alone.replace("GROUPS", "--num-query-groups 4")).problem == read(alone.replace("GROUPS", "")).problem
    )


def test_a_command_that_is_printed_is_not_started() -> None:
    """Scripts show their command before they start it."""
    assert read(SCRIPT.replace("torchrun", "echo pretrain_gpt.py --bf16 --fp16\ntorchrun")).plan == read().plan


@pytest.mark.parametrize(
    ("flag", "layers"),
    [
        ("--num-layers-per-virtual-pipeline-stage 4", [4] * 8),
        ("--num-virtual-stages-per-pipeline-rank 4", [4] * 8),
        ("--decoder-first-pipeline-num-layers 14", [14, 18]),
        ("--decoder-last-pipeline-num-layers 10", [22, 10]),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [16, 16]),
        ("--pipeline-model-parallel-layout Et*10|t*22|L|", None),
        ("--pipeline-model-parallel-layout Et*10|t*20||t*2L", [10, 20, 0, 2]),
    ],
)
def test_every_way_to_split_layers(flag: str, layers: list[int] | None) -> None:
    """All of Megatron-LM's ways give the layers of every virtual stage, in model order."""
    text = SCRIPT.replace("--bf16", f"--bf16 {flag}")
    if layers is None:
        with pytest.raises(InvalidInputError, match="pipeline-model-parallel-layout"):
            read(text)
        return
    assert [stage.num_layers for stage in read(text).plan.virtual_stages] == layers


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--bf16 --delay-wgrad-compute", "delay-wgrad-compute"),
        ("--bf16 --mtp-num-layers 2 --mtp-use-repeated-layer", "mtp-use-repeated-layer"),
        ("--bf16 --rampup-batch-size 32 32 1000", "rampup-batch-size"),
        ("--bf16 --optimizer-cpu-offload --use-precision-aware-optimizer", "optimizer-cpu-offload"),
        ("--bf16 --cpu-offloading-num-layers 4", "cpu-offloading"),
        ("--bf16 --optimizer lion", "--optimizer is lion"),
        ("--lr 1", "fp32"),
        ("--bf16 --recompute-granularity selective --recompute-modules moe shared_experts", "moe, shared_experts"),
        ("--bf16 --recompute-granularity selective --recompute-modules gdn_norm_out", "gdn_norm_out"),
        ("--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "every 4th"),
        ("--bf16 --position-embedding-type relative", "relative"),
        ("--bf16 --tensor-model-parallel-size $OUTSIDE", "OUTSIDE"),
        ("--bf16 --make-vocab-size-divisible-by 8", "make-vocab-size"),
        ("--bf16 --num-layers", "--num-layers"),
        ("--bf16 --num-layers 1000000000", "--num-layers"),
    ],
)
def test_flags_that_change_the_cost_are_never_ignored(change: str, named: str) -> None:
    """What cannot be priced is refused by name, and the message says what to do."""
    with pytest.raises(InvalidInputError, match=named) as caught:
        read(SCRIPT.replace("--bf16", change))
    assert caught.value.do


def test_the_caller_may_accept_not_to_see_a_cost() -> None:
    """``ignored`` leaves any flag out and tells it; one that the launcher does not have is refused by name."""
    text = SCRIPT.replace("--bf16", "--bf16 --delay-wgrad-compute --from-another-fork $HOME/3")
    found = read(text, ignored=["delay_wgrad_compute", "from-another-fork"])
    assert found.ignored_flags == ("--delay-wgrad-compute", "--from-another-fork $HOME/3")
    assert found.unknown_flags == ()
    assert found.plan == read().plan
    with pytest.raises(InvalidInputError, match=r"--from-another-fork.*--ignore from-another-fork"):
        read(text, ignored=["delay_wgrad_compute"])
    with pytest.raises(InvalidInputError, match="no argument"):
        read(ignored=["nothing-of-it"])


def test_recomputation_and_defaults() -> None:
    """``block`` counts layers of every virtual stage; the batch is one micro-batch a replica where none is given;
    sharding over one replica is none."""
    text = SCRIPT.replace(
        "--bf16", "--bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 5 "
        "--num-virtual-stages-per-pipeline-rank 8"
    )  # fmt: skip
    stages = read(text).plan.virtual_stages
    assert [stage.recompute.full for stage in stages] == [2] * 16
    assert read(SCRIPT.replace("--global-batch-size 256", "")).problem.job.global_batch_size == 8
    alone = SCRIPT.replace("--nodes=8", "--nodes=1")
    layout = read(alone).plan.layout
    assert (layout.dp, layout.zero_stage, layout.overlap_grad_reduce) == (1, 0, False)


SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50304 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --attention-dropout 0 "
    "--hidden-dropout 0"
)
START = "torchrun --nnodes 1 --nproc-per-node 8"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"{START} pretrain_bert.py {SIZES}", "a BERT"),
        (f"{START} pretrain_mamba.py {SIZES}", "Mamba"),
        (f"{START} train_mine.py {SIZES}", "--ignore train_mine.py"),
        (f"{START} pretrain_gpt.py {SIZES} --fp8-format e4m3 --fp8-recipe mxfp8", "Blackwell"),
        (f"{START} pretrain_gpt.py {SIZES} --fp8-format e4m3 --fp8-recipe custom", "custom"),
        (f"{START} pretrain_gpt.py {SIZES} --checkpoint-activations --recompute-activations", "together"),
        (
            f'if [ "$AC" = full ]; then ac="--bf16"; else ac=""; fi\n{START} pretrain_gpt.py {SIZES} $ac',
            "--set AC=",
        ),
        (f"{START} pretrain_gpt.py {SIZES} --codecarbon-dir $SCRATCH/cc", "--ignore codecarbon-dir"),
        (f'{START} pretrain_gpt.py {SIZES} "$@"', "--args"),
        (f"source sizes.sh\n{START} pretrain_gpt.py {SIZES} $SIZES", "sizes.sh"),
        (f"{START} pretrain_gpt.py {SIZES} --group-query-attention", "--num-query-groups"),
    ],
)
def test_nothing_is_priced_that_was_not_understood(text: str, named: str) -> None:
    """Programs, recipes, groups and files that are not known are refused by name; no mark is in the message."""
    with pytest.raises(InvalidInputError) as caught:
        read(text)
    assert named in str(caught.value)
    assert "\0" not in str(caught.value)


def test_the_program_that_trains_is_the_one_that_is_read() -> None:
    """Data preparation beside it counts for nothing; another program is a GPT where the caller says so."""
    plain = read(f"{START} pretrain_gpt.py {SIZES}")
    assert read(f"python prepare_data.py --split train\n{START} pretrain_gpt.py {SIZES}").plan == plain.plan
    mine = read(f"{START} train_mine.py {SIZES}", ignored=["train_mine.py"])
    assert mine.plan == plain.plan
    assert "train_mine.py" in mine.ignored_flags[0]


def test_arguments_of_2021_recompute_everything() -> None:
    """``--checkpoint-activations`` is full recomputation, and the note says so."""
    found = read(f"{START} pretrain_gpt.py {SIZES} --checkpoint-activations --checkpoint-num-layers 1")
    assert [stage.recompute.full for stage in found.plan.virtual_stages] == [32]
    assert any("2021" in note for note in found.notes)


def test_the_reduction_of_2021_is_megatrons_own() -> None:
    """``--DDP-impl local`` is what today's Megatron-LM does; PyTorch's reduces otherwise."""
    assert read(SCRIPT.replace("MORE", "--DDP-impl local")).plan == read(SCRIPT.replace("MORE", "")).plan
    with pytest.raises(InvalidInputError, match="--DDP-impl torch"):
        read(SCRIPT.replace("MORE", "--DDP-impl torch"))


def test_megatrons_own_refusals_are_quoted() -> None:
    """A launch that Megatron-LM would refuse is refused with its rule."""
    with pytest.raises(IllegalPlanError, match=r"batch_divides.*d98e8a64"):
        read(SCRIPT.replace("--global-batch-size 256", "--global-batch-size 100"))


def test_the_number_of_processes_must_be_known_once() -> None:
    """From the file or from the caller, who may know better than the file's defaults, and is told so."""
    bare = (
        SCRIPT.partition("torchrun")[0].partition('"')[2].partition('"')[0].replace("$TP", "4").replace("$PP", "2")
    )
    assert read(bare, num_gpus=64).plan == read().plan
    with pytest.raises(InvalidInputError, match="--gpus"):
        read(bare)
    other = read(num_gpus=32)
    assert other.plan.layout.dp == 4
    assert "64 processes" in other.notes[0]


def test_another_model_than_the_one_named_is_told() -> None:
    """``model`` is held to the sizes of the arguments; of a tokenizer's vocabulary only it knows the size."""
    with pytest.raises(InvalidInputError, match="vocab_size"):
        read(model=shipped_model("mistral-7b"))
    without = SCRIPT.replace("--vocab-size 128256", "")
    assert read(without, model=shipped_model("llama3-8b")).problem.model.vocab_size == 128256
    assert read(without, vocab_size=128256).problem == read().problem
    with pytest.raises(InvalidInputError, match="vocab-size"):
        read(without)


def test_flags_that_are_read_as_harmless_are_of_the_parser() -> None:
    """Nothing that a plan is made of is in the table of harmless flags; learning, data and logs are."""
    for name in (
        "--tensor-model-parallel-size", "--recompute-modules", "--optimizer", "--rampup-batch-size",
        "--mtp-num-layers", "--fp8-format", "--moe-expert-capacity-factor", "--use-nccl-ub", "--cuda-graph-impl",
    ):  # fmt: skip
        assert name in megatron_flags()
        assert not is_quiet(name)
    for name in ("--use-checkpoint-args", "--rerun-mode", "--log-params-norm"):
        assert not is_quiet(name)
    for name in ("--lr", "--data-path", "--tensorboard-dir", "--save-interval", "--seed", "--adam-beta1"):
        assert name in megatron_flags()
        assert is_quiet(name)


@pytest.mark.parametrize(
    "words",
    [
        *("--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--rerun-mode report_stats"),
        *("--distributed-backend gloo", "--empty-unused-memory-level 1", "--timing-log-level 2"),
        *("--log-params-norm", "--log-num-zeros-in-grad", "--log-max-attention-logit"),
    ],
)
def test_what_works_in_every_step_is_refused(words: str) -> None:
    """Sizes that a checkpoint decides, steps that run twice, messages through hosts, memory given back in every
    step, timers that wait for the device, and norms of all weights: none is a record between steps."""
    with pytest.raises(InvalidInputError, match=words.split()[0]):
        read(SCRIPT.replace("MORE", words))
    name = words.split()[0]
    assert read(SCRIPT.replace("MORE", words), ignored=(name,)).plan == read().plan


@pytest.mark.parametrize(
    "words", ["--rerun-mode disabled", "--distributed-backend nccl", "--timing-log-level 0", "--log-interval 1"]
)
def test_other_values_of_such_flags_cost_nothing(words: str) -> None:
    """They are read without a word."""
    found = read(SCRIPT.replace("MORE", words))
    assert (found.plan, found.ignored_flags) == (read().plan, ())


def test_positions_that_are_not_priced_are_refused() -> None:
    """A model without positions spares the rotation that is priced."""
    with pytest.raises(InvalidInputError, match="position-embedding-type is none"):
        read(SCRIPT.replace("--position-embedding-type rope", "--position-embedding-type none"))


@pytest.mark.parametrize("value", ["{a: 1}", "[[1]]", "2026-01-01"])
def test_values_that_no_command_line_has(value: str) -> None:
    """Tables, lists of lists and dates of a YAML are refused by name."""
    with pytest.raises(InvalidInputError, match="lr"):
        read(f"lr: {value}", "args.yaml", num_gpus=8)


NAMES = sorted({flag.name for flag in megatron_flags().values()})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES), st.sampled_from(["", "1", "2", "-1", "0", "7", "x", "selective", "$X", "1 2"])
        ),
        max_size=4,
    )
)
def test_any_flags_are_read_or_refused(extra: list[tuple[str, str]]) -> None:
    """Random flags of the parser with random values: a plan, or a message in three parts."""
    words = " ".join(f"{name} {value}" for name, value in extra)
    try:
        found = read(SCRIPT.replace("--bf16", f"--bf16 {words}"))
    except MilpplanError as error:
        if not (error.seen and error.expected and error.do):
            raise
    else:
        assert found.plan.layout.num_gpus == 64


@settings(max_examples=40, deadline=None)
@given(
    st.text(max_size=80) | st.text(alphabet="-: \n{}[]abc1'\"", max_size=60), st.sampled_from(["x.sh", "x.yaml"])
)
def test_any_text_is_read_or_refused(text: str, source: str) -> None:
    """Whatever the file holds, the answer is a message."""
    with pytest.raises(MilpplanError):
        read(text, source, num_gpus=8)


def test_kept_scripts_parse_as_bash() -> None:
    """Every golden script is one that bash reads."""
    files = [file for file in DATA.iterdir() if file.suffix == ".sh"]
    assert len(files) == 4
    for file in files:
        subprocess.run(["bash", "-n", str(file)], check=True)


EXPERTS = (DATA / "deepseek-v3-experts.sh").read_text(encoding="utf-8").rstrip() + " MORE\n"
BASES = {"dense": SCRIPT, "experts": EXPERTS}
ALIKE = {
    "--sequence-parallel": "one rank of tensor parallelism",
    "--attention-backend": "auto takes a flash kernel, too",
    "--kv-channels": "latent attention has sizes of its own",
    "--fp8-format": "e4m3 has as many bytes as hybrid",
    "--fp8-recipe": "without --fp8-format, or the default",
    "--fp4-recipe": "without --fp4-format",
    "--softmax-type": "off-by-one is a constant in the sum",
    "--window-attn-skip-freq": "without --window-size",
    "--cp-comm-type": "without context parallelism",
    "--microbatch-group-size-per-virtual-pipeline-stage": "without virtual stages",
    "--no-overlap-p2p-communication": "without virtual stages",
    "--accumulate-allreduce-grads-in-fp32": "the default with bf16",
    "--data-parallel-sharding-strategy": "no_shard is the default",
    "--moe-grouped-gemm": "the default of its dispatcher",
    "--rerun-mode": "disabled runs every step once, as the default does",
    "--expert-tensor-parallel-size": "without experts",
    "--moe-token-dispatcher-type": "without experts",
    "--make-vocab-size-divisible-by": "the vocabulary is a multiple of both divisors",
    "--num-query-groups": "the script has no --group-query-attention",
    "--use-precision-aware-optimizer": "with scales of fp8 that are not delayed all states stay in fp32",
    **dict.fromkeys(
        ("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"),
        "without latent attention",
    ),
}
"""Flags that are read and whose value in this test changes nothing in these scripts, with the reason."""


NEEDS = {
    "--num-experts": "the message names --moe-router-topk, which must come with it",
    "--recompute-activations": "the message names the modules that it would recompute",
    "--transformer-impl": "the message names the recomputed modules, which need its kernels",
}
"""Flags that are refused through what they change, and what the message names in their place."""


def words_of(flag: Flag) -> str:
    """Write a flag with values of its kind that are not its default."""
    if flag.kind != "value":
        return flag.name
    count = 1 if flag.nargs in (None, "+", "*") else int(flag.nargs)
    other = {"int": "4" if flag.default == "2" else "2", "float": "0.25", "str": "other"}[flag.type]
    value = next((one for one in flag.choices if one != flag.default), other)
    return " ".join([flag.name, *[value] * count])


@pytest.mark.parametrize("base", long_but(("dense",), BASES))
def test_every_flag_is_priced_listed_or_refused(base: str) -> None:
    """Each of Megatron-LM's flags changes the answer, or is on the list of those that change nothing, or is
    refused by its name or a quoted rule of Megatron-LM's; then ``--ignore`` takes it, gives the answer without it,
    and names it."""
    plain = read(BASES[base].replace("MORE", ""))
    silent, seen = [], {"priced": 0, "quiet": 0, "refused": 0}
    for flag in dict.fromkeys(megatron_flags().values()):
        words = words_of(flag)
        if any(re.search(rf"{one}\b(?!-)", BASES[base]) for one in flag.spellings):
            # The script itself has it.
            continue
        text = BASES[base].replace("MORE", words)
        try:
            found = read(text)
        except MilpplanError as error:
            seen["refused"] += 1
            named = isinstance(error, IllegalPlanError) or flag.name in str(error) or flag.name in NEEDS
            silent += [f"{words}: {error}"] * (not named)
            left = read(text, ignored=(flag.name,))
            told = [one.split()[0] for one in left.ignored_flags] == [flag.name]
            same = (left.problem, left.plan, left.notes) == (plain.problem, plain.plan, plain.notes)
            silent += [f"--ignore {words}"] * (not (told and same))
            continue
        changed = (found.problem, found.plan, found.notes) != (plain.problem, plain.plan, plain.notes)
        seen["priced" if changed else "quiet"] += 1
        silent += [words] * (changed == is_quiet(flag.name) and flag.name not in ALIKE)
    assert not silent, silent
    assert sum(seen.values()) > 770
    assert min(seen.values()) > 2, seen
