"""Position of process groups in the network, and times of collectives and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milpplan.library import lazy_exports

if TYPE_CHECKING:
    from milpplan.simulation.network.collectives import (
        all_to_all_bytes,
        bus_bandwidth_bytes_per_s,
        call_s,
        far_s,
        members_per_domain,
        transfer_s,
        wire_factor,
    )
    from milpplan.simulation.network.placement import RankGroup, group_place
else:
    __getattr__ = lazy_exports(__name__, __file__)
