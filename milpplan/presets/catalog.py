"""Models and hardware by name (shipped as TOML) or by path (the user's own TOML or JSON)."""

from __future__ import annotations

import difflib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.specs.hardware import HardwareSpec
from milpplan.specs.hf_fields import MAX_LAYERS
from milpplan.specs.huggingface import is_huggingface_config, model_from_config
from milpplan.specs.model import ModelSpec
from milpplan.specs.reading import parse_json, parse_toml, read_text, shown, validated

Kind = Literal["models", "hardware"]

_SUFFIXES = (".toml", ".json")
_CHECKOUT = Path(__file__).resolve().parents[2]


def _directory(kind: Kind) -> Traversable:
    """Where the presets are: inside the installed package, else at the root of the source checkout."""
    packaged = resources.files("milpplan.presets") / kind
    return packaged if packaged.is_dir() else _CHECKOUT / kind


def _files(kind: Kind) -> dict[str, Traversable]:
    directory = _directory(kind)
    if not directory.is_dir():
        return {}
    files = {entry.name.removesuffix(".toml"): entry for entry in directory.iterdir() if _is_preset(entry)}
    return dict(sorted(files.items()))


def _is_preset(entry: Traversable) -> bool:
    return entry.name.endswith(".toml") and entry.is_file()


def model_names() -> tuple[str, ...]:
    """Names of the shipped models, sorted."""
    return tuple(_files("models"))


def hardware_names() -> tuple[str, ...]:
    """Names of the shipped hardware descriptions, sorted."""
    return tuple(_files("hardware"))


def preset_text(name: str) -> str:
    """The TOML of a shipped model or hardware description, comments included."""
    files = {**_files("hardware"), **_files("models")}
    if name not in files:
        raise _unknown_name("preset", name, tuple(files))
    return files[name].read_text(encoding="utf-8")


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A shipped model by name, or the user's TOML, JSON or Hugging Face ``config.json`` by path."""
    data, source = _data("models", name_or_path)
    if is_huggingface_config(data):
        model = model_from_config(data, _config_name(Path(source)))
    else:
        model = validated(ModelSpec, data, source)
    if model.num_layers > MAX_LAYERS:
        raise InvalidInputError(
            f"{source}: the counts of its layers add up to {model.num_layers:,}.",
            f"Expected at most {MAX_LAYERS:,} layers.",
            "Correct the counts.",
        )
    return model


def load_hardware(name_or_path: str | Path) -> HardwareSpec:
    """A shipped hardware description by name, or the user's TOML or JSON by path."""
    data, source = _data("hardware", name_or_path)
    return validated(HardwareSpec, data, source)


def _data(kind: Kind, name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The parsed file and its name for messages; a shipped name wins over a file of the same name."""
    files = _files(kind)
    name = str(name_or_path)
    if name in files:
        source = f"{kind}/{name}.toml"
        return parse_toml(files[name].read_text(encoding="utf-8"), source), source
    path = Path(name)
    if not name or (path.suffix.lower() not in _SUFFIXES and not _exists(path)):
        raise _unknown_name("model" if kind == "models" else kind, name, tuple(files))
    text = read_text(path)
    is_json = path.suffix.lower() == ".json" or text.lstrip().startswith("{")
    return (parse_json if is_json else parse_toml)(text, name), name


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _config_name(path: Path) -> str:
    """The file's stem; for a bare ``config.json`` its directory, which on the Hub is the model."""
    return path.stem if path.stem != "config" else path.resolve().parent.name or path.stem


def _unknown_name(what: str, name: str, known: tuple[str, ...]) -> UnknownNameError:
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    meant = f"Did you mean {' or '.join(close)}?" if close else "Give one of these names."
    return UnknownNameError(
        f"There is no {what} named {shown(name)}.",
        f"Known: {', '.join(known) or 'none'}.",
        f"{meant} Or give the path of a .toml or .json file.",
    )
