"""Which numbers of micro-batches a program for pipelines covers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Numbers of micro-batches ahead of one of them, and behind it: the least and the most of each.

    On a side that is ``open`` the outermost one stands for any number, one at least, of whose work just that on
    the last stage counts."""

    ahead: tuple[int, int]
    behind: tuple[int, int]
    open: tuple[bool, bool] = (False, False)

    @staticmethod
    def of(first: int, last: int) -> Window:
        """From ``first`` to ``last`` micro-batches: behind the first one."""
        return Window((0, 0), (first - 1, last - 1))

    @property
    def number(self) -> int:
        """Most micro-batches, those of an open side as one."""
        return self.ahead[1] + self.behind[1] + 1

    @property
    def merged(self) -> list[int]:
        """Places that stand for any number of micro-batches."""
        return [place for place, one in zip((0, self.number - 1), self.open, strict=True) if one]

    @property
    def fewest(self) -> int:
        """Fewest micro-batches."""
        return self.ahead[0] + self.behind[0] + 1

    @property
    def there(self) -> tuple[int, int]:
        """The first one that is there for sure, and the one after the last."""
        return self.ahead[1] - self.ahead[0], self.ahead[1] + self.behind[0] + 1
