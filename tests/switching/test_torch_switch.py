"""Real tensors over torch.distributed; needs the extra ``profile``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "switch_torch.py"


@pytest.mark.long
@pytest.mark.parametrize(("processes", "senders"), [(8, "exact"), (8, "relay"), (16, "nearest"), (16, "relay")])
def test_a_real_model_travels_through_layouts(processes: int, senders: str) -> None:
    """Eight and sixteen processes move parameters and gradients through four switches, bit by bit what each of
    them has to hold; the loss afterwards is the same."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--processes", str(processes), "--senders", senders],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{processes} of {processes} ranks hold exactly their slices") == 8
    assert "equal" in done.stdout
