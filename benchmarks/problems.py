"""The problems that the benchmarks measure, with the source of every batch and sequence length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milpplan import Job, Problem, load_hardware, load_model
from milpplan.problem.problem import SPACES

Kind = Literal["uniform", "free", "any"]
"""Spaces as `milpplan solve --space` names them; "any": free, with interleaved chunks of any size."""


@dataclass(frozen=True, slots=True)
class Case:
    """One planning problem by the names of its presets. Batches count sequences."""

    name: str
    model: str
    hardware: str
    num_gpus: int
    global_batch_size: int
    sequence_length: int

    def problem(self, kind: Kind) -> Problem:
        """The problem in one of the spaces, all else at its default (bf16, flash attention, ZeRO 0-3)."""
        return Problem(
            model=load_model(self.model),
            hardware=load_hardware(self.hardware),
            job=Job(
                num_gpus=self.num_gpus,
                global_batch_size=self.global_batch_size,
                sequence_length=self.sequence_length,
            ),
            space=SPACES[kind],
        )

    def text(self) -> str:
        """The problem in words for a table."""
        return f"{self.model}, {self.num_gpus:,} GPUs ({self.hardware})"


CASES = {
    case.name: case
    for case in (
        # Narayanan et al. 2021 (arXiv 2104.04473) section 5.1: 1,024 A100, batch 1,536 of 2,048 tokens.
        Case("gpt3-1k", "gpt3-175b", "dgx-a100-80", 1024, 1536, 2048),
        # Our choice: the same batch on four times the GPUs.
        Case("gpt3-4k", "gpt3-175b", "dgx-a100-80", 4096, 1536, 2048),
        # Llama 3 (arXiv 2407.21783) table 4: 16,384 H100, 16M tokens a batch of 8,192-token sequences.
        Case("llama3-16k", "llama3-405b", "dgx-h100", 16384, 2048, 8192),
        # Our choice: two sequences of 4,096 tokens a GPU.
        Case("mixtral-512", "mixtral-8x22b", "dgx-h100", 512, 1024, 4096),
        # DeepSeek-V3 (arXiv 2412.19437) sections 3.1 and 4.2: 2,048 GPUs (H800 there), batch 15,360 of 4,096.
        Case("deepseek-2k", "deepseek-v3", "dgx-h100", 2048, 15360, 4096),
    )
}
