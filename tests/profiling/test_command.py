"""``milpplan profile`` on the command line, without PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from milpplan import load_hardware
from milpplan.cli.commands import profile as command
from milpplan.profiling import records
from milpplan.profiling.measurement_order import measure
from milpplan.profiling.records import Measurements, read_raw, write_raw
from tests.cli.test_cli import refused, run
from tests.profiling.cases import BASE, few_tasks, synthetic


@pytest.fixture(scope="module")
def measurements() -> Measurements:
    """A small part of a sweep."""
    return measure(synthetic(), few_tasks(num_layers=3), 1e9)


@pytest.fixture
def raw(measurements: Measurements, tmp_path: Path) -> Path:
    """Their file."""
    path = tmp_path / "raw.json"
    write_raw(path, measurements)
    return path


def test_the_file_keeps_everything(raw: Path, measurements: Measurements) -> None:
    """Written and read is the identity."""
    assert read_raw(raw) == measurements


@pytest.mark.long
def test_from_raw_to_a_plan(raw: Path, tmp_path: Path) -> None:
    """--from fits without measuring; the overlay serves as a hardware name, with an error bar."""
    out = tmp_path / "mine.toml"
    done = run("profile", "--hardware", BASE, "--from", str(raw), "--out", str(out))
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "memory_efficiency" in text
    assert "the errors of the model under this overlay" in text
    assert "synthetic H100, driver 1.2.3" in text
    small = ["--gpus", "8", "--global-batch", "16", "--space", "uniform"]
    solved = run("solve", "llama3-8b", str(out), *small)
    assert solved.exit_code == 0, solved.output
    assert "error bar" in solved.stdout
    again = run("profile", "--hardware", BASE, "--from", str(raw), "--out", str(out), "--name", "mine", "--json")
    document = json.loads(again.stdout)
    assert document["overlay"]["name"] == "mine"
    assert load_hardware(out).software.name == "mine"


def test_measuring_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlay and beside it the measurements; a limit that passes ends with 4."""
    monkeypatch.setattr(command, "open_machine", lambda wanted: (synthetic(num_ranks=2), "cuda"))
    monkeypatch.setattr(command, "sweep", lambda *words: few_tasks(num_layers=3))
    out = tmp_path / "mine.toml"
    done = run("profile", "--hardware", BASE, "--out", str(out), "--quick")
    assert done.exit_code == 0, done.output
    assert read_raw(tmp_path / "mine.raw.json").num_rows > 30
    assert load_hardware(out).uncertainty is not None

    def stopped(*words: object) -> Measurements:
        return read_raw(tmp_path / "mine.raw.json").model_copy(update={"stopped": "time limit"})

    monkeypatch.setattr(command, "measure", stopped)
    late = run("profile", "--hardware", BASE, "--out", str(out), "--raw", str(tmp_path / "other.json"))
    assert late.exit_code == 4, late.output
    assert "time limit" in late.stderr
    assert (tmp_path / "other.json").exists()


def test_an_interrupt_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measurements: Measurements
) -> None:
    """Exit code 5, no file."""
    nothing = Measurements(environment=measurements.environment, stopped="interrupted")
    monkeypatch.setattr(command, "open_machine", lambda wanted: (synthetic(), "cuda"))
    monkeypatch.setattr(command, "measure", lambda *words: nothing)
    done = run("profile", "--hardware", BASE, "--out", str(tmp_path / "mine.toml"))
    assert done.exit_code == 5
    assert list(tmp_path.iterdir()) == []


def test_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setattr(records, "find_spec", lambda name: None)
    message = refused(run("profile", "--hardware", BASE, "--out", str(tmp_path / "x.toml")))
    assert "pip install -e '.[profile]'" in message
    assert list(tmp_path.iterdir()) == []


class _NoGpu:
    """What is asked of PyTorch before anything is measured, on a machine without a GPU."""

    class cuda:  # noqa: N801 - PyTorch's name
        """No device."""

        is_available = staticmethod(lambda: False)

    class version:  # noqa: N801 - PyTorch's name
        """Built for CUDA or not."""

        cuda: str | None = None
        hip: str | None = None

    __version__ = "9.9"


@pytest.mark.parametrize(("built", "words"), [(None, "built for the CPU only"), ("99.1", "sees no GPU")])
def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: str | None, words: str) -> None:
    """Three parts, and the way out."""
    monkeypatch.setattr(records, "find_spec", lambda name: object())
    monkeypatch.setattr(records, "import_module", lambda name: _NoGpu)
    monkeypatch.setattr(_NoGpu.version, "cuda", built)
    message = refused(run("profile", "--hardware", BASE, "--out", str(tmp_path / "x.toml")))
    assert words in message
    assert "--device cpu" in message


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 2}', "nan", '{"kind": "milpplan profile"}', "\x00", "[" * 10_000]
)
def test_hostile_files_are_refused(tmp_path: Path, text: str) -> None:
    """Three parts, exit code 2, no overlay."""
    path, out = tmp_path / "raw.json", tmp_path / "out.toml"
    path.write_text(text)
    refused(run("profile", "--hardware", BASE, "--from", str(path), "--out", str(out)))
    assert not out.exists()


@pytest.mark.parametrize("value", [-1.0, 0.0, "1", None, 1e300, True])
def test_hostile_times_are_refused(raw: Path, tmp_path: Path, value: object) -> None:
    """A time is a positive number."""
    data = json.loads(raw.read_text())
    data["traffic"][0]["time"]["median_s"] = value
    raw.write_text(json.dumps(data))
    refused(run("profile", "--hardware", BASE, "--from", str(raw), "--out", str(tmp_path / "out.toml")))


def test_other_mistakes(raw: Path, tmp_path: Path) -> None:
    """Unknown hardware or device, a directory that does not exist, options that exclude each other."""
    out = str(tmp_path / "out.toml")
    words = ["profile", "--hardware", BASE, "--out", out]
    refused(run("profile", "--hardware", "dgx-h999", "--out", out))
    refused(run("profile", "--hardware", BASE, "--out", str(tmp_path / "no" / "x.toml")))
    refused(run(*words, "--raw", out))
    refused(run(*words, "--raw", str(tmp_path / "no" / "x.json")))
    refused(run(*words, "--device", "tpu"))
    refused(run(*words, "--time-limit", "0"))
    refused(run(*words, "--time-limit", "nan"))
    refused(run(*words, "--from", str(raw), "--device", "cpu"))
    refused(run(*words, "--from", str(raw), "--quick"))
    refused(run(*words, "--from", str(tmp_path / "none.json")))
    refused(run("profile", "--hardware", BASE, "--out", str(raw), "--from", str(raw)))
    refused(run(*words, "--from", str(raw), "--name", BASE))
    assert not Path(out).exists()


@pytest.mark.long
def test_pytorch_is_not_imported_early() -> None:
    """The command line and the modules behind it load without PyTorch."""
    code = "import sys, milpplan.cli.commands.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
