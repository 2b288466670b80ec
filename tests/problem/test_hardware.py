"""The hardware files that come with the package, and the records that refuse wrong ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from milpplan.problem import BusTable, GemmTable, HardwareSpec, SizeCurve
from milpplan.simulation.layers.kernels import gemm_s

HARDWARE = Path(__file__).parents[2] / "hardware"
FILES = sorted(HARDWARE.glob("*.toml"))
SPECS = {path.stem: HardwareSpec.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))) for path in FILES}
NAMES = sorted(SPECS)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

# Dense bf16 and fp8 TFLOP/s, memory GB/s, link and NIC GB/s of one direction, accelerators of a domain.
DATA_SHEETS: dict[str, tuple[float, float | None, float, float, float, int]] = {
    "dgx-a100-40": (312, None, 1555, 300, 25, 8),
    "dgx-a100-80": (312, None, 2039, 300, 25, 8),
    "dgx-h100": (989, 1979, 3350, 450, 50, 8),
    "dgx-h200": (989, 1979, 4800, 450, 50, 8),
    "dgx-b200": (2250, 4500, 7700, 900, 50, 8),
    "gb200-nvl72": (2500, 5000, 8000, 900, 50, 72),
    "mi300x": (1307.4, 2610, 5300, 448, 50, 8),
    "l40s": (362.05, 733, 864, 31, 31, 8),
    "rtx4090": (165.2, 330.3, 1008, 31, 1.5625, 8),
    "a800": (312, None, 2039, 200, 25, 8),
    "h800": (989, 1979, 3350, 200, 50, 8),
    "h20": (148, 296, 4000, 450, 50, 8),
    "dgx-b300": (2250, 4500, 7750, 900, 100, 8),
    "gb300-nvl72": (2500, 5000, 8000, 900, 100, 72),
    "mi325x": (1307.4, 2610, 6000, 448, 50, 8),
    "mi355x": (2516.6, 5033.2, 8000, 537.6, 50, 8),
}


def test_every_promised_preset_is_there() -> None:
    """The folder holds exactly the systems of its README."""
    assert set(NAMES) == set(DATA_SHEETS)
    readme = (HARDWARE / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_file_name(name: str) -> None:
    """A file is found by its name, so the name inside must be the same."""
    assert SPECS[name].name == name


@pytest.mark.parametrize("name", NAMES)
def test_rates_match_the_data_sheets(name: str) -> None:
    """Peaks are dense, links count one direction, per accelerator, as the sources print them."""
    spec, (bf16, fp8, memory, link, nic, domain) = SPECS[name], DATA_SHEETS[name]
    accelerator = spec.accelerator
    assert accelerator.bf16.peak_flops_per_s == pytest.approx(bf16 * 1e12)
    assert (accelerator.fp8 is None) == (fp8 is None)
    if accelerator.fp8 is not None and fp8 is not None:
        assert accelerator.fp8.peak_flops_per_s == pytest.approx(fp8 * 1e12)
    assert accelerator.memory_bandwidth_bytes_per_s == pytest.approx(memory * 1e9)
    assert spec.scale_up.bandwidth_bytes_per_s == pytest.approx(link * 1e9)
    assert spec.scale_out.bandwidth_bytes_per_s == pytest.approx(nic * 1e9)
    assert spec.scale_up.num_gpus == domain


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("dgx-h100", 81559),
        ("dgx-a100-80", 81920),
        ("dgx-b200", 183359),
        ("gb200-nvl72", 189471),
        ("l40s", 46068),
        ("a800", 81920),
        ("h800", 81559),
        ("h20", 97871),
        ("dgx-b300", 275040),
        ("gb300-nvl72", 284208),
        ("mi355x", 294896),
    ],
)
def test_memory_is_what_the_driver_shows(name: str, mebibytes: int) -> None:
    """Memory is nvidia-smi's MiB, neither the decimal label nor the physical size."""
    assert SPECS[name].accelerator.memory_bytes == mebibytes * 2**20


@pytest.mark.parametrize("name", NAMES)
def test_gemm_tables_are_below_peak_and_grow_to_a_sane_top(name: str) -> None:
    """Efficiencies lie in (0, 1], large products reach 35 to 95 %, more than twice the smallest."""
    for engine in (SPECS[name].accelerator.bf16, SPECS[name].accelerator.fp8):
        if engine is None:
            continue
        table = np.array(engine.gemm.efficiency)
        assert table.min() > 0
        assert table.max() <= 1
        assert 0.35 <= table[-1, -1, -1] <= 0.95
        assert table[-1, -1, -1] > 2 * table[0, 0, 0]


@pytest.mark.parametrize(
    ("name", "base", "factor"), [("h800", "dgx-h100", 200 / 450), ("a800", "dgx-a100-80", 200 / 300)]
)
def test_fewer_links_scale_the_collectives_of_the_sibling(name: str, base: str, factor: float) -> None:
    """The products are the sibling's, and collectives inside a node have the links' share of its bandwidth."""
    ours, theirs = SPECS[name], SPECS[base]
    assert ours.accelerator.bf16.gemm == theirs.accelerator.bf16.gemm
    for operation in OPERATIONS:
        scaled = np.array(getattr(ours.scale_up, operation).bus_bandwidth_bytes_per_s)
        table = np.array(getattr(theirs.scale_up, operation).bus_bandwidth_bytes_per_s)
        assert scaled == pytest.approx(table * factor, rel=0.01)


def test_h20_meets_the_measured_products() -> None:
    """Square products of 1k to 8k take the measured time (zzc0721/torch-performance-test-data#77) within 3 %."""
    sizes, tera = np.array([1024.0, 2048, 4096, 8192]), np.array([95.12, 120.27, 133.41, 138.60])
    seconds = gemm_s(SPECS["h20"].accelerator, "bf16", sizes, sizes, sizes)
    assert 2e-12 * sizes**3 / seconds == pytest.approx(tera, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_gemm_tables_keep_time_monotone(name: str) -> None:
    """Along each axis e[i] >= e[i+1] / (1 + log ratio), which makes size / efficiency non-decreasing."""
    for engine in (SPECS[name].accelerator.bf16, SPECS[name].accelerator.fp8):
        if engine is None:
            continue
        table = np.array(engine.gemm.efficiency)
        for axis, sizes in enumerate((engine.gemm.m, engine.gemm.n, engine.gemm.k)):
            view = np.moveaxis(table, axis, -1)
            least = view[..., 1:] / (1 + np.diff(np.log(sizes)))
            assert np.all(view[..., :-1] >= least * (1 - 1e-9))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_bus_tables_are_sane(name: str, operation: str) -> None:
    """Tables start with 2 GPUs, cover the domain, and stay under 1.35 links (NVLS reduces in the switch)."""
    scale_up = SPECS[name].scale_up
    table: BusTable = getattr(scale_up, operation)
    rates = np.array(table.bus_bandwidth_bytes_per_s)
    assert table.num_gpus[0] == 2
    assert table.num_gpus[-1] == scale_up.num_gpus
    assert table.message_bytes[0] <= 2**16
    assert table.message_bytes[-1] >= 2**29
    limit = 1.35 if operation == "all_reduce" else 1.0
    assert rates.max() <= limit * scale_up.bandwidth_bytes_per_s
    assert np.all(rates[:, -1] > 3 * rates[:, 0])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_measured_times_do_not_fall_with_the_message(name: str, operation: str) -> None:
    """bytes / bus bandwidth, the time but for a constant, does not fall along a row (1 % for rounding)."""
    table: BusTable = getattr(SPECS[name].scale_up, operation)
    times = np.array(table.message_bytes) / np.array(table.bus_bandwidth_bytes_per_s)
    assert np.all(times[:, 1:] >= 0.99 * times[:, :-1])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_have_sources(path: Path) -> None:
    """Every number outside the tables has a comment on its line or right above it."""
    previous, inside_table = "", False
    for line in path.read_text(encoding="utf-8").splitlines():
        inside_table = inside_table and not line.startswith("[")
        if line.startswith(("[accelerator.bf16.gemm", "[accelerator.fp8.gemm", "[scale_up.", "[[")):
            inside_table = True
        key, _, value = line.partition(" = ")
        is_number = value[:1].isdigit() and key not in ("schema_version",)
        if is_number and not inside_table and not key.startswith(("size", "value")):
            assert "#" in line or previous.startswith("#"), f"{path.name}: {line}"
        previous = line


def test_table_of_the_wrong_shape_is_refused() -> None:
    """A GEMM table must have the shape of its axes."""
    with pytest.raises(ValidationError, match="shape"):
        GemmTable(m=(1, 2), n=(1,), k=(1,), efficiency=(((0.5,),),))


def test_axes_must_ascend() -> None:
    """Interpolation needs strictly ascending axes."""
    with pytest.raises(ValidationError, match="ascending"):
        SizeCurve(size=(2, 1), value=(0.5, 0.5))
    with pytest.raises(ValidationError, match="ascending"):
        BusTable(num_gpus=(2, 2), message_bytes=(1,), bus_bandwidth_bytes_per_s=((1,), (1,)))


def test_unknown_fields_are_refused() -> None:
    """A typo in a hardware file cannot pass silently."""
    data = tomllib.loads((HARDWARE / "dgx-h100.toml").read_text(encoding="utf-8"))
    data["accelerator"]["memory_gb"] = 80
    with pytest.raises(ValidationError, match="memory_gb"):
        HardwareSpec.model_validate(data)


def test_specs_hash() -> None:
    """Specs are dictionary keys, as caches of their tables need."""
    assert len({SPECS[name] for name in NAMES}) == len(NAMES)
