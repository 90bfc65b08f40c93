"""Names of element types, spelled in one way. No torch."""

from __future__ import annotations

from kvist.errors import SpecError
from kvist.spec import ELEMENT_BYTES

#: What index keys may be stored as.
FP8 = "float8_e4m3fn"
INDEX_DTYPES = ("bfloat16", "float16", "float32", "float64", FP8)
#: Largest value of :data:`FP8`.
FP8_MAX = 448.0

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "fp8_e4m3fn": FP8,
    "e4m3": FP8,
    "e4m3fn": FP8,
    "float8_e4m3": FP8,
}


def dtype_name(value: object) -> str:
    """torch's name without the prefix, for any usual spelling: ``"fp8"`` and ``torch.float8_e4m3fn`` are one type.

    Raises SpecError for what is no element type that Kvist knows.
    """
    name = str(value).removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    if name not in ELEMENT_BYTES:
        raise SpecError(f"unknown dtype {str(value)!r}", hint=f"use one of {', '.join(sorted(ELEMENT_BYTES))}")
    return name


def index_dtype_name(value: object) -> str:
    """The same for index keys. Raises SpecError for one that they cannot be stored as."""
    name = dtype_name(value)
    if name not in INDEX_DTYPES:
        raise SpecError(
            f"index keys cannot be stored as {name}",
            hint=f"use one of {', '.join(INDEX_DTYPES)}; 8 bits are {FP8} without scales, and no other type of 8 bits",
        )
    return name


def require_fp8_bound(index_size: int, largest_weight: float) -> None:
    """Raise SpecError unless every index key of a model fits :data:`FP8` without a scale.

    A key is normalised to a root mean square of 1 and multiplied with weights, then rotated pairwise, so no element
    is larger than ``sqrt(index_size) * largest_weight``.

    index_size: elements of an index key. largest_weight: largest absolute factor of the norm, ``max |1 + w|`` for
    MiniMax-M3's weights ``w``, over all sparse layers.
    """
    bound = index_size**0.5 * largest_weight
    # Written so that NaN fails.
    if not bound <= FP8_MAX:
        raise SpecError(
            f"index keys may reach {bound:.4g}, {FP8} ends at {FP8_MAX:.0f}",
            hint="store the index keys of this model as bfloat16",
        )
