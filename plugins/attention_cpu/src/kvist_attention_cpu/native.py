"""The kernel as a library: what it is called with, and why there may be none."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvist.native import KernelUnavailableError, first_variant

#: What the kernel knows; it calls them by their index.
DTYPES = ("float32", "bfloat16", "float16")
#: Compiled by :mod:`kvist.native`.
SOURCE = Path(__file__).with_name("attention.c")


class StepArguments(ctypes.Structure):
    """Mirrors ``step_arguments`` in attention.c, field by field."""

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
    """Mirrors ``arguments`` in attention.c, field by field."""

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
    return first_variant(SOURCE, _open)


def why_not() -> str:
    """Why there can be no kernel on this machine; empty when one is compiled. Loads neither it nor torch."""
    try:
        first_variant(SOURCE, lambda path: path)
    except KernelUnavailableError as error:
        return error.message
    return ""


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
