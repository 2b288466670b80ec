"""The jobs of `benchmarks.lengths`: models and clusters, and the lengths of their sequences.

Real lengths are Wikipedia's: 512 sequences (those of data/length_groups.json), or 2,048, which hold longer ones
(data/wikipedia_lengths.json; both files name their source). The laws are fitted to the 512 and varied: log-normal
with its deviation times 0.8, 1 and 1.5, or its body with a Pareto tail of 5 % and the exponent given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.length_groups import data
from milpplan import Job, Problem, Space, Workload, load_hardware, load_model, workload_of
from milpplan.lengths.baselines import Degrees
from milpplan.lengths.tabled.problem import Int64Array
from milpplan.lengths.workload import LogNormal, Mixture, Pareto

MANY = Path(__file__).parent / "data" / "wikipedia_lengths.json"
ALIGNMENT, NUM_SEQUENCES, TAIL_SHARE = 128, 512, 0.05
K = 1024

PUBLISHED: dict[tuple[str, int], tuple[Degrees, ...]] = {
    ("llama2-7b", 16): ((2, 4, 2), (4, 4, 1), (16, 1, 1)),
    ("qwen3-32b", 32): ((1, 16, 2), (2, 8, 2), (4, 2, 4)),
}
"""HotSPa's (dp, tp, pp) at 32K for its 7B on 16 GPUs and its 32B on 32, the longest bucket first. Source:
ccchengff/HotSPa-AE 941a18d, hotspa/scripts/llama_hot_switch.sh, buckets c1."""


@dataclass(frozen=True, slots=True)
class Wikipedia:
    """Sequences of Wikipedia, from number ``first`` on."""

    number: int = NUM_SEQUENCES
    first: int = 0

    def __str__(self) -> str:
        name = "Wikipedia" if self.number == NUM_SEQUENCES else f"Wikipedia, {self.number:,} sequences"
        return f"{name} from {self.first + 1:,} on" if self.first else name

    def lengths(self) -> Int64Array:
        """Tokens, [n]."""
        if self.number == NUM_SEQUENCES and not self.first:
            return np.array(data()["steps"][0]["lengths"], dtype=np.int64)
        lengths = json.loads(MANY.read_text(encoding="utf-8"))["lengths"]
        return np.array(lengths[self.first : self.first + self.number], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormalLaw:
    """512 sequences of the log-normal law fitted to Wikipedia, its deviation times ``spread``."""

    spread: float = 1.0

    def __str__(self) -> str:
        return "log-normal" if self.spread == 1 else f"log-normal, deviation x {self.spread:g}"

    def lengths(self) -> Int64Array:
        """Tokens, [n]."""
        fitted = LogNormal.fitted(Wikipedia().lengths())
        return _drawn(Mixture(((1.0, LogNormal(fitted.mean_log, self.spread * fitted.sigma_log)),)))


@dataclass(frozen=True, slots=True)
class ParetoTail:
    """512 sequences with Wikipedia's log-normal body and a Pareto tail of another exponent."""

    tail: float

    def __str__(self) -> str:
        return f"Pareto tail {self.tail:g}"

    def lengths(self) -> Int64Array:
        """Tokens, [n]."""
        wikipedia = Wikipedia().lengths()
        edge = float(np.quantile(wikipedia, 1 - TAIL_SHARE))
        body = LogNormal.fitted(wikipedia[wikipedia <= edge])
        return _drawn(Mixture(((1 - TAIL_SHARE, body), (TAIL_SHARE, Pareto(edge, self.tail)))))


def _drawn(law: Mixture) -> Int64Array:
    return law.draw(NUM_SEQUENCES, np.random.default_rng(1))


Law = Wikipedia | LogNormalLaw | ParetoTail


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster, and sequences of a law, cut at ``longest``; ``context``: whether context parallelism
    is in the space (HotSPa's has none)."""

    model: str
    hardware: str
    num_gpus: int
    longest: int
    law: Law
    context: bool = True

    @property
    def job(self) -> str:
        """Model, cluster, and what is fixed."""
        return f"{self.model}, {self.num_gpus} x {self.hardware}{'' if self.context else ', cp = 1'}"

    @property
    def sequences(self) -> str:
        """The law and the longest length."""
        return f"{self.law}, to {self.longest // 1024}K"

    @property
    def problem(self) -> Problem:
        """The problem without its lengths."""
        return Problem(
            model=load_model(self.model),
            hardware=load_hardware(self.hardware),
            job=Job(num_gpus=self.num_gpus, global_batch_size=1, sequence_length=ALIGNMENT),
            # Without a margin of memory, as the tables that the jobs are compared with.
            space=Space(cp=None if self.context else (1,), memory_margin_fraction=0.0),
        )

    @property
    def workload(self) -> Workload:
        """Its sequences, from a fixed seed."""
        return workload_of(self.law.lengths(), ALIGNMENT, self.longest)

    @property
    def published(self) -> tuple[Degrees, ...]:
        """HotSPa's strategies for it, where there are some for sequences to 32K and more."""
        return PUBLISHED.get((self.model, self.num_gpus), ()) if self.longest >= 32 * K else ()


CASES = (
    Case("llama2-7b", "dgx-a100-80", 16, 32 * K, Wikipedia()),
    Case("llama2-7b", "dgx-a100-80", 16, 32 * K, Wikipedia(), context=False),
    Case("llama2-7b", "dgx-a100-80", 16, 8 * K, ParetoTail(3.0)),
    Case("llama2-7b", "dgx-a100-80", 16, 64 * K, ParetoTail(0.9)),
    Case("llama2-7b", "dgx-a100-80", 16, 64 * K, ParetoTail(0.9), context=False),
    Case("llama2-7b", "dgx-h100", 16, 16 * K, LogNormalLaw(0.8)),
    Case("llama2-7b", "dgx-h100", 16, 128 * K, ParetoTail(0.9)),
    Case("llama2-7b", "dgx-h100", 16, 128 * K, ParetoTail(0.9), context=False),
    Case("llama2-7b", "dgx-h100", 64, 128 * K, Wikipedia(2048)),
    Case("llama2-13b", "dgx-a100-80", 32, 32 * K, Wikipedia()),
    Case("llama2-13b", "dgx-a100-80", 64, 64 * K, LogNormalLaw()),
    Case("llama2-13b", "dgx-h100", 32, 128 * K, ParetoTail(0.9)),
    Case("llama-33b", "dgx-a100-80", 32, 16 * K, Wikipedia()),
    Case("llama-33b", "dgx-a100-80", 64, 64 * K, LogNormalLaw(1.5)),
    Case("qwen3-32b", "dgx-h100", 32, 32 * K, Wikipedia()),
    Case("qwen3-32b", "dgx-h100", 64, 128 * K, ParetoTail(0.9)),
    Case("llama-33b", "dgx-h100", 32, 32 * K, Wikipedia()),
    Case("llama-33b", "dgx-a100-80", 64, 32 * K, Wikipedia()),
    Case("llama-33b", "dgx-h100", 64, 128 * K, Wikipedia(2048)),
    Case("llama2-7b", "dgx-a100-80", 16, 32 * K, Wikipedia(128)),
    Case("llama2-13b", "dgx-h100", 32, 32 * K, Wikipedia(128)),
    Case("llama-33b", "dgx-a100-80", 32, 32 * K, Wikipedia(128)),
    # Of heavy tails on deep pipelines, which are the hardest to prove.
    Case("llama-33b", "dgx-a100-80", 32, 64 * K, ParetoTail(0.9), context=False),
)
