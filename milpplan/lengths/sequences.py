"""Rules and checks of a step's sequences, and the buckets that they are padded to.

 - *mask*: causal, or full (every query attends to all keys of its sequence, as in encoders and diffusion models).
   A full mask doubles the work of attention, at the rates of causal kernels; nothing else changes.
 - *packed* or *padded*: a packed micro-batch has sequences of any lengths one after another; a padded one is a
   rectangle, whose sequences all have the length of their bucket's end. Padding is computed and communicated like
   any token, attention included.

Rectangles are packings, so lower bounds of packings hold for them, too (``cost_tables``); ``strategy_tables``
makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milpplan.errors import InvalidInputError
from milpplan.lengths.records import SequenceRules
from milpplan.lengths.workload import (
    Workload,
    optimal_buckets,
    padded,
)
from milpplan.optimize.milp.backends import AUTO, backend_names
from milpplan.problem import ModelSpec, Problem
from milpplan.problem.problem import MAX_SEQUENCE
from milpplan.problem.reading import shown
from milpplan.simulation import FloatArray, IntArray
from milpplan.simulation.layers import model_flops_per_token

MAX_SEQUENCES = 8192
"""Maximum number of sequences of a step, as every one is packed."""


def check_rules(
    problem: Problem,
    rules: SequenceRules,
    baselines: bool,
    side_by_side: bool = False,
    unlike_replicas: bool = False,
) -> None:
    """Refuse rules that the problem, the baselines, degrees side by side or heterogeneous replicas do not support.

    Raises:
        InvalidInputError: the mask does not exist, a full one meets sliding windows, or sequences are padded with
            baselines, degrees side by side or heterogeneous replicas, which pack.
    """
    if rules.mask not in ("causal", "full"):
        raise InvalidInputError(f"The mask is {rules.mask!r}.", "Expected causal or full.", "Correct the rules.")
    windows = [kind.attention for kind in problem.model.kinds if getattr(kind.attention, "sliding_window", None)]
    if rules.mask == "full" and (windows or problem.model.has_indexers):
        raise InvalidInputError(
            f"{problem.model.name} has layers with a sliding window or an indexer, and the mask is full.",
            "Expected layers that attend to whole sequences: a window's keys are those before a query.",
            "Leave the mask causal.",
        )
    if rules.mask == "full" and any(kind.attention.type == "recurrence" for kind in problem.model.kinds):
        raise InvalidInputError(
            f"{problem.model.name} has layers with a linear recurrence, and the mask is full.",
            "Expected layers that attend to whole sequences: a recurrence sees the tokens before.",
            "Leave the mask causal.",
        )
    if rules.padded and baselines:
        raise InvalidInputError(
            "Baselines are asked for, and sequences are padded.",
            "Expected packed ones: HotSPa's and FlexSP's rules pack.",
            "Leave out one of them.",
        )
    if rules.padded and unlike_replicas:
        raise InvalidInputError(
            "Unlike replicas are asked for, and sequences are padded.",
            "Expected packed ones: what replicas do at most is proved of packed micro-batches.",
            "Leave out one of them.",
        )
    if rules.padded and side_by_side:
        raise InvalidInputError(
            "Degrees side by side are asked for, and sequences are padded.",
            "Expected packed ones: a team's micro-batches hold sequences of several lengths.",
            "Leave out one of them.",
        )


def sequence_flops(model: ModelSpec, lengths: IntArray, mask: str = "causal") -> FloatArray:
    """Return the model FLOPs of one sequence of each length, forward and backward, [n].

    ``simulation.layers.flops`` has the formula. A full mask has as many keys per query as a causal one of twice
    the length (without windows).
    """
    factor = 2 if mask == "full" else 1
    return np.array([length * model_flops_per_token(model, factor * length) for length in lengths.tolist()])


def least_padding(model: ModelSpec, workload: Workload, num_buckets: int, mask: str = "causal") -> IntArray:
    """Return the ends of at most ``num_buckets`` buckets with the fewest FLOPs of sequences padded to them."""
    flops = sequence_flops(model, workload.lengths, mask)
    return optimal_buckets(workload.lengths, workload.counts, flops, num_buckets)


def bucketed(workload: Workload, ends: Sequence[int] | IntArray, alignment: int) -> Workload:
    """Return the sequences, each as long as the end of its bucket.

    Raises:
        InvalidInputError: the ends do not rise, are no multiples of the alignment, or are below the longest.
    """
    rising = np.asarray(ends, dtype=np.int64)
    if not len(rising) or (np.diff(rising, prepend=0) <= 0).any() or (rising % alignment).any():
        raise InvalidInputError(
            f"Buckets end at {rising.tolist()}.",
            f"Rising multiples of the alignment, {alignment}, expected.",
            "Correct the ends, or the alignment.",
        )
    distinct, where = np.unique(padded(workload.lengths, rising), return_inverse=True)
    counts = np.bincount(where, workload.counts).astype(np.int64)
    return Workload(distinct.astype(np.int64), counts)


def check_search(max_strategies: int, gap: float, time_limit_s: float, backend: str) -> None:
    """Refuse invalid parameters of a search.

    Raises:
        InvalidInputError: the number of strategies, the gap, the time limit or the solver is invalid.
    """
    if not (isinstance(max_strategies, (int, np.integer)) and max_strategies >= 1):
        raise InvalidInputError(
            f"max_strategies is {max_strategies!r}.", "Expected a whole number of at least 1.", "Correct it."
        )
    if not (0.0 <= gap < 1.0 and time_limit_s >= 0.0):
        raise InvalidInputError(
            f"The gap is {gap}, the time limit {time_limit_s} s.",
            "Expected a share from 0 to below 1, and no negative time.",
            "Correct them.",
        )
    if backend not in (AUTO, *backend_names()):
        raise InvalidInputError(
            f"The backend is {shown(backend)}.",
            f"Expected one of {', '.join((AUTO, *backend_names()))}.",
            "Give one of these names.",
        )


def check_step(problem: Problem, workload: Workload, alignment: int) -> None:
    """Refuse an invalid workload.

    Raises:
        InvalidInputError: lengths do not rise or are not aligned, a length has no sequences, or there are too many
            or too long sequences.
    """
    lengths, counts = workload.lengths, workload.counts
    if not (lengths.shape == counts.shape == (counts.size,) and counts.size and counts.min() > 0):
        raise InvalidInputError(
            f"The workload has {counts.tolist()[:8]} sequences of {lengths.tolist()[:8]} tokens.",
            "Expected at least one of every length.",
            "Make the workload with workload_of.",
        )
    if lengths[0] < 1 or (np.diff(lengths) <= 0).any() or (lengths % alignment).any():
        raise InvalidInputError(
            f"Lengths are no rising multiples of {alignment}: {lengths.tolist()[:8]}.",
            "Expected aligned lengths, each once.",
            "Make the workload with workload_of and the same alignment.",
        )
    longest = int(lengths[-1])
    if workload.num_sequences > MAX_SEQUENCES:
        raise InvalidInputError(
            f"The step has {workload.num_sequences:,} sequences.",
            f"Expected at most {MAX_SEQUENCES:,}: every one is packed.",
            "Say how many sequences a step has (--global-batch), or how many tokens.",
        )
    check_longest(problem, longest)


def check_longest(problem: Problem, longest: int) -> None:
    """Refuse sequences beyond the maximum length.

    Raises:
        InvalidInputError: the length exceeds the limit or the model's positions.
    """
    if longest > MAX_SEQUENCE:
        raise InvalidInputError(
            f"The longest sequence has {longest:,} tokens.",
            f"Expected at most {MAX_SEQUENCE:,}.",
            "Cut sequences with --seq-len.",
        )
    if problem.model.learned_positions and longest > problem.model.max_position_embeddings:
        raise InvalidInputError(
            f"The longest sequence has {longest:,} tokens; {problem.model.name} has "
            f"{problem.model.max_position_embeddings:,} learned positions.",
            "Expected no longer sequences.",
            "Cut them with --seq-len.",
        )


def checked_batch(lengths: Sequence[int] | IntArray, longest: int, do: str) -> IntArray:
    """Return the lengths of a batch, [n].

    Raises:
        InvalidInputError: there are no sequences, the lengths are no row of whole numbers, or one is empty or
            longer than ``longest``; ``do`` is the advice in the message.
    """
    try:
        given = np.asarray(lengths)
    except ValueError:
        given = np.array(None)
    expected = f"At least one expected, of 1 to {longest:,} tokens each."
    if given.ndim == 1 and not given.size:
        raise InvalidInputError("The batch has no sequences.", expected, do)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidInputError(
            f"The batch's lengths are of type {given.dtype}, in {given.ndim} dimensions.",
            f"A row of whole numbers from 1 to {longest:,} expected.",
            "Give lengths in tokens, one a sequence.",
        )
    minimum, maximum = int(given.min()), int(given.max())
    if minimum < 1 or maximum > longest:
        raise InvalidInputError(
            f"The batch has {given.size} sequences of {minimum:,} to {maximum:,} tokens.", expected, do
        )
    return given.astype(np.int64)
