"""Arguments of a launcher as a mapping from flags to their values, for writing, checking and reading alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from milpplan.errors import InvalidInputError
from milpplan.launchers.megatron.flags import megatron_flags
from milpplan.problem.reading import shown

Values = tuple[str, ...]


@dataclass(slots=True)
class Arguments:
    """Flags that are given, by the first of their spellings, with their values (none for a switch).

    ``looked_at`` collects what has been asked for: what a reader never asks about did not enter what it returns.
    """

    values: Mapping[str, Values]
    looked_at: set[str] = field(default_factory=set)

    def given(self, flag: str) -> bool:
        """Whether the flag is there (a switch: whether it is thrown)."""
        self.looked_at.add(flag)
        return flag in self.values

    def texts(self, flag: str) -> Values:
        """The values; the default of the launcher's parser where the flag is not given."""
        if self.given(flag):
            return self.values[flag]
        default = megatron_flags()[flag].default
        return () if default is None else tuple(default.split())

    def text(self, flag: str) -> str | None:
        """The only value, or its default."""
        found = self.texts(flag)
        return found[0] if found else None

    def number(self, flag: str) -> int | None:
        """The only value as an integer, or its default."""
        found = self.text(flag)
        return None if found is None else int(found)

    def count(self, flag: str, otherwise: int) -> int:
        """The integer of a flag that has no default of its own."""
        found = self.number(flag)
        return otherwise if found is None else found

    def real(self, flag: str) -> float:
        """The only value as a float, or its default."""
        return float(self.text(flag) or 0.0)

    def needed(self, flag: str) -> int:
        """A positive integer that must be there.

        Raises:
            InvalidInputError: it is not.
        """
        found = self.number(flag)
        if found is None or found < 1:
            raise InvalidInputError(
                f"{flag} is {'missing' if found is None else found}.",
                "Expected a positive whole number: a plan cannot be told without it.",
                f"Give {flag}.",
            )
        return found

    def stated(self, flag: str) -> int:
        """A positive integer that the file must give: the parser's default is no size of anybody's model.

        Raises:
            InvalidInputError: it does not.
        """
        if not self.given(flag):
            raise InvalidInputError(
                f"{flag} is missing.",
                "Expected every size of the model: no default stands in for one.",
                f"Give {flag}.",
            )
        return self.needed(flag)


def checked(pairs: Iterable[tuple[str, Values]], source: str) -> tuple[Arguments, tuple[str, ...]]:
    """Arguments with the values that the parser admits, and the flags that it does not know. Of a flag that is
    given twice the last counts, as in Python's argparse.

    Raises:
        InvalidInputError: a value that the parser would refuse.
    """
    known, found, unknown = megatron_flags(), {}, []
    for name, values in pairs:
        if name not in known:
            unknown.append(" ".join((name, *values)))
            continue
        flag = known[name]
        wrong = flag.refusal(values)
        if wrong:
            raise InvalidInputError(
                f"{source}: {name} {wrong}.",
                f"Expected what Megatron-LM's parser takes, got {shown(' '.join((name, *values)))}.",
                f"Correct {name}.",
            )
        found[flag.name] = values
    return Arguments(found), tuple(unknown)
