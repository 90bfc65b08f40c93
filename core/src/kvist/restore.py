"""At which positions a sequence can be resumed by others: restore points."""

from __future__ import annotations

import attrs

from kvist.errors import SpecError


@attrs.frozen
class RestorePolicy:
    """At which positions sparse groups keep what resuming there requires.

    Always: the end of the last block that the same prompt can resume at (its last token is always computed), the
    block boundary where a prompt leaves what the index knows, so that its siblings can resume there, and the end of a
    turn; for windows also the end of a prompt, which costs them nothing. With ``every_blocks`` also each multiple of
    so many blocks. What a caller names in ``open`` comes on top. Dense groups can resume anywhere and cost nothing
    more.
    """

    every_blocks: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.every_blocks is not None and self.every_blocks < 1:
            raise SpecError(f"RestorePolicy(every_blocks={self.every_blocks}) must be at least 1, or None for never")

    def every(self, block_tokens: int) -> int:
        """Tokens between the regular restore points, 0 for none."""
        return self.every_blocks * block_tokens if self.every_blocks is not None else 0

    def prompt_points(
        self, prompt_length: int, reused: int, known: int, block_tokens: int, named: tuple[int, ...] = ()
    ) -> list[int]:
        """Block boundaries in ``(reused, prompt_length)`` to keep, ascending.

        reused: tokens the sequence takes from the cache. known: leading tokens the index knows, reusable or not.
        named: positions that the caller asked for, rounded down to blocks.
        """
        last = (prompt_length - 1) // block_tokens * block_tokens
        unit = self.every(block_tokens)
        points = set(range(unit, last, unit)) if unit else set()
        points.add(last)
        points.add(known // block_tokens * block_tokens)
        points.update(position // block_tokens * block_tokens for position in named)
        return sorted(point for point in points if reused < point < prompt_length)
