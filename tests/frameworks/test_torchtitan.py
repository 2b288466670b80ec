"""torchtitan's own code reads what is exported: its ``ConfigManager``, its check of the degrees, the models' own
update from the configuration and the count of pipeline stages. ``.ci/frameworks torchtitan-0.3.0`` runs it, and
the same with the other versions; ``FRAMEWORK_VERSION`` says which dialect is installed."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from milpplan import load_hardware, load_model, solve_lengths
from milpplan.launchers.torchtitan.run import NEWEST, V022, V030, prices_products, titan_program
from milpplan.lengths.dispatch import Dispatcher, PackedSampler
from milpplan.problem import Job, Layout, Problem
from milpplan.simulation import LayoutColumns
from milpplan.simulation.layers import layer_activations
from tests.frameworks.jobs import Case, all_cases, all_full, best_cases, differing, layers_of, torchrun_words
from tests.lengths.cases import GRAIN, workload
from tests.small import small_problem

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = os.environ.get("FRAMEWORK_VERSION", V030)
SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe"}


def configured(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchtitan's configuration from the words that the script gives."""
    from torchtitan.config.manager import ConfigManager

    place = case.written(folder)
    read, variables = torchrun_words(case, place, "torchtitan.sh")
    assert read.training_script == "torchtitan.train"
    with monkeypatch.context() as patch:
        # What the script adds to PYTHONPATH is where the processes find the configuration.
        for directory in reversed(variables.get("PYTHONPATH", "").split(":")):
            patch.syspath_prepend(directory or ".")
        patch.delitem(sys.modules, "torchtitan_plan", raising=False)
        found = ConfigManager().parse_args(read.training_script_args)
        sys.modules.pop("torchtitan_plan", None)
    return found


def dimensions(found: Any, processes: int) -> Any:
    """torchtitan's check of the degrees, for so many processes."""
    from torchtitan.distributed.parallel_dims import ParallelDims

    if hasattr(ParallelDims, "from_config"):
        return ParallelDims.from_config(found.parallelism, processes)
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
    long = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
    long += ("pipeline_parallel", "expert_parallel", "expert_tensor_parallel")
    degrees = {
        name: getattr(found.parallelism, f"{whole}_degree") for name, whole in zip(names, long, strict=True)
    }
    return ParallelDims(**degrees, world_size=processes)


def model_layers(found: Any) -> int:
    """Layers of the model, after it has taken what the configuration says of it."""
    if VERSION == V022:
        from torchtitan.protocols.train_spec import get_train_spec

        model = get_train_spec(found.model.name).model_args[found.model.flavor]
        model.update_from_config(found)
        return int(model.n_layers)
    model = found.model_spec.model
    model.update_from_config(config=found)
    return len(model.layers)


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names. Of the main branch there are only sources, with its own dialect:
    batches in tokens."""
    assert VERSION in (V022, V030, NEWEST)
    if VERSION != NEWEST:
        assert version("torchtitan") == VERSION
    else:
        from torchtitan.config import TrainingConfig

        assert hasattr(TrainingConfig, "num_tokens_per_train_step")


def test_its_manager_takes_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans of the jobs whose models it has and drawn ones: degrees, batch, precision, recomputation, and
    layers arrive."""
    best = best_cases("torchtitan", VERSION)
    assert len(best) >= 3
    cases = all_cases("torchtitan", VERSION, 10)
    assert len(cases) >= 20
    for case in cases:
        found = configured(case, tmp_path, monkeypatch)
        layout = case.plan.layout
        sharded = layout.zero_stage > 0
        expected = {
            "dp_replicate": 1 if sharded else layout.dp,
            "dp_shard": layout.dp if sharded else 1,
            "cp": layout.cp,
            "tp": layout.tp,
            "pp": layout.pp,
            "ep": layout.ep,
        }
        assert differing(expected, dimensions(found, layout.num_gpus)) == {}, case.title
        assert model_layers(found) == case.problem.model.num_layers, case.title
        assert found.training.mixed_precision_param == "bfloat16"
        check_batch(case, found)
        check_recompute(case, found)
        check_pipeline(case, found)


def check_batch(case: Case, found: Any) -> None:
    """Micro-batches and steps have the plan's sizes, in the words of the dialect."""
    layout, job, training = case.plan.layout, case.problem.job, found.training
    if VERSION == NEWEST:
        expected = {
            "num_tokens_per_microbatch_per_dp_rank": layout.micro_batch_size * job.sequence_length,
            "num_tokens_per_train_step": job.global_batch_size * job.sequence_length,
            "max_context_length": job.sequence_length,
        }
    else:
        local = layout.micro_batch_size * (layout.num_micro_batches if layout.pp > 1 else 1)
        expected = {"local_batch_size": local, "global_batch_size": job.global_batch_size}
        expected["seq_len"] = job.sequence_length
    assert differing(expected, training) == {}, case.title


def check_recompute(case: Case, found: Any) -> None:
    """All layers are recomputed as the plan says, by torchtitan's own list of products where selectively."""
    mode = "full" if all_full(case) else "selective" if case.plan.selects else "none"
    checkpoints = found.activation_checkpoint
    if VERSION == V022:
        assert checkpoints.mode == mode, case.title
        assert mode != "selective" or checkpoints.selective_ac_option == "op", case.title
    else:
        policy = "none" if checkpoints is None else type(checkpoints).__qualname__.split(".")[0]
        assert policy == {"full": "FullAC", "selective": "SelectiveAC"}.get(mode, mode), case.title


def check_pipeline(case: Case, found: Any) -> None:
    """Schedule and stages are the plan's, and PyTorch has the schedule."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    layout, parallelism = case.plan.layout, found.parallelism
    expected = {0: "default", 1: "never", 2: "never", 3: "never" if layout.keep_weights else "always"}
    if layout.zero_stage:
        assert parallelism.fsdp_reshard_after_forward == expected[layout.zero_stage], case.title
    if layout.pp == 1:
        return
    assert parallelism.pipeline_parallel_schedule == SCHEDULES[layout.schedule]
    assert get_schedule_class(parallelism.pipeline_parallel_schedule)
    held = [sum(name.startswith("layers.") for name in part) for part in parallelism.module_fqns_per_model_part]
    assert held == layers_of(case), case.title
    if VERSION != V022:
        from torchtitan.distributed import pipeline_parallel

        dims, model = dimensions(found, layout.num_gpus), found.model_spec.model
        stages, layers, *_ = pipeline_parallel._get_pipeline_metadata(dims, parallelism, model)
        assert stages % layout.pp == 0
        assert layers == case.problem.model.num_layers


def selective_layer(name: str, flavor: str) -> Any:
    """A layer of torchtitan's model under its ``SelectiveAC``, which calls its attention ``inner_attention``."""
    import torch

    if VERSION != V022:
        import importlib

        from torchtitan.distributed.activation_checkpoint import SelectiveAC

        family = importlib.import_module(f"torchtitan.models.{name}")
        layer = family.model_registry(flavor, attn_backend="flex").model.layers[0].build().to(torch.bfloat16)
        layer.attention.inner_attention = product_of_heads()
        return SelectiveAC.Config().build()._wrap_block(layer, base_fqn="layers.0")
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed.activation_checkpoint import _apply_op_sac
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list
    from torchtitan.models.llama3.model.model import TransformerBlock

    layer = TransformerBlock(0, llama3_args[flavor]).to(torch.bfloat16)
    layer.attention.inner_attention = product_of_heads()
    return _apply_op_sac(layer, ActivationCheckpoint(), op_sac_save_list=_op_sac_save_list)


def product_of_heads() -> Any:
    """Attention without a kernel, of which nothing is kept: that of a CPU is none of torchtitan's list."""
    import torch

    class Product(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, **_: Any) -> Any:
            heads = 1 if VERSION == V022 else -2
            times = q.shape[heads] // k.shape[heads]
            return q * k.repeat_interleave(times, heads) * v.repeat_interleave(times, heads)

    return Product()


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_selective_recomputation_keeps_what_is_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that torchtitan's own checkpoints keep of a layer, in one process and not compiled, beside its input
    and what the attention kernel gives. What 0.2.2 keeps of experts is not counted."""
    import torch
    from torch.utils import _pytree, checkpoint

    spec = load_model(model)
    if not prices_products(spec, VERSION):
        assert (VERSION, model) == (V022, "qwen3-30b-a3b")
        return
    modes: list[Any] = []
    mode = checkpoint._CachingTorchDispatchMode
    start = mode.__init__

    def started(self: Any, *given: Any, **named: Any) -> None:
        modes.append(self)
        start(self, *given, **named)

    monkeypatch.setattr(mode, "__init__", started)
    tokens = 64
    layer = selective_layer(*{"llama3-8b": ("llama3", "8B"), "qwen3-30b-a3b": ("qwen3", "30B-A3B")}[model])
    batch = (tokens,) if VERSION == NEWEST else (1, tokens)
    x = torch.randn(*batch, spec.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    if VERSION == V022:
        from torchtitan.models.llama3.model.model import precompute_freqs_cis

        layer(x, precompute_freqs_cis(spec.layers[0].attention.head_dim, tokens), None)
    else:
        layer(x, None, torch.arange(tokens).reshape(batch))
    leaves = [leaf for mode in modes for calls in mode.storage.values() for leaf in _pytree.tree_leaves(calls)]
    kept = [tensor for leaf in leaves if torch.is_tensor(tensor := getattr(leaf, "val", leaf))]
    software = load_hardware("dgx-h100").software.model_copy(
        update=titan_program(VERSION) | {"keeps_unread_results": True}
    )
    problem = Problem(
        model=spec,
        hardware=load_hardware("dgx-h100").model_copy(update={"software": software}),
        job=Job(num_gpus=1, global_batch_size=1, sequence_length=tokens),
    )
    found = layer_activations(problem, spec.kinds[0], LayoutColumns.of([Layout(global_batch_size=1)]))
    attention, mlp = spec.kinds[0].attention, spec.kinds[0].mlp
    apart = 2 * spec.hidden_size + (2 * attention.head_dim + 4) * attention.num_attention_heads
    # On a processor the probabilities of chosen experts have 16 bits instead of 32.
    apart += 2 * getattr(mlp, "num_experts_per_tok", 0)
    counted = float((found.kept - found.dropped_selective)[0]) - tokens * apart
    assert sum(tensor.nbytes for tensor in kept) == pytest.approx(counted, rel=1e-9)


def test_it_refuses_degrees_that_do_not_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are torchtitan's, and can fail: degrees for half of the processes."""
    case = best_cases("torchtitan", VERSION)[0]
    found = configured(case, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="Invalid parallel dims"):
        dimensions(found, 2 * case.plan.layout.num_gpus)


def test_a_data_loader_takes_packed_micro_batches() -> None:
    """PyTorch's loader, in its own processes too, joins the sequences of every micro-batch of the sampler."""
    import torch
    from torch.utils.data import DataLoader

    step = solve_lengths(small_problem(memory_gib=40), workload(), GRAIN, 1, 0.1, 1.0, "highs", side_by_side=False)
    data = [torch.arange(length) for length in range(300, 3_000, 30)]
    sampler = PackedSampler(Dispatcher(step), [len(one) for one in data], 30, replica=0)
    joined = [sum(len(data[index]) for index in rows) for parts in sampler.steps() for rows in parts]
    assert len(joined) >= 3
    for workers in (0, 2):
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=torch.cat, num_workers=workers)
        assert [len(tokens) for tokens in loader] == joined
