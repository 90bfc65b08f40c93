"""Sizes in words."""

from __future__ import annotations

import re

from kvist.errors import SpecError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: int | str) -> int:
    """``"256MiB"``, ``"1.5 GB"`` or a plain number to bytes. Raises SpecError naming the value."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise SpecError(f"memory={value!r} is not a positive size", hint="use bytes or e.g. '512MiB', '2GiB'")
    return size
