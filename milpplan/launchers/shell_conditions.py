"""Which branch of a shell's ``if`` is taken, where the file itself says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from milpplan.launchers.shell_marks import unknown_in


class Branch(IntEnum):
    """Whether commands run: surely, perhaps (a condition or a loop), never."""

    RUNS = 0
    MAY_RUN = 1
    DEAD = 2


def condition(words: Sequence[str]) -> bool | None:
    """The truth of ``[ a = b ]``, ``[[ a != b ]]``, ``[ -z a ]`` or ``[ -n a ]``; None where it is not known."""
    if not words or (words[0], words[-1]) not in (("[", "]"), ("[[", "]]")):
        return None
    inner = list(words[1:-1])
    if any(unknown_in(word) for word in inner):
        return None
    if len(inner) == 2 and inner[0] in ("-z", "-n"):
        return (inner[1] == "") == (inner[0] == "-z")
    if len(inner) != 3 or "*" in inner[2]:
        return None
    equal = {"=": True, "==": True, "!=": False}
    if inner[1] in equal:
        return (inner[0] == inner[2]) == equal[inner[1]]
    numbers = {"-eq": 0, "-ne": 0, "-gt": 1, "-ge": 1, "-lt": -1, "-le": -1}
    if inner[1] not in numbers or not (inner[0].isdigit() and inner[2].isdigit()):
        return None
    sign = (int(inner[0]) > int(inner[2])) - (int(inner[0]) < int(inner[2]))
    if inner[1] == "-ne":
        return sign != 0
    return sign == numbers[inner[1]] or (sign == 0 and inner[1] in ("-ge", "-le"))


@dataclass(slots=True)
class _Block:
    is_if: bool
    branch: Branch = Branch.MAY_RUN
    testing: bool = False
    truth: bool | None = None
    """Of the test, as far as it has been read."""
    tested: bool = False
    taken: bool | None = False
    """Whether an earlier branch was taken; None: perhaps."""


@dataclass(slots=True)
class Blocks:
    """The conditions and loops that are open at a place of a script."""

    open: list[_Block] = field(default_factory=list)

    @property
    def branch(self) -> Branch:
        """Whether commands here run."""
        return max((block.branch for block in self.open), default=Branch.RUNS)

    def keyword(self, word: str) -> None:
        """Enter, go on in, or leave a block."""
        if word in ("if", "for", "while", "until", "case", "select"):
            self.open.append(_Block(is_if=word == "if", testing=word == "if"))
        elif word in ("fi", "done", "esac"):
            del self.open[-1:]
        elif self.open and self.open[-1].is_if:
            self._next(self.open[-1], word)

    def command(self, words: Sequence[str], operator: str) -> None:
        """A command; between ``if`` and ``then`` it is the test, or a part of it after && or ||."""
        if not self.open or not self.open[-1].testing:
            return
        block, truth = self.open[-1], condition(words)
        if not block.tested or operator not in ("&&", "||"):
            # The last of several commands decides.
            block.truth = truth
        else:
            decisive = operator == "||"
            both = (block.truth, truth)
            block.truth = decisive if decisive in both else None if None in both else not decisive
        block.tested = True

    @staticmethod
    def _next(block: _Block, word: str) -> None:
        if word == "elif":
            block.testing, block.tested, block.branch = True, False, Branch.MAY_RUN
        elif word in ("then", "else"):
            truth = True if word == "else" else block.truth
            block.testing = False
            if block.taken or truth is False:
                block.branch = Branch.DEAD
            elif block.taken is None or truth is None:
                block.branch, block.taken = Branch.MAY_RUN, None
            else:
                block.branch, block.taken = Branch.RUNS, True
