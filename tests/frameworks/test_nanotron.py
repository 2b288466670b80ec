"""nanotron's own code reads what is exported: its strict reading of YAML into its classes, with their checks.
``.ci/frameworks nanotron`` runs it, on the sources that the export names: the registry's release lacks half."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from milpplan.launchers.nanotron.launcher import NANOTRON
from tests.frameworks.jobs import Case, all_cases, all_full, best_cases, differing, torchrun_words

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = NANOTRON.versions[0]
KERNELS = ("", ".flash_attn_interface", ".bert_padding", ".layers", ".layers.rotary", ".ops", ".ops.triton")
KERNELS += (".ops.triton.layer_norm", ".ops.triton.rotary")


@pytest.fixture(scope="module", autouse=True)
def without_kernels() -> None:
    """flash-attn does not install without CUDA; nothing that reads a configuration calls it."""
    # First, because PyTorch looks at what there is while it is imported.
    import_module("torch")
    for part in KERNELS:
        name = f"flash_attn{part}"
        module: Any = ModuleType(name)
        module.__spec__, module.__path__, module.__version__ = ModuleSpec(name, None), [], "2.7.0"
        module.__getattr__ = lambda _: object
        sys.modules.setdefault(name, module)


def configured(path: Path) -> Any:
    """nanotron's configuration of a file."""
    from nanotron.config import get_config_from_file

    return get_config_from_file(str(path))


def word(value: Any) -> str:
    """A value of one of its enumerations, in the words of its YAML."""
    return str(getattr(value, "name", value)).lower()


def check(case: Case, found: Any) -> None:
    """Degrees, batch, recomputation, sharding and model are the plan's."""
    layout, model, job = case.plan.layout, case.problem.model, case.problem.job
    parallelism = {
        "dp": layout.dp,
        "pp": layout.pp,
        "tp": layout.tp,
        "context_parallel_size": layout.cp,
        "expert_parallel_size": 1,
        "recompute_layer": all_full(case),
        "tp_recompute_allgather": layout.gather_again,
        "tp_linear_async_communication": False,
    }
    assert differing(parallelism, found.parallelism) == {}, case.title
    assert word(found.parallelism.tp_mode) == ("reduce_scatter" if layout.sequence_parallel else "all_reduce")
    assert type(found.parallelism.pp_engine).__name__ == (
        "AllForwardAllBackwardPipelineEngine"
        if layout.schedule == "gpipe"
        else "OneForwardOneBackwardPipelineEngine"
    )
    tokens = {
        "sequence_length": job.sequence_length,
        "micro_batch_size": layout.micro_batch_size,
        "batch_accumulation_per_replica": layout.num_micro_batches,
    }
    assert differing(tokens, found.tokens) == {}, case.title
    assert found.global_batch_size == job.global_batch_size
    assert found.optimizer.zero_stage == layout.zero_stage
    sizes = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
    }
    assert differing(sizes, found.model.model_config) == {}, case.title


def test_its_reader_takes_every_file(tmp_path: Path) -> None:
    """The best plans of the jobs whose models it has and drawn ones."""
    assert len(best_cases("nanotron", VERSION)) == 5
    cases = all_cases("nanotron", VERSION, 8)
    assert len(cases) >= 20
    for case in cases:
        check(case, configured(case.written(tmp_path) / "nanotron.yaml"))


def test_torchrun_starts_its_program(tmp_path: Path) -> None:
    """The script gives torchrun the nodes, the processes, nanotron's program and the file beside it."""
    for case in best_cases("nanotron", VERSION):
        place = case.written(tmp_path)
        read, _ = torchrun_words(case, place, "nanotron.sh")
        assert Path(read.training_script).name == "run_train.py"
        assert read.training_script_args[0] == "--config-file"
        assert (place / read.training_script_args[1]).resolve() == (place / "nanotron.yaml").resolve()


def test_it_refuses_names_that_it_lacks(tmp_path: Path) -> None:
    """The reading is nanotron's, and strict: a name that it does not have is refused."""
    place = best_cases("nanotron", VERSION)[0].written(tmp_path)
    tree = yaml.safe_load((place / "nanotron.yaml").read_text())
    tree["parallelism"]["recompute_layers"] = tree["parallelism"].pop("recompute_layer")
    (place / "broken.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(Exception, match="recompute_layers"):
        configured(place / "broken.yaml")
