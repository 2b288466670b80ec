"""Messages of a plan: which ranks send how many bytes, over which links, when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.communication.records import NodeBlock, gpus_per_domain, rank_lists
else:
    __getattr__ = lazy_exports(__name__, __file__)
