"""An implementation with one fault, for the kit to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Mutant:
    """name: what is wrong with it, in a few words. clause: the number of the clause whose test finds it.

    make: returns what the kit is run against: a plugin's folder, a manager factory, a backend class.
    """

    name: str
    clause: str
    make: Callable[[], Any]
