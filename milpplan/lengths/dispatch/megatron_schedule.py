"""Steps of degrees side by side in Megatron-LM's hybrid context parallelism.

The runtime (``--hybrid-context-parallel``) runs the sequences of a global batch under context parallelism of
different degrees on different ranks at the same time. Its scheduler maps pairs (identifier, length) to *groups*:
for every rank of data and context parallelism the sequences that it runs, one after another. A sequence runs on
all ranks that list it. ``HybridSchedule`` plans these lists by ``TeamBatches``, and ``files`` writes a scheduler
that takes the place of the runtime's, the step that it follows and the arguments that belong to it.

What the runtime cannot do, a step for it leaves out:

 - Every sequence is a micro-batch of its own. ``HybridSchedule.times_s`` has the price.
 - One recompute setting holds for all, so the space must have one.
 - No pipelines, no attention with compressed keys and values (MLA).
 - Every rank must run a sequence in the last group. A batch with too few sequences is left to its own scheduler.

**One group.** The runtime separates groups by barriers, because ranks that change their partners may wait for each
other for ever. Here teams nest, and every rank runs its sequences by falling degree, in one order for all ranks.
So of all sequences that are not done the first one is next on all of its ranks, and one group is enough.

Source: NVIDIA/Megatron-LM core_v0.19.0, megatron/core/pipeline_parallel/hybrid_cp_schedule.py
(BalancedCPScheduler, hybrid_context_parallel_forward_backward), megatron/core/datasets/data_schedule.py
(HybridCPDataLoaderWrapper), megatron/training/arguments.py (validate_args).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths.dispatch import TeamBatches
from milpplan.lengths.records import LengthsResult, RanStep
from milpplan.lengths.side_by_side.teams import Family, TeamStep, Turn, simulate_turns
from milpplan.problem import LatentAttention, Problem
from milpplan.simulation import IntArray
from milpplan.units import NS_PER_S

_PROGRAM: Final = '''"""Megatron-LM's hybrid context parallelism by a step of milpplan, which trainers need.

    torchrun ... hybrid_cp.py pretrain_gpt.py ARGUMENTS

runs pretrain_gpt.py (or another program of Megatron-LM) with a scheduler that follows step.json.
"""

import runpy
import sys
from pathlib import Path

from megatron.core.datasets import data_schedule

from milpplan.lengths.dispatch import HybridSchedule
from milpplan.reports.chrome_trace import lengths_in

_STEP = lengths_in(Path(__file__).with_name("step.json"))
SCHEDULE = HybridSchedule(_STEP.problem, _STEP.ran)


class PlannedCPScheduler(data_schedule.BalancedCPScheduler):
    """Scheduler that follows the step; batches that it cannot plan are left to Megatron-LM's own."""

    def get_groups_and_subsamples(self, sample_id_seqlens, config):
        """Return the lengths and the identifiers of the sequences of every group and rank."""
        if self.total_hdp_gpus != SCHEDULE.num_ranks:
            raise ValueError(
                f"There are {self.total_hdp_gpus} ranks of data and context parallelism; the step has "
                f"{SCHEDULE.num_ranks}. Solve for this cluster, or start as many."
            )
        ranks = SCHEDULE.ranks(sample_id_seqlens)
        if ranks is None:
            return super().get_groups_and_subsamples(sample_id_seqlens, config)
        lengths = dict(sample_id_seqlens)
        return [[[lengths[sample] for sample in rank] for rank in ranks]], [ranks]


data_schedule.BalancedCPScheduler = PlannedCPScheduler

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
'''


class HybridSchedule:
    """Schedules of batches on the ``num_ranks`` ranks of data and context parallelism of a step."""

    def __init__(self, problem: Problem, step: LengthsResult | RanStep) -> None:
        """Prepare the tables.

        Args:
            problem: the problem that was solved.
            step: its result, or ``LengthsFile.ran`` of a file of it.

        Raises:
            InvalidInputError: the step is none of degrees side by side, or the runtime refuses the problem.
        """
        check_runtime(problem)
        if step.beside != "degrees side by side":
            raise InvalidInputError(
                "The step has no degrees side by side.",
                "Expected several degrees of context parallelism at once: nothing else needs this runtime.",
                "Export a plan of milpplan solve.",
            )
        self.batches = TeamBatches(problem, step)

    @property
    def family(self) -> Family:
        """Degrees of the step's tensor parallelism."""
        return self.batches.family

    @property
    def num_ranks(self) -> int:
        """Ranks of data and context parallelism."""
        return self.family.num_slots

    def ranks(self, samples: Sequence[tuple[int, int]]) -> list[list[int]] | None:
        """Plan a batch.

        Args:
            samples: identifier and tokens of every sequence.

        Returns:
            The identifiers of the sequences of every rank, in the order in which they run; None if a sequence is
            longer than the step's strategies hold, or if there are too few for all ranks.
        """
        tokens = np.array([length for _, length in samples], dtype=np.int64)
        if not len(tokens) or tokens.min() < 1 or tokens.max() > self.batches.longest:
            return None
        step, places = self.batches.step_of(self._padded(tokens))
        waiting = {
            int(place): np.flatnonzero(places == place)[::-1].tolist() for place in np.unique(places).tolist()
        }
        ranks: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for turn in sorted(step.turns, key=lambda turn: (-_size(step, turn), turn.team, turn.member)):
            slots = step.family.slots(turn)
            for place in np.repeat(np.arange(turn.packed.shape[1]), turn.packed.sum(axis=0))[::-1].tolist():
                sample = samples[waiting[place].pop()][0]
                for rank in range(slots.start, slots.stop):
                    ranks[rank].append(sample)
        return ranks if all(ranks) else None

    def times_s(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Return the step time of a batch of sequences of ``lengths`` tokens in seconds: with the micro-batches
        that were planned, and with a micro-batch for each sequence, as the runtime has them."""
        step, _ = self.batches.step_of(self._padded(np.array(lengths, dtype=np.int64)))
        alone = []
        for turn in step.turns:
            places = np.repeat(np.arange(turn.packed.shape[1]), turn.packed.sum(axis=0))
            alone.append(replace(turn, packed=np.eye(turn.packed.shape[1], dtype=np.int64)[places]))
        return step.time_ns / NS_PER_S, simulate_turns(step.family, alone).time_ns / NS_PER_S

    def files(self, step_document: str) -> dict[str, str]:
        """Return the files of the export by name; ``step_document`` is the solved step (``--out``)."""
        return {
            "step.json": step_document,
            "hybrid_cp.py": _PROGRAM,
            "arguments.txt": " ".join(self.arguments) + "\n",
        }

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of Megatron-LM that belong to the step, beside those of model, data and optimizer."""
        family = self.family
        layout = family.pool.members[family.members[0]].candidate.layout
        quantum = family.pool.load.token_quantum
        tokens = [
            family.max_quanta(member) * quantum // degree
            for member, degree in zip(family.members, family.degrees, strict=True)
        ]
        recompute = {
            "none": (),
            "selective": ("--recompute-granularity", "selective"),
            "full": (
                "--recompute-granularity",
                "full",
                "--recompute-method",
                "uniform",
                "--recompute-num-layers",
                "1",
            ),
        }[family.pool.members[family.members[0]].candidate.recompute]
        return (
            *("--tensor-model-parallel-size", str(layout.tp)),
            *("--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"),
            *(("--sequence-parallel",) if layout.sequence_parallel else ()),
            *(("--use-distributed-optimizer",) if layout.zero_stage else ()),
            *("--micro-batch-size", "1", "--dataloader-type", "single", "--calculate-per-token-loss"),
            *("--hybrid-context-parallel", "--max-seqlen-per-dp-cp-rank", str(min(tokens))),
            *recompute,
        )

    def _padded(self, tokens: IntArray) -> IntArray:
        return -(-tokens // self.batches.alignment) * self.batches.alignment


def check_runtime(problem: Problem) -> None:
    """Refuse problems whose steps the runtime cannot run.

    Raises:
        InvalidInputError: attention with compressed keys and values, or several recompute settings.
    """
    if any(isinstance(run.attention, LatentAttention) for run in problem.model.layers):
        raise InvalidInputError(
            f"{problem.model.name} has multi-head latent attention.",
            "Expected other attention: Megatron-LM refuses it with hybrid context parallelism.",
            "Leave --megatron out.",
        )
    if len(problem.recompute_modes) > 1:
        raise InvalidInputError(
            f"The space has the recompute settings {', '.join(problem.recompute_modes)}.",
            "Expected one: Megatron-LM has one for all micro-batches.",
            "Solve with --fix recompute=none, selective or full.",
        )


def _size(step: TeamStep, turn: Turn) -> int:
    """Return the number of ranks of a turn's team."""
    return step.family.pool.members[turn.member].candidate.layout.cp
