"""Compiles a C file once per machine, for plugins that bring kernels as source.

The library lies in ``$XDG_CACHE_HOME/kvist/kernels`` (``~/.cache`` by default) under a name that covers source,
flags, compiler and processor. It is built under another name and renamed, so concurrent processes never see half of it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvist.errors import KvistError

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# Tried in this order. OpenMP is compiled in but not linked: its symbols must resolve to the runtime that torch has
# loaded, for two runtimes would fight for the cores. Where torch has another one, the kernel has one thread.
_VARIANTS: tuple[tuple[str, ...], ...] = (("-march=native", "-fopenmp"), ("-march=native",), ())
_BUILD_LIMIT_S = 120

T = TypeVar("T")


class KernelUnavailableError(KvistError):
    """A kernel cannot be compiled or loaded on this machine; the message says why."""


def first_variant(source: Path, use: Callable[[Path], T]) -> T:
    """What ``use`` makes of the first library of ``source`` that can be built and used: for the processor with threads,
    for it without, for any.

    Raises KernelUnavailableError with the reason of the first when there is no compiler or none can be.
    """
    compiler = find_compiler()
    failures = []
    for variant in _VARIANTS:
        try:
            return use(build(source, compiler, (*_FLAGS, *variant)))
        except (KernelUnavailableError, OSError) as error:
            failures.append(str(error))
    raise KernelUnavailableError(failures[0])


def find_compiler() -> list[str]:
    """The C compiler's command: ``$CC``, else cc, gcc or clang. Raises KernelUnavailableError when there is none."""
    chosen = os.environ.get("CC")
    for candidate in [chosen] if chosen else ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    raise KernelUnavailableError(
        f"CC={chosen} is not a program" if chosen else "there is no C compiler (cc, gcc, clang)"
    )


def build(source: Path, compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """The library of a C file for ``flags``, built unless the cache has it.

    Raises KernelUnavailableError with the compiler's first words, and OSError when the cache cannot be written.
    """
    version = _run([*compiler, "--version"])
    parts = [source.read_text(encoding="utf-8"), *compiler, *flags, version, platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = _cache_folder()
    target = folder / f"{source.stem}-{digest[:32]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            compiled, linked = os.path.join(place, "kernel.o"), os.path.join(place, "kernel.so")
            _run([*compiler, *flags, "-c", str(source), "-o", compiled])
            _run([*compiler, "-shared", compiled, "-o", linked])
            os.replace(linked, target)
    return target


def _run(command: Sequence[str]) -> str:
    """Its output. Raises KernelUnavailableError with the first line it complained with."""
    shown = shlex.join(command[:1])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailableError(f"{shown} failed: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise KernelUnavailableError(f"{shown} ended with status {done.returncode}: {lines[0]}")
    return done.stdout


def _cache_folder() -> Path:
    """A writable folder of this user: the cache, or a private temporary one when the cache cannot be written."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "kvist" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return _private_folder()
    return folder if os.access(folder, os.W_OK) else _private_folder()


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvist-kernels-"))


def _processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))
