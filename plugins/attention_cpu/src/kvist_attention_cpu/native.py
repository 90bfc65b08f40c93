"""Compiles the C kernel once per machine, and loads it.

The library lies in ``$XDG_CACHE_HOME/kvist/kernels`` (``~/.cache`` by default) under a name that covers source,
flags, compiler and processor. It is built under another name and renamed, so concurrent processes never see half of it.
"""

from __future__ import annotations

import ctypes
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

#: What the kernel knows; it calls them by their index.
DTYPES = ("float32", "bfloat16", "float16")

_SOURCE = Path(__file__).with_name("kernel.c")
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# Tried in this order. OpenMP is compiled in but not linked: its symbols must resolve to the runtime that torch has
# loaded, for two runtimes would fight for the cores. Where torch has another one, the kernel has one thread.
_VARIANTS: tuple[tuple[str, ...], ...] = (("-march=native", "-fopenmp"), ("-march=native",), ())
_BUILD_LIMIT_S = 120

T = TypeVar("T")


class KernelUnavailableError(KvistError):
    """There is no native kernel on this machine; the message says why."""


class StepArguments(ctypes.Structure):
    """Mirrors ``step_arguments`` in kernel.c, field by field."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class LayerArguments(ctypes.Structure):
    """Mirrors ``arguments`` in kernel.c, field by field."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("key_offset", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("block_tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("key_size", ctypes.c_int32),
        ("value_size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("group_size", ctypes.c_int32),
        ("scratch", ctypes.c_void_p),
        ("scratch_floats", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("value_token", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("query_dtype", ctypes.c_int32),
        ("sink_tokens", ctypes.c_int32),
        ("window", ctypes.c_int64),
        ("sink_logits", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


@functools.cache
def load_kernel() -> ctypes.CDLL:
    """The kernel, compiled if this machine has not compiled it yet. Asked once per process.

    Torch must be loaded before. Raises KernelUnavailableError when there is no working compiler, or no build loads.
    """
    return _first(_open)


def why_not() -> str:
    """Why there can be no kernel on this machine; empty when one is compiled. Loads neither it nor torch."""
    try:
        _first(lambda path: path)
    except KernelUnavailableError as error:
        return error.message
    return ""


def _first(use: Callable[[Path], T]) -> T:
    """What ``use`` makes of the first variant that can be built and used. Raises KernelUnavailableError."""
    compiler = find_compiler()
    failures = []
    for variant in _VARIANTS:
        try:
            return use(build(compiler, (*_FLAGS, *variant)))
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


def build(compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """The library for ``flags``, built unless the cache has it.

    Raises KernelUnavailableError with the compiler's first words, and OSError when the cache cannot be written.
    """
    source = _SOURCE.read_bytes()
    version = _run([*compiler, "--version"])
    parts = [source.decode(), *compiler, *flags, version, platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = _cache_folder()
    target = folder / f"attention-{digest[:32]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            compiled, linked = os.path.join(place, "kernel.o"), os.path.join(place, "kernel.so")
            _run([*compiler, *flags, "-c", str(_SOURCE), "-o", compiled])
            _run([*compiler, "-shared", compiled, "-o", linked])
            os.replace(linked, target)
    return target


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.kvist_attend.argtypes = [ctypes.c_void_p]
    library.kvist_attend.restype = ctypes.c_int32
    library.kvist_scratch_floats.argtypes = [ctypes.c_int32] * 3
    library.kvist_scratch_floats.restype = ctypes.c_int64
    library.kvist_arguments_bytes.restype = ctypes.c_int64
    expected, found = ctypes.sizeof(LayerArguments) + ctypes.sizeof(StepArguments), library.kvist_arguments_bytes()
    if expected != found:
        raise KernelUnavailableError(f"{path} takes arguments of {found} bytes, expected {expected}")
    return library


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
