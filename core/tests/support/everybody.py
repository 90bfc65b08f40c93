"""An admission policy that provokes shortages."""

from __future__ import annotations

from kvist.scheduling import Room


class Everybody:
    """Admits without looking whether there is room."""

    def admits(self, room: Room) -> bool:
        return True
