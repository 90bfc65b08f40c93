"""What is owed to pages, and what a cancelled step gives back."""

from __future__ import annotations

import numpy as np

from kvist.owed import Owed
from kvist.spec import History
from kvist.step import Step
from kvist.testing.values import make_layout, make_spec

NOTHING = np.empty(0, np.int32)


def step_of(owed: Owed) -> Step:
    copies, fresh = owed.take()
    return Step(1, NOTHING, NOTHING, NOTHING, 0, (), copies, fresh)


def content(step: Step) -> dict[int, object]:
    """What each page holds after the step's copies, when page ``n`` held ``n``."""
    held: dict[int, object] = {int(to): int(source) for source, to in step.copies[0]}
    return held | dict.fromkeys(step.fresh[0].tolist(), "zeros")


def test_a_cancelled_step_s_copies_are_owed_as_they_were() -> None:
    """A page that is copied from and overwritten in one step is read first, however often the step is tried."""
    owed = Owed(make_layout(make_spec(4, History()), 100))
    owed.copy([[(42, 44)]])
    # 42 was given up and belongs to somebody else now.
    owed.copy([[(7, 42)]])
    owed.copy([[(44, 30)]])
    expected = {44: 42, 42: 7, 30: 42}
    step = step_of(owed)
    assert content(step) == expected
    owed.again(step)
    assert owed.something
    again = step_of(owed)
    assert content(again) == expected
    assert not owed.something


def test_what_is_owed_since_comes_after_what_is_owed_again() -> None:
    owed = Owed(make_layout(make_spec(4, History()), 100))
    owed.copy([[(1, 2)]])
    owed.zero([[3]])
    step = step_of(owed)
    # Planned after the step that is cancelled: a copy of what it was to bring, of zeros, and of what it reads.
    owed.copy([[(2, 5), (3, 6), (1, 7), (8, 1)]])
    owed.zero([[2]])
    owed.again(step)
    assert content(step_of(owed)) == {2: "zeros", 3: "zeros", 5: 1, 6: "zeros", 7: 1, 1: 8}
