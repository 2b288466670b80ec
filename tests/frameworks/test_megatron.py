"""Megatron-LM's own code reads what is exported: its parser, its checks of the arguments, and the configuration of
its core that is made of them. ``.ci/frameworks megatron`` runs it, on the sources that the export names: the
registry has the core alone."""

from __future__ import annotations

import contextlib
import os
import sys
import typing
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from typing_extensions import override

from milpplan import Job, Problem, Space, load_hardware, load_model, solve_lengths, workload_of
from milpplan.errors import IllegalPlanError
from milpplan.launchers.megatron.rules import MEGATRON
from milpplan.lengths.dispatch import HybridSchedule
from milpplan.reports import lengths_document
from tests.frameworks.absent import hopper
from tests.frameworks.jobs import Case, all_cases, all_full, best_cases, differing, exported_case, torchrun_words
from tests.launchers.cases import NAMED, glm_that_shares

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", MEGATRON.versions[0])
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks ask what this machine has: an H100, and Transformer Engine 2.8, which does not install without
    CUDA; no check is left out. Its sources want ``typing.override`` of Python 3.12."""
    hopper(monkeypatch)
    monkeypatch.setattr(typing, "override", override, raising=False)
    core = import_module("megatron.core.utils")
    monkeypatch.setattr(core, "_te_version", Version("2.8.0"))
    rotary = import_module("megatron.core.models.common.embeddings.rope_utils")
    monkeypatch.setattr(rotary, "fused_apply_rotary_pos_emb", object())


def words_of(case: Case, folder: Path) -> tuple[list[str], dict[str, str]]:
    """What the script gives to ``pretrain_gpt.py``, and the variables of the processes."""
    read, variables = torchrun_words(case, case.written(folder), "megatron.sh")
    assert Path(read.training_script).name == "pretrain_gpt.py"
    return list(read.training_script_args), variables


def validated(
    words: list[str], variables: dict[str, str], gpus: int, patch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """The arguments after all checks, and the core's configuration."""
    from megatron.training import arguments

    with patch.context() as here:
        here.setenv("WORLD_SIZE", str(gpus))
        here.setenv("RANK", "0")
        here.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        if "CUDA_DEVICE_MAX_CONNECTIONS" in variables:
            here.setenv("CUDA_DEVICE_MAX_CONNECTIONS", variables["CUDA_DEVICE_MAX_CONNECTIONS"])
        found = arguments.validate_args(arguments.parse_args())
        return found, arguments.core_transformer_config_from_args(found)


def checked(case: Case, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The same of a case, with everything compared that a plan says."""
    layout, problem = case.plan.layout, case.problem
    args, core = validated(*words_of(case, folder), layout.num_gpus, patch)
    expected = {
        "data_parallel_size": layout.dp,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": problem.job.global_batch_size,
        "seq_length": problem.job.sequence_length,
        "use_distributed_optimizer": layout.zero_stage > 0,
        "use_megatron_fsdp": layout.zero_stage > 1,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
    }
    if layout.zero_stage > 1:
        expected["data_parallel_sharding_strategy"] = SHARDING[layout.zero_stage]
    assert differing(expected, args) == {}, case.title
    of_core = {
        "num_layers": problem.model.num_layers,
        "hidden_size": problem.model.hidden_size,
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "bf16": True,
    }
    assert differing(of_core, core) == {}, case.title
    check_recompute(case, core)
    return args, core


def check_recompute(case: Case, core: Any) -> None:
    """All layers fully where the plan says so; with ``block`` the first of every virtual stage; else not fully."""
    counts = [(stage.recompute.full, stage.num_layers) for stage in case.plan.virtual_stages]
    if all_full(case) and not case.problem.job.mtp_layers:
        assert (core.recompute_granularity, core.recompute_method) == ("full", "uniform"), case.title
    elif any(full for full, _ in counts):
        assert (core.recompute_granularity, core.recompute_method) == ("full", "block"), case.title
        assert all(full == min(core.recompute_num_layers, size) for full, size in counts), case.title
    else:
        assert core.recompute_granularity != "full", case.title


def test_it_takes_every_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans of the ten jobs and drawn ones."""
    assert len(best_cases("megatron", VERSION)) == 10
    cases = all_cases("megatron", VERSION)
    assert len(cases) == 60
    stages = Counter(case.plan.layout.zero_stage for case in cases)
    assert len(stages) > 2
    for case in cases:
        checked(case, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["llama3-70b-uneven", "deepseek-v3-experts"])
def test_it_builds_uneven_stages(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout string is read into the plan's stages: interleaved with small ends, and 61 layers over 16."""
    case = exported_case(name, "megatron", VERSION, *NAMED[name]())
    layout = case.plan.layout
    _, core = checked(case, tmp_path, monkeypatch)
    stages = core.pipeline_model_parallel_layout.layout
    held = [
        sum(layer.name == "decoder" for layer in stages[rank][chunk])
        for chunk in range(layout.vpp)
        for rank in range(layout.pp)
    ]
    assert held == [stage.num_layers for stage in case.plan.virtual_stages]


def test_its_layers_share_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GLM-5.2 it finds the same layers without an indexer, and the layer of further tokens has one. For
    versions without a fused kernel the export is refused."""
    if VERSION not in MEGATRON.versions[:2]:
        core = import_module("megatron.core.transformer.transformer_config").TransformerConfig
        assert "dsa_kernel_backend" not in core.__dataclass_fields__
        with pytest.raises(IllegalPlanError, match="--dsa-kernel-backend"):
            exported_case("glm-5.2", "megatron", VERSION, *glm_that_shares())
        return
    from megatron.core.transformer.experimental_attention_variant import dsa

    # It asks for the kernel's libraries, which need a GPU.
    config = import_module("megatron.core.transformer.transformer_config")
    monkeypatch.setattr(config, "_validate_dsa_kernel_backend_dependencies", lambda _: None)
    case = exported_case("glm-5.2", "megatron", VERSION, *glm_that_shares())
    _, core = checked(case, tmp_path, monkeypatch)
    period, offset = core.dsa_indexer_topk_freq, core.dsa_indexer_skip_topk_offset
    takes = {layer for layer in range(78) if dsa.is_dsa_skip_topk_layer(layer + 1, offset, period)}
    assert takes == case.problem.model.taking_layers
    assert core.mtp_num_layers == 1


def test_it_refuses_what_its_rules_forbid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are Megatron-LM's, and can fail: an argument that it lacks, degrees that do not divide the
    processes, a gather that overlaps without the distributed optimizer."""
    case = best_cases("megatron", VERSION)[0]
    words, variables = words_of(case, tmp_path)
    gpus = case.plan.layout.num_gpus
    with pytest.raises(SystemExit):
        validated([*words, "--tensor-parallel-sise", "2"], variables, gpus, monkeypatch)
    with pytest.raises(AssertionError, match="divisible"):
        validated([*words, "--tensor-model-parallel-size", "3"], variables, gpus, monkeypatch)
    plain = [word for word in words if word not in ("--use-distributed-optimizer", "--use-megatron-fsdp")]
    with pytest.raises(AssertionError):
        validated([*plain, "--overlap-param-gather"], variables, gpus, monkeypatch)


class _Ranks:
    """As many ranks of data and context parallelism."""

    def __init__(self, number: int) -> None:
        self.number = number

    def size(self) -> int:
        """Their number."""
        return self.number


def _times_s(schedule: HybridSchedule, groups: list[list[list[int]]], lengths: dict[int, int]) -> float:
    """Of groups that barriers separate, without reduction and finish: each waits for its slowest rank."""
    family, total = schedule.family, 0.0
    member_of = dict(zip(family.degrees, family.members, strict=True))
    quantum, width = family.pool.load.token_quantum, len(family.pool.load.lengths)

    def seconds(length: int, degree: int) -> float:
        row = np.eye(1, width, -(-length // quantum) - 1, dtype=np.int64)
        return float(family.timer(member_of[degree]).phases(row).sum()) / 1e9

    for ranks in groups:
        degrees = Counter(sample for rank in ranks for sample in rank)
        total += max(sum(seconds(lengths[sample], degrees[sample]) for sample in rank) for rank in ranks)
    return total


def test_its_loop_runs_a_planned_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that is written puts a scheduler into the place of its own; its checks take the arguments. Its
    loop for hybrid context parallelism, rank by rank, runs every sequence on the ranks and with the degree that
    were planned, in one group; its own scheduler's groups take longer."""
    import torch
    from megatron.core.datasets import data_schedule
    from megatron.core.pipeline_parallel import hybrid_cp_schedule, schedules

    problem = Problem(
        model=load_model("llama2-7b"),
        hardware=load_hardware("dgx-a100-80"),
        job=Job(num_gpus=16, global_batch_size=1, sequence_length=128),
        space=Space(recompute=("none",)),
    )
    tokens = [700, 1500, 9000] * 20 + [20_000]
    result = solve_lengths(problem, workload_of(np.array(tokens), 128), 128, 1, 0.05, 10.0, "highs")
    schedule = HybridSchedule(problem, result)
    for name, text in schedule.files(lengths_document(result)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    own = data_schedule.BalancedCPScheduler
    monkeypatch.setattr(data_schedule, "BalancedCPScheduler", own)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = import_module("hybrid_cp")
    words = (tmp_path / "arguments.txt").read_text(encoding="utf-8").split()
    longest = int(words[words.index("--max-seqlen-per-dp-cp-rank") + 1])

    samples = list(enumerate(tokens))
    planner = data_schedule.BalancedCPScheduler(max_seq_len_per_rank=longest, dp_cp_group=_Ranks(16))
    assert type(planner) is program.PlannedCPScheduler
    with pytest.raises(ValueError, match="16"):
        program.PlannedCPScheduler(longest, _Ranks(8)).get_groups_and_subsamples(samples, None)
    lengths, groups = planner.get_groups_and_subsamples(samples, None)
    assert [[[tokens[sample] for sample in rank] for rank in ranks] for ranks in groups] == lengths
    # One short sequence, which leaves ranks without any, is left to its own scheduler.
    own_groups = own(longest, _Ranks(16)).get_groups_and_subsamples([(0, 300)], None)
    assert planner.get_groups_and_subsamples([(0, 300)], None) == own_groups

    ran: list[list[tuple[int, int]]] = []
    for name in ("barrier", "broadcast"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    tensor = torch.tensor
    on_cpu = {"device": "cpu"}
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: tensor(*a, **(k | (on_cpu if "device" in k else {}))))
    state = hybrid_cp_schedule.parallel_state
    for name in ("tensor_model_parallel_src_rank", "tensor_model_parallel_group", "data_parallel_group"):
        monkeypatch.setattr(state, f"get_{name}", lambda *_, **__: None)
    monkeypatch.setattr(state, "get_tensor_model_parallel_rank", lambda: 0)

    def forward_step(_: Any, data: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
        sample = next(data)
        degree = int(sample["local_cp_size"])
        # Versions before 0.19 read it from the sample alone.
        assert more.get("cp_group_size", degree) == degree
        ran[-1].append((sample["number"], degree))
        return None, tensor(1)

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(schedules, "backward_step", lambda *_, **__: None)
    batch = {sample: {"number": sample} for sample, _ in samples}
    for rank in range(16):
        ran.append([])
        monkeypatch.setattr(state, "get_data_parallel_rank", lambda rank=rank, **_: rank)
        hybrid_cp_schedule.hybrid_context_parallel_forward_backward(
            *(None, iter([(batch, groups)]), None, 1, None, None, [], None, False, False, False),
            *(contextlib.nullcontext, 0, lambda *_: False, None),
        )
    degrees = Counter(sample for rank in ran for sample, _ in rank)
    assert set(degrees) == set(batch)
    assert all(degree == degrees[sample] for rank in ran for sample, degree in rank)
    assert [[sample for sample, _ in rank] for rank in ran] == groups[0]
    assert len(set(degrees.values())) > 1

    numbered = dict(samples)
    best_own_s = min(
        _times_s(schedule, own(size, _Ranks(16)).get_groups_and_subsamples(samples, None)[1], numbered)
        for size in (2048, 4096, longest)
    )
    assert _times_s(schedule, groups, numbered) < best_own_s

    model = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --position-embedding-type rope"
    data = "--seq-length 20480 --max-position-embeddings 20480 --mock-data --tokenizer-type NullTokenizer"
    others = "--vocab-size 32000 --global-batch-size 64 --bf16 --train-iters 2 --lr 1e-4 --min-lr 0"
    given = [*words, *f"{model} {data} {others} --no-gradient-accumulation-fusion".split()]
    args, _ = validated(given, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, 16, monkeypatch)
    assert args.hybrid_context_parallel
    assert args.data_parallel_size == schedule.num_ranks
    assert args.max_seqlen_per_dp_cp_rank == longest
