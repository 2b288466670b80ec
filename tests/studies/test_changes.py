"""Changes of hardware by dotted path: each operation does what it says, to nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from milpplan import load_hardware
from milpplan.errors import InvalidInputError, MilpplanError, UnknownNameError
from milpplan.problem import HardwareSpec
from milpplan.studies.grid import Case, apply_case, known_paths

H100 = load_hardware("dgx-h100")


def after(hardware: HardwareSpec = H100, **operations: Any) -> HardwareSpec:
    """The hardware with a case made of these operations."""
    return apply_case(hardware, Case(name="case", **operations), load_hardware, "case")


def differing(one: Any, other: Any, path: str = "") -> set[str]:
    """Dotted paths in which two trees of plain data differ, entries of lists as one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            found
            for key in one.keys() | other.keys()
            for found in differing(one.get(key), other.get(key), f"{path}.{key}")
        }
    return set() if one == other else {path[1:]}


def changes(hardware: HardwareSpec, base: HardwareSpec = H100) -> set[str]:
    """Where a description differs from its base."""
    return differing(base.model_dump(), hardware.model_dump())


def test_every_operation_changes_its_place_alone() -> None:
    """set, multiply, add and replace_from give the value worked out, and leave all else as it was."""
    memory = H100.accelerator.memory_bytes
    for operations, expected in (
        ({"set": {"accelerator.memory_bytes": 120_000_000_000}}, 120_000_000_000),
        ({"multiply": {"accelerator.memory_bytes": 1.5}}, memory * 3 // 2),
        ({"add": {"accelerator.memory_bytes": 40e9}}, memory + 40_000_000_000),
        (
            {"replace_from": {"accelerator.memory_bytes": "dgx-h200"}},
            load_hardware("dgx-h200").accelerator.memory_bytes,
        ),
    ):
        new = after(**operations)
        assert new.accelerator.memory_bytes == expected
        assert changes(new) == {"accelerator.memory_bytes"}


def test_operations_of_a_case_follow_one_another() -> None:
    """First what is taken from other hardware, then what is set, multiplied, added."""
    new = after(
        add={"accelerator.memory_bytes": -1e9},
        multiply={"accelerator.memory_bytes": 2},
        set={"accelerator.memory_bytes": 50_000_000_000},
        replace_from={"accelerator": "dgx-h200"},
    )
    assert new.accelerator.memory_bytes == 99_000_000_000
    assert new.accelerator.name == load_hardware("dgx-h200").accelerator.name


def test_a_wildcard_reaches_every_table() -> None:
    """`scale_up.*.bus_bandwidth_bytes_per_s` doubles the entries of four tables, and nothing else."""
    new = after(multiply={"scale_up.*.bus_bandwidth_bytes_per_s": 2})
    tables = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert changes(new) == {f"scale_up.{name}.bus_bandwidth_bytes_per_s" for name in tables}
    for name in tables:
        before, now = (getattr(one.scale_up, name).bus_bandwidth_bytes_per_s for one in (H100, new))
        assert now == tuple(tuple(2 * value for value in row) for row in before)


def test_an_entry_of_a_list_has_its_number() -> None:
    """The second variant of the network alone changes."""
    new = after(set={"scale_out.variants.1.bandwidth_fraction": 0.5})
    fractions = [variant.bandwidth_fraction for variant in H100.scale_out.variants]
    assert [variant.bandwidth_fraction for variant in new.scale_out.variants] == [
        fractions[0],
        0.5,
        *fractions[2:],
    ]


def test_sections_are_merged_by_set_and_taken_whole_by_replace_from() -> None:
    """A table sets the fields that it names; replace_from takes all of them; a null removes what may be absent."""
    merged = after(set={"scale_up": {"num_gpus": 1, "p2p_latency_s": 5e-6}})
    assert changes(merged) == {"scale_up.num_gpus", "scale_up.p2p_latency_s"}
    other = load_hardware("rtx4090")
    assert after(replace_from={"scale_up": "rtx4090"}).scale_up == other.scale_up
    assert after(set={"accelerator.fp8": None}).accelerator.fp8 is None
    a100 = load_hardware("dgx-a100-80")
    assert a100.accelerator.fp8 is None
    assert after(a100, replace_from={"accelerator.fp8": "dgx-h100"}).accelerator.fp8 == H100.accelerator.fp8


def test_keys_of_toml_without_quotes_mean_the_same() -> None:
    """`multiply = {scale_out = {bandwidth_bytes_per_s = 2}}` is what TOML makes of an unquoted dotted key."""
    quoted = Case.model_validate({"name": "a", "multiply": {"scale_out.bandwidth_bytes_per_s": 2}})
    nested = Case.model_validate({"name": "a", "multiply": {"scale_out": {"bandwidth_bytes_per_s": 2}}})
    assert quoted == nested
    assert after(set={"scale_out": {"bandwidth_bytes_per_s": 1e9}}) == after(
        set={"scale_out.bandwidth_bytes_per_s": 1e9}
    )


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("memory_bytes", "accelerator.memory_bytes"),
        ("accelerator.memory_byte", "accelerator.memory_bytes"),
        ("scaleup.num_gpus", "scale_up.num_gpus"),
        ("scale_up.all_reduce.bus_bandwidth", "scale_up.all_reduce.bus_bandwidth_bytes_per_s"),
        ("network.*.bandwidth_fraction", "scale_out.variants.*.bandwidth_fraction"),
    ],
)
def test_unknown_paths_are_answered_with_the_nearest(path: str, nearest: str) -> None:
    """Every operation refuses a path that no description has, and names the nearest."""
    for operations in (
        {"set": {path: 1}},
        {"multiply": {path: 2}},
        {"add": {path: 1}},
        {"replace_from": {path: "l40s"}},
    ):
        with pytest.raises(UnknownNameError) as caught:
            after(**operations)
        assert repr(path) in caught.value.seen
        assert nearest in caught.value.expected
        assert nearest in known_paths()


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"set": {"accelerator.memory_bytes": "much"}}, "a whole number"),
        ({"set": {"accelerator.memory_bytes": -1}}, "greater than 0"),
        ({"set": {"scale_up": {"num_gpu": 8}}}, "there is no 'scale_up.num_gpu'"),
        ({"multiply": {"scale_up.num_gpus": 1.3}}, "8 would become 10.4"),
        ({"multiply": {"scale_up": 2.0}}, "a section, not a number"),
        ({"multiply": {"scale_up.name": 2.0}}, "not a number"),
        ({"multiply": {"memory_bandwidth_efficiency": 2.0}}, "there is no"),
        ({"multiply": {"accelerator.memory_bandwidth_efficiency": 2.0}}, "less than or equal to 1"),
        ({"add": {"software.overlap_tensor_parallel": 1}}, "not a number"),
        ({"replace_from": {"scale_up.*.num_gpus": "l40s"}}, "scale_up.*.num_gpus"),
        ({"replace_from": {"scale_up": "l4os"}}, "no hardware named"),
        ({"set": {"name": "mine"}}, "there is no 'name'"),
    ],
)
def test_changes_without_sense_are_refused(operations: dict[str, Any], words: str) -> None:
    """The message has its three parts and says what was seen."""
    with pytest.raises(MilpplanError) as caught:
        after(**operations)
    assert words in caught.value.seen
    assert caught.value.expected
    assert caught.value.do


def test_a_section_that_this_hardware_lacks_is_no_unknown_path() -> None:
    """A number inside fp8 of an A100: the message says that the section is missing, and how to give it one."""
    with pytest.raises(InvalidInputError, match=r"accelerator\.fp8\.peak_flops_per_s is not there"):
        after(load_hardware("dgx-a100-80"), multiply={"accelerator.fp8.peak_flops_per_s": 2})
