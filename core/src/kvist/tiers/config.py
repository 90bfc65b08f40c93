"""What is below the device."""

from __future__ import annotations

import attrs

from kvist.errors import SpecError, TierError
from kvist.layout import Layout
from kvist.memory.copier import Copier
from kvist.memory.disk import DiskStore


@attrs.frozen(eq=False)
class Tiers:
    """Tiers for one manager, and who copies between them. The caller made them, and closes them after the manager's
    last use: first the copier, then the disk.

    copier: its mover knows the memory of each tier.
    host_layout: the host's arena: the device's layout with another number of slabs; ``None`` for no host tier.
    disk: opened with :func:`kvist.keys.format_digest` of the layout; ``None`` for no disk tier.
    minimum_blocks: what is shorter is not worth a copy, neither down nor up: it is computed again.
    """

    copier: Copier
    host_layout: Layout | None = None
    disk: DiskStore | None = None
    minimum_blocks: int = 1

    def __attrs_post_init__(self) -> None:
        if self.host_layout is None and self.disk is None:
            raise SpecError("Tiers() without a tier", hint="give it a host_layout or a disk, or leave it out")
        if self.minimum_blocks < 1:
            raise SpecError(f"Tiers(minimum_blocks={self.minimum_blocks}) must be at least 1")

    def require_match(self, layout: Layout) -> None:
        """Raise TierError unless the host's pages are those of ``layout``."""
        host = self.host_layout
        if host is not None and (host.groups, host.slab_bytes, host.tag) != (
            layout.groups,
            layout.slab_bytes,
            layout.tag,
        ):
            raise TierError(
                "the host tier has other pages than the device",
                hint="make host_layout with attrs.evolve(layout, slab_count=n)",
            )
