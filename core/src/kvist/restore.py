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

    whole_blocks: where a prompt or a turn ends inside a block, keep of windows what resuming where that block begins
        requires: one page instead of two of a window no longer than a block, for less than a block to compute again.
        States are kept where the turn ends all the same.
    """

    every_blocks: int | None = None
    whole_blocks: bool = False

    def __attrs_post_init__(self) -> None:
        if self.every_blocks is not None and self.every_blocks < 1:
            raise SpecError(f"RestorePolicy(every_blocks={self.every_blocks}) must be at least 1, or None for never")

    def every(self, block_tokens: int) -> int:
        """Tokens between the regular restore points, 0 for none."""
        return self.every_blocks * block_tokens if self.every_blocks is not None else 0

    def end_points(self, length: int, block_tokens: int) -> list[int]:
        """Positions to keep at the end of a prompt or a turn, ascending: its end, for what comes next, and the position
        before it, the last one that the same tokens can resume at."""
        points = {length - 1, length}
        if self.whole_blocks:
            points = {point // block_tokens * block_tokens for point in points}
        return sorted(point for point in points if point > 0)

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
