"""Presets and users' files are found and read, and whatever is wrong with them is explained."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milpplan.errors import InvalidInputError, MilpplanError, UnknownNameError
from milpplan.problem import (
    HardwareSpec,
    ModelSpec,
    catalog,
    hardware_names,
    load_hardware,
    load_model,
    model_names,
    nearest,
    preset_text,
    validated,
)
from tests.amounts import few_or_many
from tests.refusals import in_three_parts

HF_CONFIG = Path(__file__).parents[1] / "data" / "hf_configs" / "llama3-8b.json"
BUS = {
    "num_gpus": [2, 8],
    "message_bytes": [1e6, 1e9],
    "bus_bandwidth_bytes_per_s": [[1e11, 2e11], [1e11, 3e11]],
}
PRECISION = {"peak_flops_per_s": 1e15, "gemm": {"m": [1], "n": [1], "k": [1], "efficiency": [[[0.7]]]}}
HARDWARE: dict[str, Any] = {
    "name": "mine",
    "gpus_per_node": 8,
    "accelerator": {
        "name": "A",
        "memory_bytes": 80e9,
        "memory_bandwidth_bytes_per_s": 3e12,
        "memory_bandwidth_efficiency": 0.9,
        "kernel_latency_s": 3e-6,
        "bf16": PRECISION,
        "attention_forward": {"size": [1024], "value": [0.5]},
        "attention_backward": {"size": [1024], "value": [0.4]},
    },
    "scale_up": {
        "name": "link",
        "num_gpus": 8,
        "bandwidth_bytes_per_s": 4.5e11,
        "p2p_efficiency": 0.8,
        "p2p_latency_s": 1e-5,
        "all_reduce": BUS,
        "all_gather": BUS,
        "reduce_scatter": BUS,
        "all_to_all": BUS,
    },
    "scale_out": {
        "name": "net",
        "bandwidth_bytes_per_s": 5e10,
        "efficiency": 0.9,
        "p2p_latency_s": 1e-5,
        "collective_base_latency_s": 1e-5,
        "hop_latency_s": 1e-6,
    },
    "reserved_bytes": 2_000_000_000,
}


def refused(path: str | Path) -> InvalidInputError:
    """The error of reading a bad model; all three parts must be there."""
    with pytest.raises(InvalidInputError) as caught:
        load_model(path)
    in_three_parts(caught.value)
    return caught.value


@pytest.mark.parametrize("name", model_names())
def test_model_preset_is_valid_and_named_after_its_file(name: str) -> None:
    """Every shipped model loads under its own name, and its text is the TOML it is read from."""
    model = load_model(name)
    assert model.name == name
    assert tomllib.loads(preset_text(name))["name"] == name
    assert preset_text(name).startswith("#")


@pytest.mark.parametrize("name", hardware_names())
def test_hardware_preset_is_valid_and_named_after_its_file(name: str) -> None:
    """Every shipped hardware description loads under its own name."""
    assert load_hardware(name).name == name
    assert preset_text(name)


def test_the_models_people_ask_for_are_shipped() -> None:
    """The twenty models of the documentation are there, sorted."""
    assert len(model_names()) >= 20
    assert list(model_names()) == sorted(model_names())
    assert {"gpt3-175b", "llama3-70b", "deepseek-v3", "mixtral-8x7b"} <= set(model_names())


def test_gpt_oss_alternates_windows() -> None:
    """gpt-oss is 36 runs of one layer, sliding and full attention in turn."""
    model = load_model("gpt-oss-120b")
    assert [run.count for run in model.layers] == [1] * 36
    assert len(model.kinds) == 2
    assert model.layer_kinds == (0, 1) * 18


def test_packaged_presets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an installed wheel the presets inside the package are used, not a checkout beside it."""
    (tmp_path / "presets" / "models").mkdir(parents=True)
    text = preset_text("llama3-8b").replace('"llama3-8b"', '"only-one"')
    (tmp_path / "presets" / "models" / "only-one.toml").write_text(text)
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert model_names() == ("only-one",)
    assert load_model("only-one").num_layers == 32


def test_nothing_shipped_is_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any presets the lists are empty and a name is unknown."""
    monkeypatch.setattr(catalog, "_CHECKOUT", tmp_path)
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    assert model_names() == hardware_names() == ()
    with pytest.raises(UnknownNameError, match="none"):
        load_model("llama3-8b")


@pytest.mark.parametrize("load", [load_model, preset_text])
def test_unknown_name_suggests(load: Any) -> None:
    """A misspelt name is answered with the nearest one and the whole list."""
    with pytest.raises(UnknownNameError) as caught:
        load("Llama3-8")
    assert "Llama3-8" in caught.value.seen
    assert "gpt3-175b" in caught.value.expected
    assert "llama3-8b" in caught.value.do


@pytest.mark.parametrize("name", ["", " ", "x" * 5000, "a\0b", "../models/llama3-8b", "zzz\ud800"])
def test_odd_names_are_unknown_names(name: str) -> None:
    """Names no file could have, or has, are unknown names and not failures of the file system."""
    with pytest.raises(UnknownNameError):
        load_model(name)
    with pytest.raises(UnknownNameError):
        load_hardware(name)


def test_users_files_of_each_kind(tmp_path: Path) -> None:
    """The same model comes from TOML, from JSON, and from a file without a suffix."""
    model = load_model("llama3-8b")
    files = {
        "a.toml": preset_text("llama3-8b"),
        "b.json": model.model_dump_json(),
        "c": model.model_dump_json(),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load_model(tmp_path / name) == model
        assert load_model(str(tmp_path / name)) == model
    (tmp_path / "d.toml").write_bytes(b"\xef\xbb\xbf" + preset_text("llama3-8b").encode())
    assert load_model(tmp_path / "d.toml") == model


def test_huggingface_config_is_recognised(tmp_path: Path) -> None:
    """A JSON with model_type goes to the importer; config.json is named after its directory."""
    directory = tmp_path / "My-Llama"
    directory.mkdir()
    (directory / "config.json").write_text(HF_CONFIG.read_text())
    assert load_model(directory / "config.json").name == "My-Llama"
    assert load_model(HF_CONFIG).name == "llama3-8b"
    assert "config.json" in refused(directory).do


def test_users_hardware(tmp_path: Path) -> None:
    """A hardware file may write whole numbers as 80e9, and every wrong field is named."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(HARDWARE))
    assert load_hardware(path).accelerator.memory_bytes == 80_000_000_000
    path.write_text(json.dumps({**HARDWARE, "gpus_per_node": "8", "nodes": 2}))
    with pytest.raises(InvalidInputError) as caught:
        load_hardware(path)
    assert "gpus_per_node" in caught.value.seen
    assert "'8'" in caught.value.seen
    assert "nodes" in caught.value.seen
    assert "scale_out" in caught.value.expected


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("hidden_size = 4096", "", "hidden_size is missing"),
        ("hidden_size = 4096", 'hidden_size = "4096"', "'4096'"),
        ("hidden_size = 4096", "hidden_size = true", "hidden_size"),
        ("hidden_size = 4096", "hidden_size = -1", "-1"),
        ("hidden_size = 4096", "hidden_size = nan", "hidden_size"),
        ("hidden_size = 4096", "hidden_size = inf", "hidden_size"),
        ("hidden_size = 4096", "hidden_size = 1e300", "hidden_size"),
        ("hidden_size = 4096", f"hidden_size = {10**40}", "hidden_size"),
        ("hidden_size = 4096", f"hidden_size = 1{'0' * 5000}", "not valid TOML"),
        ("hidden_size = 4096", "hidden_size = 2020-01-01", "no text, number"),
        ("hidden_size = 4096", "hidden_sise = 4096", "hidden_sise"),
        ("count = 32", "count = 1_000_000_000", "count"),
        ("num_key_value_heads = 8", "num_key_value_heads = 5", "num_key_value_heads=5"),
        ('type = "gqa"', 'type = "linear"', "layers[0].attention"),
        ("schema_version = 1", "schema_version = 2", "schema_version"),
        ("count = 32", "count = ", "line"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, old: str, new: str, word: str) -> None:
    """Missing, mistyped, misspelt, negative, infinite and huge values are named with what was seen."""
    path = tmp_path / "m.toml"
    text = preset_text("llama3-8b")
    assert old in text
    path.write_text(text.replace(old, new, 1))
    error = refused(path)
    assert word in error.seen
    assert "m.toml" in error.seen


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.toml", b""),
        ("empty.json", b""),
        ("list.json", b"[1, 2]"),
        ("nan.json", b"NaN"),
        ("deep.json", b"[" * 100_000),
        ("deep.toml", b"a = " + b"[" * 100_000),
        ("binary.toml", bytes(range(256))),
        ("binary", bytes(range(256))),
        ("zeros.json", bytes(100)),
    ],
)
def test_rubbish_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    """Empty, binary and endlessly nested files are refused, naming the file."""
    (tmp_path / name).write_bytes(content)
    assert name in refused(tmp_path / name).seen


def test_directories_missing_and_huge_files(tmp_path: Path) -> None:
    """A directory, a missing file and a file of weights are refused as such."""
    assert "directory" in refused(tmp_path).seen
    assert "does not exist" in refused(tmp_path / "none.toml").seen
    huge = tmp_path / "weights.json"
    with huge.open("wb") as file:
        file.truncate(10**9)
    assert "1,000,000,000 bytes" in refused(huge).seen


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_does_not_block(tmp_path: Path) -> None:
    """A pipe nobody writes to is refused instead of waiting for ever."""
    os.mkfifo(tmp_path / "pipe.toml")
    assert "not a regular file" in refused(tmp_path / "pipe.toml").seen


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file the user may not read is refused with the system's reason."""
    path = tmp_path / "secret.toml"
    path.write_text("")

    def denied(name: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("milpplan.problem.reading._at_once", denied)
    assert "Permission denied" in refused(path).seen


def test_model_survives_json() -> None:
    """Every shipped model equals itself after a round trip through JSON, strictly read."""
    for name in model_names():
        model = load_model(name)
        assert ModelSpec.model_validate_json(model.model_dump_json(), strict=True) == model


@few_or_many(
    25, 100, st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes_never_crash(content: bytes) -> None:
    """Any content of any suffix gives a record or a MilpplanError, never another exception."""
    with tempfile.TemporaryDirectory() as directory:
        for suffix in (".toml", ".json", ""):
            path = Path(directory) / f"fuzz{suffix}"
            path.write_bytes(content)
            for load in (load_model, load_hardware):
                with pytest.raises(MilpplanError):
                    load(path)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Llama-3.1-405B-FP8", "llama3-405b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("google/gemma-7b", "gemma-7b"),
        ("gpt-3", "gpt3-175b"),
        ("meta-llama/Llama-3.2-1B", "llama3-8b"),
        ("lama3_8b", "llama3-8b"),
    ],
)
def test_a_name_of_the_hub_is_answered_with_its_family_and_size(asked: str, meant: str) -> None:
    """The organisation, minor versions and punctuation do not lead to a model of another size."""
    assert nearest(asked, model_names()) == [meant]
    with pytest.raises(UnknownNameError, match=f"Did you mean {meant}"):
        load_model(asked)


@given(st.data())
def test_a_shipped_name_in_other_spelling_is_found(data: st.DataObject) -> None:
    """Another case, other punctuation and an organisation before it leave every shipped name the nearest one."""
    names = (*model_names(), *hardware_names())
    name = data.draw(st.sampled_from(names))
    mark = data.draw(st.sampled_from(["-", "_", " ", "."]))
    asked = name.replace("-", mark)
    asked = data.draw(st.sampled_from([asked, asked.upper(), asked.title(), f"some-org/{asked}"]))
    assert nearest(asked, names) == [name]


@given(st.data())
def test_a_misspelt_field_is_answered_with_the_one_meant(data: st.DataObject) -> None:
    """A letter dropped from any field of a model or hardware file, at any depth, names the field; no word of the
    checking library is shown."""
    name = data.draw(st.sampled_from(["llama3-8b", "deepseek-v3", "dgx-h100", "gb200-nvl72"]))
    kind = ModelSpec if name in model_names() else HardwareSpec
    table = tomllib.loads(preset_text(name))
    place = table
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        inner = place[key][0] if isinstance(place[key], list) else place[key]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            break
        place = inner
    at = data.draw(st.integers(0, len(key) - 1))
    misspelt = key[:at] + key[at + 1 :]
    if len(misspelt) < 3 or misspelt in place or key == "type":
        return
    place[misspelt] = place.pop(key)
    with pytest.raises(InvalidInputError) as caught:
        validated(kind, table, "mine.toml")
    assert f"{misspelt} is not known" in caught.value.seen
    assert f"Did you mean {key} instead of '{misspelt}'?" in caught.value.do
    for word in ("Extra inputs", "Field required", "Input should"):
        assert word not in str(caught.value)


def test_a_field_at_the_wrong_place_is_sent_to_the_right_one() -> None:
    """memory_bytes belongs to the accelerator."""
    table = tomllib.loads(preset_text("dgx-h100"))
    table["memory_bytes"] = 8
    with pytest.raises(InvalidInputError, match=r"Did you mean \w*\.?\w*memory_bytes"):
        validated(HardwareSpec, table, "mine.toml")
