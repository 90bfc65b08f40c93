"""Where libucp is, and whether it can be used."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from kvist.errors import TransferError
from kvist_transceiver_ucx.declarations import ffi

#: Names a libucp.so.0 to use instead of what would be found.
VARIABLE = "KVIST_UCX_LIBRARY"
NAME = "libucp.so.0"
#: What the declarations were written for. Later versions only append to structures, guarded by masks.
OLDEST = (1, 13)

Version: TypeAlias = tuple[int, int, int]

_INSTALL = "pip install 'kvist-transceiver-ucx[cu12]' (or [cu13]), or install the system's UCX"


@attrs.frozen
class Library:
    """A loaded libucp. ``lib`` is cffi's; ``path`` is what it was loaded by."""

    lib: Any
    path: str
    version: Version

    @property
    def version_text(self) -> str:
        return dotted(self.version)


def dotted(version: tuple[int, ...]) -> str:
    """``(1, 22, 0)`` as ``1.22.0``."""
    return ".".join(map(str, version))


def find(explicit: str | None = None) -> tuple[str, str]:
    """``(path, what named it)`` of the library to load: ``explicit``, then the environment variable, then the
    installed libucx wheel, then whatever the system's loader finds. Only files that are named are looked for here."""
    for path, origin in ((explicit, "the argument library"), (os.environ.get(VARIABLE), VARIABLE)):
        if path:
            if not Path(path).is_file():
                raise TransferError(f"{origin} names {path}, which is no file", hint=f"give the path of a {NAME}")
            return path, origin
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = str(Path(folder, "lib", NAME))
        if os.path.isfile(path):
            return path, "the libucx wheel"
    return NAME, "the system"


def load(explicit: str | None = None) -> Library:
    """Load libucp. Raises TransferError that says what is missing."""
    path, origin = find(explicit)
    try:
        lib = ffi.dlopen(path)
    except OSError as error:
        if origin == "the system":
            raise TransferError(
                f"there is no UCX: {VARIABLE} is not set, no libucx wheel is installed, and the system has no {NAME}",
                hint=_INSTALL,
            ) from error
        raise TransferError(f"{origin} gives {path}, which cannot be loaded: {error}", hint=_INSTALL) from error
    try:
        version = _version(lib)
    except AttributeError as error:
        raise TransferError(f"{path} (from {origin}) is no libucp: {error}", hint=_INSTALL) from error
    require_new_enough(version, path, origin)
    return Library(lib, path, version)


def require_new_enough(version: Version, path: str, origin: str) -> None:
    """Raise TransferError for a UCX older than the declarations."""
    if version[:2] < OLDEST:
        raise TransferError(
            f"UCX {dotted(version)} at {path} (from {origin}) is too old; {dotted(OLDEST)} is the oldest that works",
            hint=_INSTALL,
        )


def _version(lib: Any) -> Version:
    major, minor, release = (ffi.new("unsigned *") for _ in range(3))
    lib.ucp_get_version(major, minor, release)
    return major[0], minor[0], release[0]
