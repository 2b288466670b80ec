"""Steps and memory read from TensorBoard's event files. ``tests/data/event_files`` was written by PyTorch 2.13's
``SummaryWriter`` with the tags of the programs, for steps of ``SECONDS``."""

from __future__ import annotations

from pathlib import Path

import pytest

from milpplan import Layout, Plan, VirtualStage
from milpplan.calibration import event_steps
from milpplan.errors import InvalidInputError

FILES = Path(__file__).parents[1] / "data" / "event_files"
PROGRAMS = {
    "megatron": "Megatron-LM",
    "megatron_loss": "Megatron-LM",
    "torchtitan": "torchtitan",
    "trainer": "Transformers' Trainer",
    "deepspeed": "DeepSpeed",
}
PLAN = Plan(
    layout=Layout(tp=2, dp=8, global_batch_size=64, sequence_parallel=True),
    virtual_stages=(VirtualStage(layers=(0, 32)),),
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_gives_the_steps_after_the_warm_up(name: str) -> None:
    """9 and 4 s of warm-up, then 2 s in the median, whether a tag has the time or only the loss its clock."""
    path = FILES / f"{name}.tfevents"
    steps = event_steps(path, PLAN)
    assert steps.program == f"{PROGRAMS[name]}'s event file"
    assert steps.steps_s == pytest.approx((2.0, 2.02, 1.98, 2.0, 2.1))
    assert steps.num_warm_up == 2
    assert steps.scatter == pytest.approx(1.4826 * 0.01, rel=0.02)


def test_peaks_are_those_of_the_file() -> None:
    """Bytes of Megatron-LM, GiB of torchtitan."""
    assert event_steps(FILES / "megatron.tfevents", PLAN).peak_bytes == {
        "allocated": 46 * 2**30,
        "reserved": 50 * 2**30,
    }
    assert event_steps(FILES / "torchtitan.tfevents", PLAN).peak_bytes == {"reserved": round(40.25 * 2**30)}


def test_a_directory_is_a_run(tmp_path: Path) -> None:
    """The files of a directory follow each other by name."""
    for number in range(2):
        (tmp_path / f"events.out.tfevents.{number}").write_bytes((FILES / "torchtitan.tfevents").read_bytes())
    assert len(event_steps(tmp_path, PLAN).steps_s) == 12
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match="has no event file"):
        event_steps(tmp_path / "empty", PLAN)


def test_a_last_record_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    """A file cut at any byte of its last two records gives the steps before."""
    data = (FILES / "torchtitan.tfevents").read_bytes()
    for cut in range(1, 100, 7):
        (tmp_path / "cut.tfevents").write_bytes(data[:-cut])
        assert set(event_steps(tmp_path / "cut.tfevents", PLAN).steps_s) >= {2.0}


def test_a_damaged_record_is_refused_by_its_byte(tmp_path: Path) -> None:
    """A flipped bit anywhere fails a checksum, or changes a length whose checksum fails."""
    data = (FILES / "torchtitan.tfevents").read_bytes()
    for at in range(0, len(data) - 60, 37):
        (tmp_path / "bad.tfevents").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(InvalidInputError, match=r"the record at byte [\d,]+ is damaged"):
            event_steps(tmp_path / "bad.tfevents", PLAN)


def test_another_global_batch_is_refused() -> None:
    """Megatron-LM states the batch, so another script's file has no step."""
    other = PLAN.model_copy(update={"layout": PLAN.layout.model_copy(update={"global_batch_size": 128})})
    with pytest.raises(InvalidInputError, match="no step of a global batch of 128"):
        event_steps(FILES / "megatron.tfevents", other)
