"""Ranges of numbers of micro-batches that a program for pipelines covers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Minimum and maximum number of micro-batches ahead of one micro-batch, and behind it.

    On an ``open`` side the outermost micro-batch stands for any number, at least one, of which only the work on
    the last stage counts.
    """

    ahead: tuple[int, int]
    behind: tuple[int, int]
    open: tuple[bool, bool] = (False, False)

    @staticmethod
    def of(first: int, last: int) -> Window:
        """Return the window of ``first`` to ``last`` micro-batches, around the first."""
        return Window((0, 0), (first - 1, last - 1))

    @property
    def number(self) -> int:
        """Maximum number of micro-batches, those of an open side as one."""
        return self.ahead[1] + self.behind[1] + 1

    @property
    def merged(self) -> list[int]:
        """Indices of micro-batches that stand for any number of micro-batches."""
        return [index for index, is_open in zip((0, self.number - 1), self.open, strict=True) if is_open]

    @property
    def fewest(self) -> int:
        """Minimum number of micro-batches."""
        return self.ahead[0] + self.behind[0] + 1

    @property
    def there(self) -> tuple[int, int]:
        """Indices of the first micro-batch that is present for sure, and of the first after the last such."""
        return self.ahead[1] - self.ahead[0], self.ahead[1] + self.behind[0] + 1
