"""NeMo AutoModel's own code reads what is exported: its parser of command lines and YAML, of the section
``distributed``, and its scheduler of steps. ``.ci/frameworks automodel`` runs it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from milpplan.launchers.automodel.launcher import AUTOMODEL, SCHEDULES
from tests.frameworks.jobs import Case, all_cases, all_full, best_cases, differing, layers_of, torchrun_words

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

VERSION = AUTOMODEL.versions[0]


def parsed(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The recipe's configuration from the words that the script gives, and its section ``distributed``."""
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    place = case.written(folder)
    read, _ = torchrun_words(case, place, "automodel.sh")
    assert read.training_script == "nemo_automodel.cli.app"
    monkeypatch.chdir(place)
    file, *overrides = read.training_script_args
    found = parse_args_and_load_config(argv=["--config", file, *overrides])
    return found, parse_distributed_section(found.distributed.to_dict())


def test_it_is_the_version_that_is_named() -> None:
    """What is installed is what the export names."""
    assert version("nemo-automodel") == VERSION


def test_its_parsers_take_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plans of the ten jobs and drawn ones: strategy, sizes, pipeline, recomputation and batch arrive."""
    from nemo_automodel.components.training.step_scheduler import StepScheduler

    assert len(best_cases("automodel", VERSION)) == 10
    cases = all_cases("automodel", VERSION)
    assert len(cases) > 40
    for case in cases:
        found, distributed = parsed(case, tmp_path, monkeypatch)
        layout = case.plan.layout
        replicas = layout.zero_stage == 0 and layout.dp > 1
        expected = {
            "dp_size": layout.dp,
            "tp_size": layout.tp,
            "cp_size": layout.cp,
            "pp_size": layout.pp,
            "ep_size": layout.ep,
            "dp_replicate_size": None if replicas else 1,
            "pp_enabled": layout.pp > 1,
            "activation_checkpointing": all_full(case),
        }
        assert differing(expected, distributed) == {}, case.title
        check_strategy(case, distributed["strategy_config"], replicas)
        check_pipeline(case, distributed["pipeline_config"])
        steps = found.step_scheduler.to_dict()
        scheduler = StepScheduler(dp_size=layout.dp, dataloader=None, preemption_signal=None, **steps)
        assert scheduler.grad_acc_steps == (1 if layout.pp > 1 else layout.num_micro_batches), case.title
        assert found.dataset.seq_len == case.problem.job.sequence_length


def check_strategy(case: Case, found: Any, replicas: bool) -> None:
    """The strategy shards as the plan's ZeRO stage does."""
    layout = case.plan.layout
    assert type(found).__name__ == ("DDPConfig" if replicas else "FSDP2Config"), case.title
    if not replicas:
        expected = {
            "sequence_parallel": layout.sequence_parallel,
            "reshard_after_forward": layout.zero_stage == 3,
            "defer_fsdp_grad_sync": layout.pp > 1,
        }
        assert differing(expected, found) == {}, case.title


def check_pipeline(case: Case, found: Any) -> None:
    """The pipeline has the plan's schedule, micro-batches and stages."""
    layout = case.plan.layout
    if layout.pp == 1:
        assert found is None
        return
    expected = {
        "pp_schedule": SCHEDULES[layout.schedule],
        "pp_microbatch_size": layout.micro_batch_size,
        "pp_batch_size": layout.micro_batch_size * layout.num_micro_batches,
    }
    assert differing(expected, found) == {}, case.title
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert get_schedule_class(found.pp_schedule)
    held = [sum(".layers." in name for name in part) for part in found.module_fqns_per_model_part]
    assert held == layers_of(case), case.title


def test_it_refuses_what_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are AutoModel's, and can fail: a name that no strategy has, a pipeline without its section, and
    a batch that the replicas do not divide."""
    from nemo_automodel.components.training.step_scheduler import StepScheduler
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    found, _ = parsed(best_cases("automodel", VERSION)[0], tmp_path, monkeypatch)
    section = found.distributed.to_dict()
    with pytest.raises((TypeError, ValueError), match="reshard_after_foward"):
        parse_distributed_section(section | {"reshard_after_foward": True})
    with pytest.raises(ValueError, match="pipeline"):
        parse_distributed_section({name: section[name] for name in section if name != "pipeline"} | {"pp_size": 2})
    with pytest.raises(ValueError, match="divisible"):
        StepScheduler(global_batch_size=7, local_batch_size=2, dp_size=2, dataloader=None)
