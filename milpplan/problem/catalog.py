"""Loading of models and hardware by name (shipped as TOML) or by path (the user's own TOML or JSON)."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.plugins import PluginError, plugin, plugin_names
from milpplan.problem.huggingface.typed_keys import MAX_LAYERS
from milpplan.problem.model import ModelSpec
from milpplan.problem.reading import nearest, parse_json, parse_toml, read_text, shown, validated

if TYPE_CHECKING:
    from milpplan.problem.hardware import HardwareSpec
    from milpplan.problem.overlay import Overlay, Provenance
    from milpplan.problem.scenarios import Scenario

Kind = Literal["models", "hardware"]

STACKS = "stacks"
STACK_MARK = "+"
MAX_OVERLAYS = 8
"""Maximum depth of overlays on overlays."""
_SUFFIXES = (".toml", ".json")
_CHECKOUT = Path(__file__).resolve().parents[2]


def _files(kind: Kind) -> dict[str, Traversable]:
    """List the shipped files by name; for hardware also overlays of software stacks and files of plug-ins."""
    packaged = resources.files("milpplan") / "presets" / kind
    # Else the root of the source checkout.
    directories = [packaged if packaged.is_dir() else _CHECKOUT / kind]
    if kind == "hardware":
        directories.append(directories[0] / STACKS)
        directories = [*_plugin_directories(), *directories]  # of equal names the later, shipped file counts
    files: dict[str, Traversable] = {}
    for directory in directories:
        for entry in directory.iterdir() if directory.is_dir() else ():
            if entry.name.endswith(".toml") and entry.is_file():
                files[entry.name.removesuffix(".toml")] = entry
    return dict(sorted(files.items()))


def _plugin_directories() -> list[Traversable]:
    """List the directories in which installed packages keep their hardware descriptions.

    A plug-in that fails is left out with a warning, so that all other descriptions stay available.
    """
    directories = []
    for name in plugin_names("hardware"):
        try:
            directories.append(resources.files(plugin("hardware", name)))
        except (PluginError, TypeError) as error:
            logging.getLogger(__name__).warning("%s Its hardware is left out.", error)
    return directories


def model_names() -> tuple[str, ...]:
    """List the names of the shipped models, sorted."""
    return tuple(_files("models"))


def hardware_names() -> tuple[str, ...]:
    """List the names of the shipped hardware descriptions, sorted."""
    return tuple(name for name in _files("hardware") if STACK_MARK not in name)


def stack_names() -> tuple[str, ...]:
    """List the names of the shipped software stacks, hardware+framework, sorted; each is a hardware name."""
    return tuple(name for name in _files("hardware") if STACK_MARK in name)


def preset_text(name: str) -> str:
    """Read the TOML of a shipped model or hardware description, comments included."""
    files = {**_files("hardware"), **_files("models")}
    if name not in files:
        raise _unknown_name("preset", name, tuple(files))
    return files[name].read_text(encoding="utf-8")


def load_model(name_or_path: str | Path, ignore: Collection[str] = ()) -> ModelSpec:
    """Load a shipped model by name, or the user's TOML, JSON or Hugging Face ``config.json`` by path.

    ``ignore``: keys of a config.json to leave out, whatever they cost; the model lists the keys that were there.

    Raises:
        UnknownNameError: no model has the name, and no file is there.
        InvalidInputError: the file cannot be read, or describes no model.
    """
    data, source = _data("models", name_or_path)
    if "model_type" in data or "architectures" in data or isinstance(data.get("text_config"), dict):
        # Shipped models are no configs.
        from milpplan.problem.huggingface.config import model_from_config

        model = model_from_config(data, _config_name(Path(source)), ignore)
    else:
        if ignore:
            raise InvalidInputError(
                f"--ignore names {', '.join(map(shown, ignore))}, and {source} is no Hugging Face config.",
                "Expected it with a config.json alone, some of whose keys are not priced.",
                "Leave --ignore out.",
            )
        model = validated(ModelSpec, data, source)
    if model.num_layers > MAX_LAYERS:
        raise InvalidInputError(
            f"{source}: the counts of its layers add up to {model.num_layers:,}.",
            f"Expected at most {MAX_LAYERS:,} layers.",
            "Correct the counts.",
        )
    return model


def load_hardware(name_or_path: str | Path, max_overlays: int = MAX_OVERLAYS) -> HardwareSpec:
    """Load a shipped hardware description by name, or the user's TOML or JSON by path.

    A file with a ``base`` is an overlay: it is applied to its base, a shipped name or a path relative to it, which
    may have at most ``max_overlays`` overlays itself.

    Raises:
        UnknownNameError: no description has the name, and no file is there.
        InvalidInputError: the file, or its base, cannot be read or describes no hardware.
    """
    # Records of hardware take long to import, and models do without.
    from milpplan.problem.hardware import HardwareSpec
    from milpplan.problem.overlay import Overlay, applied, on_other_clusters

    data, source = _data("hardware", name_or_path)
    if "base" not in data:
        return validated(HardwareSpec, data, source)
    overlay = validated(Overlay, data, source)
    if not max_overlays:
        raise InvalidInputError(
            f"{source} is the last of more than {MAX_OVERLAYS} overlays, each the base of the one before.",
            f"Expected at most {MAX_OVERLAYS}, and a hardware description under the last.",
            "Give a hardware description as base; an overlay cannot lie on itself.",
        )
    base: str | Path = overlay.base
    if overlay.base not in _files("hardware"):
        beside = Path(source).parent / overlay.base
        base = beside if _exists(beside) else overlay.base
    changed = applied(load_hardware(base, max_overlays - 1), overlay)
    return on_other_clusters(changed) if str(name_or_path) in stack_names() else changed


def load_scenarios(path: str | Path) -> tuple[Scenario, ...]:
    """Load the scenarios of a user's TOML or JSON.

    Raises:
        InvalidInputError: the file cannot be read, or describes no scenarios.
    """
    from milpplan.problem.scenarios import ScenarioFile

    text, source = read_text(Path(path)), str(path)
    is_json = source.lower().endswith(".json")
    return validated(ScenarioFile, (parse_json if is_json else parse_toml)(text, source), source).scenarios


def file_keys(path: str) -> frozenset[str]:
    """Read the keys at the top of a user's file.

    Raises:
        UnknownNameError: no file is there.
        InvalidInputError: the file cannot be read.
    """
    return frozenset(_data("models", path)[0])


def load_overlay(path: str | Path) -> Overlay | None:
    """Load the overlay of a file; None if a name or a file is a hardware description itself."""
    from milpplan.problem.overlay import Overlay

    data, source = _data("hardware", path)
    return validated(Overlay, data, source) if "base" in data else None


def stacks_on(name: str) -> tuple[str, ...]:
    """List the shipped stacks that lie directly on a hardware description."""
    overlays = ((stack, load_overlay(stack)) for stack in stack_names() if stack.startswith(name + STACK_MARK))
    return tuple(stack for stack, overlay in overlays if overlay is not None and overlay.base == name)


def stack_provenance(name: str) -> Provenance | None:
    """Read the origin of a shipped stack's constants; None for any other name."""
    overlay = load_overlay(name) if name in stack_names() else None
    return None if overlay is None else overlay.provenance


LAUNCHER_STACKS: dict[str, tuple[str, ...]] = {
    "megatron-bridge": ("nemo", "megatron-core"),
    "nanotron": ("nanotron", "plain"),
    **dict.fromkeys(("megatron", "slime", "ms-swift", "verl"), ("megatron-core", "nemo")),
    **dict.fromkeys(("torchtitan", "deepspeed", "accelerate", "trl", "llama-factory", "axolotl"), ("plain",)),
}
"""Software stacks whose fitted constants are those of a launcher, best match first. NeMo and Megatron-Bridge train
with Megatron-Core. ``plain`` is fitted to frameworks that launch single operators; AutoModel's are fused."""


def launcher_stack(launcher: str | None, hardware: str) -> str | None:
    """Find the shipped stack of a launcher on a bare hardware name; None where there is none.

    Args:
        launcher: name of the launcher; None: no launcher.
        hardware: a hardware name, or any other word, which has no stack.
    """
    shipped = stack_names()
    names = (f"{hardware}{STACK_MARK}{stack}" for stack in LAUNCHER_STACKS.get(launcher or "", ()))
    return next((name for name in names if name in shipped), None)


def fitted_hardware(launcher: str | None, hardware: HardwareSpec) -> HardwareSpec:
    """Return the shipped stack of a launcher on bare shipped hardware; any other description stays as it is."""
    stack = launcher_stack(launcher, hardware.name)
    if stack is None or load_hardware(hardware.name) != hardware:
        return hardware
    return load_hardware(stack)


def errors_by_stack(hardware: HardwareSpec) -> dict[str, float]:
    """Return the mean errors of a description on the runs that stacks are fitted to, by stack, as fractions.

    A stack has the error on its own runs where they are left out of the fit. Bare hardware has those on the runs
    of all its stacks. A description that is not shipped has none.
    """
    name = overlaid_name(hardware)
    own = stack_provenance(name)
    if own is not None:
        error = own.error_after if own.error_left_out is None else own.error_left_out
        return {} if error is None else {name: error}
    fits = {stack: stack_provenance(stack) for stack in stacks_on(name)}
    return {stack: fit.error_before for stack, fit in fits.items() if fit and fit.error_before is not None}


def overlaid_name(hardware: HardwareSpec) -> str:
    """Return the name of a description's overlay; its own without one."""
    return hardware.name if hardware.uncertainty is None else hardware.uncertainty.overlay


def _data(kind: Kind, name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """Parse a file; return also its name for messages. A shipped name precedes a file of the same name."""
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
    """Name a model by the file's stem; for ``config.json`` by its directory, which on the Hub is the model."""
    return path.stem if path.stem != "config" else path.resolve().parent.name or path.stem


_NOT_DESCRIBED: Final = re.compile(r"tpu|trainium|\btrn\d")
"""Accelerators that are refused with the reason."""


def _unknown_name(what: str, name: str, known: tuple[str, ...]) -> UnknownNameError:
    close = nearest(name, known, 3)
    meant = f"Did you mean {' or '.join(close)}?" if close else "Give one of these names."
    if _NOT_DESCRIBED.search(name.lower()):
        meant = "No TPU or Trainium ships: too few public measurements to state an error."
    return UnknownNameError(
        f"There is no {what} named {shown(name)}.",
        f"Known: {', '.join(known) or 'none'}.",
        f"{meant} Or give the path of a .toml or .json file.",
    )
