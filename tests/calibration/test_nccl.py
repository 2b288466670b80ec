"""nccl-tests' output: what is read, what becomes of it, what is refused."""

from __future__ import annotations

import pytest

from milpplan import load_hardware
from milpplan.calibration import fit_bus, is_nccl_log, parse_nccl
from milpplan.errors import InvalidInputError

COLUMNS = """\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong    time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
SIZES = (1024, 1048576, 33554432, 1073741824)
TIMES = {1024: "25.60", 1048576: "40.00", 33554432: "180.5", 1073741824: "4012.7"}


def ranks(number: int) -> str:
    """The lines that list the ranks."""
    rows = [
        f"#  Rank {i:2} Group  0 Pid  26398 on    node{i // 8} device  {i % 8} [0x07] NVIDIA H100"
        for i in range(number)
    ]
    return "\n".join(rows)


def log(
    program: str = "all_reduce_perf", number: int = 8, redop: str = "sum", times: dict[int, str] = TIMES
) -> str:
    """One program's output."""
    rows = [
        f"{size:12} {size // 4:13}     float {redop:>7}      -1 {times[size]:>8}    0.00    0.00      0"
        f"    31.00    0.03    0.06      0"
        for size in SIZES
    ]
    body = "\n".join(rows)
    return f"""\
$ ./build/{program} -b 1K -e 1G -f 32 -g 1
# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 32(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{ranks(number)}
#
{COLUMNS}{body}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 123.4
#
"""


def test_the_rate_comes_from_the_time() -> None:
    """bus bandwidth = 2 (n - 1) / n * bytes / time of the out-of-place column, whatever was rounded to zero."""
    (found,) = parse_nccl(log(), "log.txt")
    assert (found.operation, found.num_ranks) == ("all_reduce", 8)
    assert list(found.rates) == list(SIZES)
    assert found.rates[1073741824] == pytest.approx(2 * 7 / 8 * 1073741824 / 4012.7e-6)


def test_several_programs_in_one_file() -> None:
    """Each run's own ranks and name count; equal sizes of the same are one row, by their median."""
    slow = {size: str(float(time) * 3) for size, time in TIMES.items()}
    text = log() + log(times=slow) + log() + log("alltoall_perf", 4, "none") + log("reduce_scatter_perf", 2)
    found = {(one.operation, one.num_ranks): one.rates for one in parse_nccl(text, "log.txt")}
    assert set(found) == {("all_reduce", 8), ("all_to_all", 4), ("reduce_scatter", 2)}
    assert found["all_reduce", 8] == parse_nccl(log(), "x")[0].rates


def test_the_name_and_the_ranks_from_outside() -> None:
    """A bare table takes its collective from the file's name and its ranks from the option."""
    bare = log().split("#\n")[-2] + "\n"
    bare = COLUMNS + bare.split("(GB/s)\n")[-1]
    assert is_nccl_log(bare)
    (found,) = parse_nccl(bare, "/home/user/all_gather_perf.txt", 8)
    assert (found.operation, found.num_ranks) == ("all_gather", 8)
    with pytest.raises(InvalidInputError, match="which collective"):
        parse_nccl(bare, "log.txt", 8)
    with pytest.raises(InvalidInputError, match="how many ranks"):
        parse_nccl(bare, "all_gather_perf.txt")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("25.60", "fast"),
        ("25.60", "nan"),
        ("        1024", "  1e99"),
        ("        1024", " 1" * 30),
        ("25.60", "inf"),
    ],
)
def test_lines_that_make_no_sense_are_refused(old: str, new: str) -> None:
    """A value that is no number, or a line that is no row, is an error that names the line."""
    with pytest.raises(InvalidInputError) as caught:
        parse_nccl(log().replace(old, new), "log.txt")
    assert caught.value.seen.startswith("log.txt:")
    assert caught.value.expected
    assert caught.value.do


def test_a_table_replaces_only_what_was_measured() -> None:
    """Eight ranks are measured; other numbers of ranks and other collectives keep the description's rates."""
    base = load_hardware("dgx-h100")
    found = fit_bus(parse_nccl(log(), "log.txt"), base)
    table = found.tables.all_reduce
    assert table is not None
    row = table.bus_bandwidth_bytes_per_s[table.num_gpus.index(8)]
    assert row[-1] == pytest.approx(2 * 7 / 8 * 1073741824 / 4012.7e-6)
    assert set(table.num_gpus) >= set(base.scale_up.all_reduce.num_gpus)
    assert found.tables.all_gather is None
    assert any("not measured" in text for text in found.told)
    assert found.error_before is not None


def test_repetitions_say_how_sure_the_tables_are() -> None:
    """Three outputs, 4 % below and above the middle one, without a time in place: 1.4826 times the median of
    0, 0.04 and 0.04. Once is not enough to know."""
    base = load_hardware("dgx-h100")
    outputs = [
        log(times={size: f"{float(time) * by:.5f}" for size, time in TIMES.items()}) for by in (0.96, 1, 1.04)
    ]
    found = fit_bus(parse_nccl("".join(outputs).replace("31.00", "  N/A"), "log.txt"), base)
    factor = found.constants.scale_up_efficiency
    assert factor is not None
    assert factor.value == 1.0
    assert factor.one_sigma == pytest.approx(1.4826 * 0.04, rel=0.03)
    once = fit_bus(parse_nccl(log().replace("31.00", "  N/A"), "log.txt"), base)
    assert once.constants.scale_up_efficiency is None


def test_times_in_place_are_a_second_measurement() -> None:
    """In place 3 % slower for every size: one sigma of a single time is that over the root of two, robust."""
    both = log()
    for time in TIMES.values():
        both = both.replace(
            f"{time:>8}    0.00    0.00      0    31.00",
            f"{time:>8}    0.00    0.00      0 {float(time) * 1.03:8.4f}",
        )
    factor = fit_bus(parse_nccl(both, "log.txt"), load_hardware("dgx-h100")).constants.scale_up_efficiency
    assert factor is not None
    assert factor.one_sigma == pytest.approx(1.4826 * 0.0296 / 2**0.5, rel=0.01)


def test_several_nodes_say_the_network() -> None:
    """Two nodes' ring of large messages gives the efficiency of the network; an odd number of ranks gives none."""
    base = load_hardware("dgx-h100")
    rate = 8 * base.scale_out.bandwidth_bytes_per_s * base.scale_out.efficiency * 0.5
    times = {size: f"{2 * 15 / 16 * size / rate * 1e6:.6f}" for size in SIZES}
    found = fit_bus(parse_nccl(log(number=16, times=times), "log.txt"), base)
    assert found.constants.scale_out_efficiency is not None
    assert found.constants.scale_out_efficiency.value == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(InvalidInputError, match="12 ranks"):
        fit_bus(parse_nccl(log(number=12), "log.txt"), base)


TAGS = {
    "mpirun -prepend-rank": "[0]",
    "mpirun --tag-output": "[1,0]<stdout>:",
    "mpirun --tag-output, later": "[1,0]<stdout>: ",
    "srun --label": "0: ",
    "srun --label of many": " 0: ",
    "pdsh": "node-17: ",
    "a time": "[2026-01-31 12:00:00] ",
    "torchrun": "[default0]:",
}


@pytest.mark.parametrize("tag", TAGS.values(), ids=TAGS)
@pytest.mark.parametrize("program", ["all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "alltoall_perf"])
def test_tags_of_a_launcher_change_nothing(tag: str, program: str) -> None:
    """An output whose lines a launcher has tagged is read as without the tags."""
    plain = log(program)
    text = "".join(f"{tag}{line}\n" for line in plain.splitlines())
    assert is_nccl_log(text)
    assert parse_nccl(text, "log.txt") == parse_nccl(plain, "log.txt")


def test_a_tag_within_a_line_is_no_number() -> None:
    """Where the program wrote a row in two parts, mpirun has tagged both."""
    text = "".join(f"[0]{line}\n" for line in log().replace("      -1 ", "      -1[0] ").splitlines())
    assert "-1[0]" in text
    assert parse_nccl(text, "log.txt") == parse_nccl(log(), "log.txt")


@pytest.mark.parametrize(("tag", "other"), [("0: ", "8: "), ("[1,0]<stdout>:", "[1,8]<stdout>:"), ("[0]", "[8]")])
def test_rows_of_several_ranks_in_one_table_are_refused(tag: str, other: str) -> None:
    """Two runs whose tables are mixed name both ranks; one after the other they are two tables."""
    one, two = ([f"{label}{line}" for line in log().splitlines()] for label in (tag, other))
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    with pytest.raises(InvalidInputError, match=r"rows of .*0.*8.* are mixed in one table"):
        parse_nccl(mixed, "log.txt")
    assert len(parse_nccl("\n".join(one + two), "log.txt")) == 1


@pytest.mark.parametrize("cut", [25, 60, 80, 100])
@pytest.mark.parametrize("tag", ["", "0: ", "[1,0]<stdout>:"])
def test_torn_rows_are_refused(tag: str, cut: int) -> None:
    """A row that was cut, the rest of it on a line of its own, or a torn tag before it: the line is named."""
    lines = [f"{tag}{line}" for line in log().splitlines()]
    row = len(lines) - 5
    for torn in (lines[row][:cut], f"{lines[row][:cut]}\n{lines[row][cut:]}", f"[1,0]<std{lines[row]}"):
        with pytest.raises(InvalidInputError, match=f"log.txt:{row + 1}\\b"):
            parse_nccl("\n".join([*lines[:row], torn, *lines[row + 1 :]]), "log.txt")


@pytest.mark.parametrize(
    ("redop", "factor", "operation"),
    [("sum", 2 * 7 / 8, "all_reduce"), ("sum", 7 / 8, "reduce_scatter"), ("none", 7 / 8, None)],
)
def test_the_bandwidths_say_which_collective_it_was(redop: str, factor: float, operation: str | None) -> None:
    """Without the program's name the bus bandwidth over the algorithm's tells those apart that reduce; gathering
    and exchanging are alike, so that the name is asked for."""
    text = log("perf", redop=redop).replace("    0.00    0.00      0", f"  100.00  {100 * factor:.2f}      0")
    if operation is None:
        with pytest.raises(InvalidInputError, match="does not say which collective"):
            parse_nccl(text, "log.txt")
    else:
        assert [one.operation for one in parse_nccl(text, "log.txt")] == [operation]
