"""Options of ``milpplan solve-lengths``, apart from the solver: a plain ``solve`` reads them, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from milpplan.cli import checks
from milpplan.cli import options as o
from milpplan.errors import InvalidInputError
from milpplan.problem.problem import MAX_SEQUENCE

if TYPE_CHECKING:
    from milpplan.lengths import SequenceRules

DEFAULT_ALIGNMENT: Final = 128


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Options about lengths; None where an option is not given."""

    lengths: o.Lengths = None
    """File of the lengths."""
    max_strategies: o.MaxStrategies = None
    """Maximum number of strategies in turn."""
    tokens_per_step: o.TokensPerStep = None
    """Tokens of the sequences that are taken from the file."""
    align: o.Align = None
    """Token quantum: lengths are padded to multiples of it."""
    padding: o.Padding = False
    """Pad the sequences of a micro-batch, instead of packing them."""
    mask: o.Mask = None
    """Attention mask: causal or full."""
    buckets: o.Buckets = None
    """Ends of buckets, with commas between them."""
    bucket_count: o.BucketCount = None
    """Number of buckets to choose."""
    baselines: o.Baselines = False
    """Price the rules of other planners."""
    side_by_side: o.SideBySide = None
    """Allow several degrees of context parallelism at once."""
    unlike_replicas: o.UnlikeReplicas = False
    """Allow heterogeneous replicas."""
    hetu: o.Hetu = None
    """Directory for the files of HotSPa's runtime."""
    seed: o.Seed = 1
    """Seed of lengths that are drawn."""

    @property
    def alignment(self) -> int:
        """Token quantum, given or by default."""
        return DEFAULT_ALIGNMENT if self.align is None else self.align

    @property
    def rules(self) -> SequenceRules:
        """Rules by which sequences form micro-batches, and their attention mask."""
        from milpplan.lengths import SequenceRules

        if self.mask not in (None, "causal", "full"):
            raise InvalidInputError(f"--mask is {self.mask}.", "Expected causal or full.", "Correct --mask.")
        return SequenceRules("full" if self.mask == "full" else "causal", self.padding)


def are_asked(asked: LengthOptions) -> bool:
    """Check the options about lengths, and tell whether a file is given.

    Raises:
        InvalidInputError: the other options are given without the file, or are no positive numbers.
    """
    options = {
        "--max-strategies": asked.max_strategies,
        "--tokens-per-step": asked.tokens_per_step,
        "--align": asked.align,
        "--bucket-count": asked.bucket_count,
    }
    given = [name for name, value in options.items() if value is not None]
    for name in given:
        from milpplan.lengths import MAX_SEQUENCES

        maximum = MAX_SEQUENCE * (MAX_SEQUENCES if name == "--tokens-per-step" else 1)
        checks.whole(str(options[name]), name, maximum)
    switches = {
        "--padding": asked.padding,
        "--mask": asked.mask,
        "--buckets": asked.buckets,
        "--baselines": asked.baselines,
        "--side-by-side": asked.side_by_side,
        "--turns-only": asked.side_by_side is False,
        "--unlike-replicas": asked.unlike_replicas,
        "--hetu": asked.hetu,
    }
    given += [name for name, value in switches.items() if value]
    if given and asked.lengths is None:
        raise InvalidInputError(
            f"{' and '.join(given)} is given without --lengths.",
            "Expected a file of lengths.",
            "Add --lengths FILE.",
        )
    return asked.lengths is not None
