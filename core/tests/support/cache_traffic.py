"""The random engine of ``test_random_traffic.py`` for other tests, loaded by its path: tests are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parent.parent / "cache" / "test_random_traffic.py"
_SPEC = importlib.util.spec_from_file_location("kvist_random_traffic", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

MIXES = _MODULE.MIXES
Traffic = _MODULE.Traffic
