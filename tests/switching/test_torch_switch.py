"""Real tensors over torch.distributed; needs the extra ``profile``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "switch_torch.py"


@pytest.mark.long
@pytest.mark.parametrize("senders", ["exact", "relay"])
def test_a_real_model_travels_through_layouts(senders: str) -> None:
    """Eight processes move parameters and gradients through four switches; the loss afterwards is the same."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--senders", senders], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 of 8 ranks hold exactly their slices") == 8
    assert "equal" in done.stdout
