"""Packing of sequences into replicas and micro-batches: constructions and local searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.groups.packing.levelled import pack
    from milpplan.groups.packing.local_search import (
        balance,
        exchange_pairs,
        first_packings,
        has_single_micro_batches,
    )
else:
    __getattr__ = lazy_exports(__name__, __file__)
