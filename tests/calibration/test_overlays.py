"""Overlays: applied, written, read, stacked."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import pytest

from milpplan import load_hardware
from milpplan.calibration import overlay_text, write_overlay
from milpplan.errors import InvalidInputError, UnknownNameError
from milpplan.problem import (
    COLLECTIVES,
    DOUBTED_CONGESTION,
    FACTORS,
    LEFT_SHARE,
    PRIOR_SIGMA,
    BusTable,
    Constants,
    Factor,
    Overlay,
    Provenance,
    Seconds,
    SizeCurve,
    Switch,
    Tables,
    applied,
    load_overlay,
    moved,
    uncertainty_of,
)
from milpplan.simulation.network.collectives import all_gather_s

ORIGIN = Provenance(data='a "test"\n', date="2026-01-01", method="by hand", num_measurements=3)


def overlay(**fields: Any) -> Overlay:
    """An overlay on DGX H100."""
    return Overlay(**{"base": "dgx-h100", "name": "mine", "provenance": ORIGIN, **fields})


def full() -> Overlay:
    """One with everything in it."""
    table = BusTable(
        num_gpus=(2.0, 8.0), message_bytes=(1e3, 1e6), bus_bandwidth_bytes_per_s=((1e9, 2e9), (3e9, 4e9))
    )
    return overlay(
        constants=Constants(
            gemm_efficiency=Factor(value=0.9, one_sigma=0.03),
            scale_out_efficiency=Factor(value=0.5, one_sigma=0.1),
            attention_efficiency=Factor(value=1.0, one_sigma=0.4, identified=False),
            layer_launch_s=Seconds(value=3e-4, one_sigma=1e-5),
            overlap_tensor_parallel=Switch(value=False),
        ),
        tables=Tables(all_reduce=table, attention_forward=SizeCurve(size=(512.0, 4096.0), value=(0.2, 0.4))),
    )


def test_the_identity_changes_no_number() -> None:
    """Nothing but the software's name differs, and the origin of the uncertainty: factors of 1 without a sigma are
    exact."""
    base = load_hardware("dgx-h100")
    exact = {name: Factor(value=1.0) for name in FACTORS}
    for identity in (overlay(), overlay(constants=Constants(**exact))):
        changed = applied(base, identity)
        assert changed.software.name == "mine"
        assert changed.model_copy(update={"software": base.software, "uncertainty": None}) == base
        assert uncertainty_of(changed).step_overhead_s == PRIOR_SIGMA["step_overhead_s"]
    assert uncertainty_of(changed).gemm_efficiency == 0.0


def test_constants_end_up_where_they_belong() -> None:
    """Factors multiply tables, curves and fractions; times and switches replace the software's."""
    base, changed = load_hardware("dgx-h100"), applied(load_hardware("dgx-h100"), full())
    ratio = changed.accelerator.bf16.gemm.efficiency[3][3][3] / base.accelerator.bf16.gemm.efficiency[3][3][3]
    assert ratio == pytest.approx(0.9)
    assert changed.scale_out.efficiency == pytest.approx(0.5 * base.scale_out.efficiency)
    assert changed.scale_up.all_reduce == full().tables.all_reduce
    assert changed.accelerator.attention_forward == full().tables.attention_forward
    assert changed.accelerator.attention_backward == base.accelerator.attention_backward
    assert changed.scale_up.all_gather == base.scale_up.all_gather
    assert changed.software.layer_launch_s == 3e-4
    assert changed.software.overlap_tensor_parallel is False
    known = changed.uncertainty
    assert known is not None
    assert known.gemm_efficiency == pytest.approx(0.03 / 0.9)
    assert known.memory_efficiency == pytest.approx(LEFT_SHARE * PRIOR_SIGMA["memory_efficiency"])
    assert known.step_overhead_s == PRIOR_SIGMA["step_overhead_s"]


def test_eight_bit_products_have_their_own_factor() -> None:
    """It multiplies the 8-bit table only, besides the factor on both."""
    base = load_hardware("dgx-h100")
    constants = Constants(gemm_efficiency=Factor(value=0.9), gemm_fp8_efficiency=Factor(value=1.2))
    changed = applied(base, overlay(constants=constants))
    assert base.accelerator.fp8 is not None
    assert changed.accelerator.fp8 is not None
    for before, after, factor in (
        (base.accelerator.bf16, changed.accelerator.bf16, 0.9),
        (base.accelerator.fp8, changed.accelerator.fp8, 1.08),
    ):
        assert after.gemm.efficiency[2][3][4] == pytest.approx(factor * before.gemm.efficiency[2][3][4])


def test_hops_delay_collectives_across_domains_only() -> None:
    """The latency replaces the ring's and is the least of every variant's; inside a domain nothing changes, and
    what crosses domains takes longer by at most every hop of a ring."""
    base = load_hardware("dgx-h100")
    slow = applied(base, overlay(constants=Constants(scale_out_hop_s=Seconds(value=1e-4))))
    assert slow.scale_out.hop_latency_s == slow.scale_up.hop_latency_s == 1e-4
    assert min(one.scale_out_hop_latency_s for one in slow.scale_out.variants) == 1e-4
    inside = [float(all_gather_s(spec, 1e6, 8, 1)) for spec in (base, slow)]
    across = [float(all_gather_s(spec, 1e6, 16, 1)) for spec in (base, slow)]
    assert inside[0] == inside[1]
    assert 0 < across[1] - across[0] <= 15 * 1e-4
    assert moved(slow, {"scale_out_hop_s": 5.0}) == slow
    later = moved(base, {"scale_out_hop_s": 2.0})
    assert later.scale_out.hop_latency_s == base.scale_out.hop_latency_s + 2 * PRIOR_SIGMA["scale_out_hop_s"]


def test_kernels_that_the_host_waits_for() -> None:
    """The latency of a kernel replaces the accelerator's, nothing else changes; without a sigma it stays."""
    base = load_hardware("dgx-a100-80")
    slow = applied(base, overlay(base="dgx-a100-80", constants=Constants(kernel_latency_s=Seconds(value=1e-4))))
    assert slow.accelerator == base.accelerator.model_copy(update={"kernel_latency_s": 1e-4})
    assert moved(slow, {"kernel_latency_s": 5.0}) == slow


def test_values_stay_within_their_ranges() -> None:
    """However large the factor, the description is one that could be read from a file."""
    base = load_hardware("dgx-h100")
    for value in (0.02, 50.0):
        changed = applied(base, overlay(constants=Constants(**{name: Factor(value=value) for name in FACTORS})))
        assert type(base).model_validate(changed.model_dump()) == changed


def test_moved_by_a_sigma_is_slower() -> None:
    """One sigma to the slow side lowers rates and raises times; to the fast side no time falls below zero."""
    known = applied(load_hardware("dgx-h100"), full())
    slow = moved(known, {"gemm_efficiency": 1.0, "layer_launch_s": 1.0})
    before, after = (spec.accelerator.bf16.gemm.efficiency[0][0][0] for spec in (known, slow))
    assert after == pytest.approx(before * exp(-0.03 / 0.9))
    assert slow.software.layer_launch_s == pytest.approx(3.1e-4)
    assert moved(known, {"layer_launch_s": -1000.0}).software.layer_launch_s == 0.0
    bare = load_hardware("dgx-h100")
    there = moved(bare, {"gemm_efficiency": 1.0}).accelerator.bf16.gemm.efficiency[0][0][0]
    assert there == pytest.approx(
        bare.accelerator.bf16.gemm.efficiency[0][0][0] * exp(-PRIOR_SIGMA["gemm_efficiency"])
    )


def test_a_fit_that_says_little_leaves_the_prior() -> None:
    """A time that is identified only because it hardly counts has the prior's sigma; a constant that is not
    identified keeps the prior's, or what the data left where that is less."""
    constants = Constants(
        step_overhead_s=Seconds(value=0.02, one_sigma=1.0),
        layer_launch_s=Seconds(value=0.0, one_sigma=1e-5, identified=False),
        message_s=Seconds(value=0.0, identified=False),
    )
    known = uncertainty_of(applied(load_hardware("dgx-h100"), overlay(constants=constants)))
    assert known.step_overhead_s == PRIOR_SIGMA["step_overhead_s"]
    assert known.layer_launch_s == 1e-5
    assert known.message_s == PRIOR_SIGMA["message_s"]


def test_a_network_without_congestion_is_doubted_to_the_slow_side() -> None:
    """The fast end keeps none; the slow end has one sigma above a well-built network's."""
    bare = load_hardware("dgx-h100")
    network = bare.scale_out.model_copy(update={"congestion_s_per_byte": 0.0})
    free = bare.model_copy(update={"scale_out": network})
    fast, slow = (moved(free, {"congestion_s_per_byte": k}).scale_out.congestion_s_per_byte for k in (-1.0, 1.0))
    assert fast == 0.0
    assert slow == pytest.approx(DOUBTED_CONGESTION * exp(PRIOR_SIGMA["congestion_s_per_byte"]))


def test_file_and_back(tmp_path: Path) -> None:
    """overlay -> file -> overlay is the identity, and a file serves wherever a hardware name does."""
    path = tmp_path / "mine.toml"
    write_overlay(path, full())
    assert load_overlay(path) == full()
    assert load_hardware(path) == applied(load_hardware("dgx-h100"), full())
    assert load_overlay("dgx-h100") is None


def test_strange_text_survives(tmp_path: Path) -> None:
    """Quotes, line breaks, control characters and other scripts."""
    strange = overlay(provenance=ORIGIN.model_copy(update={"data": '"\\\n\t\x7f\x01 \u00e9 \U0001f600'}))
    path = tmp_path / "strange.toml"
    path.write_text(overlay_text(strange), encoding="utf-8")
    assert load_overlay(path) == strange


def test_overlays_lie_on_overlays(tmp_path: Path) -> None:
    """A base given as a path is looked for beside the overlay; factors multiply, and the sigma is that of the
    later fit, which is one of the product."""
    write_overlay(
        tmp_path / "one.toml", overlay(constants=Constants(gemm_efficiency=Factor(value=0.5, one_sigma=0.015)))
    )
    two = overlay(
        base="one.toml", name="two", constants=Constants(gemm_efficiency=Factor(value=0.5, one_sigma=0.02))
    )
    write_overlay(tmp_path / "two.toml", two)
    base, stacked = load_hardware("dgx-h100"), load_hardware(tmp_path / "two.toml")
    ratio = stacked.accelerator.bf16.gemm.efficiency[0][0][0] / base.accelerator.bf16.gemm.efficiency[0][0][0]
    assert ratio == pytest.approx(0.25)
    assert stacked.uncertainty is not None
    assert stacked.uncertainty.gemm_efficiency == pytest.approx(0.04)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    """Loops, unknown bases, unknown fields, values out of range: an error, with something to do."""
    loop = tmp_path / "loop.toml"
    write_overlay(loop, overlay(base="loop.toml"))
    with pytest.raises(InvalidInputError, match="overlays"):
        load_hardware(loop)
    write_overlay(loop, overlay(base="dgx-h999"))
    with pytest.raises(UnknownNameError, match="dgx-h999"):
        load_hardware(loop)
    text = overlay_text(full())
    for old, new in (
        ("value = 0.9", "value = -1"),
        ("value = 0.9", 'value = "x"'),
        ("[provenance]", "[provenances]"),
        ('name = "mine"', 'name = "dgx-h100"'),
    ):
        loop.write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(InvalidInputError) as caught:
            load_hardware(loop)
        assert caught.value.expected
        assert caught.value.do


def test_a_table_for_an_engine_that_is_not_there(tmp_path: Path) -> None:
    """A100 has no fp8."""
    gemm = load_hardware("dgx-h100").accelerator.bf16.gemm
    with pytest.raises(InvalidInputError, match="fp8"):
        applied(load_hardware("dgx-a100-80"), overlay(base="dgx-a100-80", tables=Tables(gemm_fp8=gemm)))
    assert set(COLLECTIVES) < set(Tables.model_fields)
