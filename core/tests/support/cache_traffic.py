"""The random engine of ``test_random_traffic.py`` for other tests, loaded by its path: tests are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import attrs
import numpy as np

from kvist.manager import PagedCacheManager
from kvist.spec import Retention, Window

_PATH = Path(__file__).parent.parent / "cache" / "test_random_traffic.py"
_SPEC = importlib.util.spec_from_file_location("kvist_random_traffic", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

MIXES = _MODULE.MIXES
Traffic = _MODULE.Traffic


def retentions_of(mix: tuple[Retention, ...], block: int) -> tuple[Retention, ...]:
    """``mix``, with rings that fit into blocks of ``block`` tokens."""
    return tuple(
        attrs.evolve(each, tokens=1, ring=1) if isinstance(each, Window) and each.ring > block else each for each in mix
    )


def traffic_of(manager: PagedCacheManager, rng: np.random.Generator) -> Traffic:
    """Random traffic without the value oracle, for tests of what the books say."""
    traffic = Traffic(manager, rng)
    traffic.values.run = lambda *_: None
    return traffic
