"""A state that takes drafts back by itself, without a page for each of them. Imports no torch."""

from __future__ import annotations

import attrs

from kvist.errors import SpecError
from kvist.spec import State


@attrs.frozen
class Replay(State):
    """As :class:`~kvist.spec.State`, with one page also while drafts are undecided.

    The page holds a checkpoint of the state, the position of the checkpoint, and the inputs of up to ``tokens`` tokens
    since. A step that begins at position ``p`` computes the inputs between the checkpoint and ``p`` once more; rejected
    ones lie behind, and are overwritten. So nobody tells the backend what was accepted, and copies of the page, e.g.
    snapshots, are whole.

    tokens: inputs kept, at least 1, and so the most drafts of a step.
    """

    tokens: int

    def __attrs_post_init__(self) -> None:
        if self.tokens < 1:
            raise SpecError(f"Replay(tokens={self.tokens}): at least the inputs of one token are kept")

    @property
    def most_drafts(self) -> int | None:
        return self.tokens

    @property
    def draft_pages(self) -> bool:
        return False
