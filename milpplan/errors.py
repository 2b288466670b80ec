"""Errors a user can cause, each saying what was seen, what was expected and what to do."""

from __future__ import annotations


class MilpplanError(Exception):
    """Base of every error that a user's input can cause.

    Args:
        seen: what is wrong, with the values seen.
        expected: what was expected instead.
        do: what the user can do about it.
    """

    def __init__(self, seen: str, expected: str = "", do: str = "") -> None:
        self.seen = seen
        self.expected = expected
        self.do = do
        super().__init__(" ".join(part for part in (seen, expected, do) if part))


class UnknownNameError(MilpplanError):
    """A model, hardware, backend or switch name that does not exist."""


class InvalidInputError(MilpplanError):
    """A file, number or option that cannot be read or makes no sense."""


class IllegalPlanError(MilpplanError):
    """A plan or layout that breaks a rule of the space; the rule is named in the message."""


class InfeasibleError(MilpplanError):
    """Proved: no plan of the declared space satisfies the request."""


class SolverError(MilpplanError):
    """A solver failed, is missing, or gave an answer that the exact re-check refutes."""


class UnavailableError(SolverError):
    """A solver, or a process that works for one, could not run here; another one may."""
