"""Galvatron's own search and milpplan's proof of the same cases, in turns in one run.

    python -m benchmarks.galvatron CHECKOUT --python PYTHON [--case G1 G5 ...]

CHECKOUT: a checkout of github.com/PKU-DAIR/Hetu-Galvatron at cea12ff. PYTHON: an interpreter with torch, triton,
numpy below 2, scipy, rich, pydantic, einops, hydra-core, transformers 4.49, and the checkout's csrc/dp_core.cpp
compiled as ``galvatron_dp_core``. No GPU is needed. Each search and each proof is a process of its own. The
seconds of Galvatron are those of its search alone, milpplan's those of the whole process with the start of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown_table

ADAPTER = Path(__file__).parents[1] / "examples" / "adapters" / "galvatron.py"
CASES = ADAPTER.with_name("galvatron_cases.json")
SEARCH = Path(__file__).with_name("galvatron_search.py")


@dataclass(frozen=True, slots=True)
class Measured:
    """Step and bound in seconds, and what finding them took."""

    step_s: float
    bound_s: float | None
    cpu_s: float
    wall_s: float


def their_search(checkout: Path, python: str, inputs: dict[str, Any]) -> Measured:
    """Galvatron's search of one case.

    Args:
        checkout: Its checkout.
        python: An interpreter that can run it.
        inputs: What ``examples/adapters/galvatron_cases.json`` holds of the case.

    Returns:
        Its best step; no bound, for it proves none.

    Raises:
        SystemExit: If its search fails.
    """
    with tempfile.TemporaryDirectory() as work:
        command = [python, str(SEARCH), str(checkout.resolve()), work, json.dumps(inputs)]
        ran = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"Galvatron's search failed:\n{ran.stderr[-2000:]}")
    told = json.loads(ran.stdout.splitlines()[-1])
    return Measured(told["step_s"], None, told["cpu_s"], told["wall_s"])


def our_proof(name: str) -> Measured:
    """milpplan's proof of one case by the adapter, a process of its own."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run([sys.executable, str(ADAPTER), name], capture_output=True, text=True, check=True)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    step, bound = ran.stdout.split(": ", 1)[1].split(" s a step, bound ")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(float(step), float(bound.split(";")[0]), cpu_s, wall_s)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description="Galvatron's search and milpplan's proof, in turns.")
    parser.add_argument("checkout", type=Path, help="a checkout of Hetu-Galvatron")
    parser.add_argument("--python", required=True, help="an interpreter that can run its search")
    parser.add_argument("--case", nargs="+", default=[], help="cases whose names begin so (default: all)")
    chosen = parser.parse_args(argv)
    rows = []
    for case in json.loads(CASES.read_text(encoding="utf-8"))["cases"]:
        name = case["case"]
        if chosen.case and not name.startswith(tuple(chosen.case)):
            continue
        theirs, ours = their_search(chosen.checkout, chosen.python, case["inputs"]), our_proof(name)
        rows.append(
            [
                name,
                f"{theirs.step_s:.5f}",
                f"{theirs.cpu_s:.1f} s ({theirs.wall_s:.1f} s)",
                f"{ours.step_s:.5f}",
                f"{ours.bound_s:.5f}",
                f"{ours.cpu_s:.1f} s ({ours.wall_s:.1f} s)",
                f"{theirs.cpu_s / ours.cpu_s:.1f}",
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    header = ["case", "Galvatron, s a step", "its search, CPU (wall)", "milpplan, s a step", "bound"]
    print(markdown_table([*header, "CPU (wall)", "ratio of CPU"], rows))
    print(f"\n{os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
