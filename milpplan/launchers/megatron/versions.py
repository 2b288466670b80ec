"""Older versions of Megatron-LM: arguments that they lack, and arguments that they need in addition.

Source: megatron/training/arguments.py, megatron/core/transformer/transformer_config.py and
megatron/core/transformer/moe/token_dispatcher.py at the tags of NVIDIA/Megatron-LM named here; core_v0.13.0 and
before have neither Megatron-FSDP nor windows.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from milpplan.errors import IllegalPlanError
from milpplan.launchers.arguments import Values
from milpplan.launchers.capabilities import MEGATRON
from milpplan.launchers.records import Launch, Section

NEWEST = MEGATRON.versions[0]
LACKS: dict[str, tuple[str, ...]] = {
    "core_v0.16.0": (),
    "core_v0.15.0": ("--moe-shared-expert-gate",),
    "core_v0.14.0": (
        "--moe-shared-expert-gate",
        "--softmax-type",
        "--window-size",
        "--window-attn-skip-freq",
    ),
}
"""Arguments that an export may write and the version's parser does not have."""

WANTS_DEEPEP = ("core_v0.15.0", "core_v0.14.0")
"""Versions whose ``flex`` dispatcher needs an argument to use DeepEP (``_DeepepManager``)."""

NULL_TOKENIZER_NOTE = (
    "This version's NullTokenizer counts a token more: on mock data the padded vocabulary may be larger than the "
    "plan's by one multiple of 128 * tp."
)


def check_version(version: str, given: Container[str]) -> None:
    """Refuse arguments that a version's parser does not have.

    Raises:
        IllegalPlanError: the version lacks an argument.
    """
    lacking = [flag for flag in LACKS.get(version, ()) if flag in given]
    if lacking:
        raise IllegalPlanError(
            f"Megatron-LM {version} has no {', '.join(lacking)}, which this model needs.",
            f"Expected a version that has it, such as {NEWEST}.",
            f"Leave --target-version out, or give one after {version}.",
        )


def for_version(launch: Launch) -> Launch:
    """Adapt a launch to its version.

    Raises:
        IllegalPlanError: the version lacks an argument.
    """
    if launch.version == NEWEST:
        return launch
    check_version(launch.version, launch.arguments.values)
    sections = launch.sections
    if launch.version in WANTS_DEEPEP and launch.arguments.text("--moe-token-dispatcher-type") == "flex":
        sections = tuple(_with(part, {"--moe-enable-deepep": ()}) for part in sections)
    return replace(launch, sections=sections, notes=(*launch.notes, NULL_TOKENIZER_NOTE))


def _with(part: Section, added: dict[str, Values]) -> Section:
    """Add arguments to the section that names the dispatcher."""
    if "--moe-token-dispatcher-type" not in part.arguments:
        return part
    return replace(part, arguments=part.arguments | added)
