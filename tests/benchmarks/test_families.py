"""Public configurations: those that load count as their classes, and none of their keys is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from benchmarks.families import MAX_REASON, Row, configurations, counts, row_of, tables
from milpplan.errors import InvalidInputError
from milpplan.problem.huggingface import RENAMED, model_from_config, without_effect
from milpplan.simulation.layers import total_parameters
from tests.amounts import first

CONFIGS: Final = configurations()
COUNTS: Final = counts()
REFUSED: Final = {
    "kimi_k3": "attention to earlier blocks, gates",
    "llama4": "Llama 4's text alone under the class of text and images",
}
"""Families with a refused configuration."""
NOT_READ: Final = {
    "intermediate_size": "all layers have experts",
    "sliding_window": "use_sliding_window is false",
    "max_window_layers": "use_sliding_window is false",
    "num_experts": "enable_moe_block is false",
    "top_k_experts": "enable_moe_block is false",
    "image_grid_pinpoints": "images of any size, whose tokens the job says",
    "image_seq_length": "images of any size, whose tokens the job says",
    "process_image_mode": "images of any size, whose tokens the job says",
    "projector_hidden_act": "a function of one number within the projector's kernel",
}
"""Keys that some published files have and that another key of theirs turns off."""


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_public_configurations_count_as_their_classes(name: str) -> None:
    """Every configuration that loads has, to the unit, the parameters of its class where there is one; the others
    are of the families that are known to be refused."""
    try:
        model = model_from_config(CONFIGS[name], name)
    except InvalidInputError:
        assert CONFIGS[name]["model_type"] in REFUSED
        return
    if name in COUNTS:
        assert total_parameters(model) == COUNTS[name][0]
    else:
        assert CONFIGS[name]["model_type"] == "nemotron-nas"


def test_most_public_configurations_load() -> None:
    """Of 86 published files and the tests' own, at most 3 are refused."""
    rows = [row_of(name, config, COUNTS.get(name)) for name, config in CONFIGS.items()]
    assert sum(row.parameters is None for row in rows) <= 3
    assert len(rows) == 122
    assert not [row for row in rows if row.verdict.startswith("off")]


def levels(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """List the parts of a configuration whose keys the reader decides: the whole file, and its text part."""
    inner = config.get("text_config")
    parts = {"text_config", "vision_config", "model_type", "architectures", "quantization_config"}
    if isinstance(inner, dict):
        yield {key: value for key, value in inner.items() if key not in parts}, "text_config"
        parts |= {*inner}
    yield {key: value for key, value in config.items() if key not in parts}, None


def is_dropped(config: dict[str, Any], part: str | None, key: str, value: object) -> bool:
    """Check that no other value of a key is priced or refused."""
    before = model_from_config(config, "m")
    numbers = [2 * value, value + 1, 0] if isinstance(value, int) and not isinstance(value, bool) else []
    for other in [*numbers, not value, "odd", 0.5, 3, ["sliding_attention"]]:
        level = {**(config if part is None else config[part]), key: other}
        try:
            after = model_from_config(level if part is None else {**config, part: level}, "m")
        except InvalidInputError:
            return False
        if after != before:
            return False
    return True


@pytest.mark.parametrize("part", first(1, range(8)))
def test_no_key_of_a_public_configuration_is_dropped_in_silence(part: int) -> None:
    """In one file of every set of keys, each key is priced, refused, or listed as without effect."""
    seen = set()
    for config in list(CONFIGS.values())[part::8]:
        text = config.get("text_config", config)
        keys = (config.get("model_type"), *sorted(text))
        if keys in seen or row_of("m", config, None).parameters is None:
            continue
        seen.add(keys)
        family = text.get("model_type", config["model_type"])
        listed = {*without_effect(RENAMED.get(family, family)), *without_effect(f"{family}_text"), *NOT_READ}
        for level, name in levels(config):
            dropped = {key for key, value in level.items() if is_dropped(config, name, key, value)}
            assert dropped <= listed, (keys[0], dropped - listed)
    assert len(seen) > 9


def test_tables_say_what_was_compared() -> None:
    """A count that is not the class's, a missing class and a refusal are told apart."""
    rows = [
        Row("a--one", "f", 5, (5, "C")),
        Row("two", "f", 6, (5, "C")),
        Row("three", "f", 6, None),
        row_of("four", {"model_type": "bert"}, None),
    ]
    assert [row.verdict for row in rows] == ["exact", "off by 1", "accepted", "refused"]
    totals, listed, families = tables(rows)
    assert "4 configurations: 3 accepted, 1 of them with exactly" in totals
    assert "| one | f | 5 | exact | C |" in listed
    assert "| four | bert | - | refused: model_type 'bert', which has an encoder" in listed
    assert "| kimi_k2 | the layers of deepseek_v3 |" in families
    assert all(len(row.reason) <= MAX_REASON + 3 for row in rows)
