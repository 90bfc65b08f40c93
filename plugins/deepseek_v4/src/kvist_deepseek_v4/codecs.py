"""Rows to what is stored of them, and back. One codec for each format; a page's arrangement is no codec's business."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Protocol

import attrs
import torch
import torch.nn.functional as F

from kvist.spec import RowFormat, ceil_div
from kvist_deepseek_v4.formats import INDEX_FP8, MXFP4_BLOCK, PACKED, PACKED_BLOCK, EncodedRow

#: Largest values of e4m3 and e2m1, and the smallest maximum of a block: zeros have a scale, too.
_E4M3_MAX, _E2M1_MAX, _LEAST = 448.0, 6.0, 1e-4
#: Of ue8m0: what exponent 0 is stored as, and what is not a number.
_BIAS, _NAN = 127, 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: What is stored of rows: tensors ``[n, ...]``, for encoded rows bytes of data and bytes of scales.
Stored = tuple[torch.Tensor, ...]


class Codec(Protocol):
    """One format. Rounding is to the nearest, ties to even."""

    def encode(self, rows: torch.Tensor) -> Stored:
        """What to store of ``rows [n, ...]``."""

    def decode(self, stored: Stored) -> torch.Tensor:
        """The rows again, ``[n, ...]``: plain ones as they are, others in float32. Index rows stay turned."""

    def turn(self, query: torch.Tensor) -> torch.Tensor:
        """``query [..., elements]`` so that its products with decoded rows are those with the rows themselves."""


def codec_of(row: RowFormat) -> Codec:
    """The codec of a stream's rows."""
    if not isinstance(row, EncodedRow):
        return Plain(getattr(torch, row.dtype))
    if row.encoding == PACKED:
        return Packed(row.elements, row.rope, row.scale_bytes)
    return IndexFP8(row.elements) if row.encoding == INDEX_FP8 else IndexMXFP4(row.elements)


@attrs.frozen
class Plain:
    """Elements of one type."""

    dtype: torch.dtype

    def encode(self, rows: torch.Tensor) -> Stored:
        return (rows.to(self.dtype),)

    def decode(self, stored: Stored) -> torch.Tensor:
        return stored[0]

    def turn(self, query: torch.Tensor) -> torch.Tensor:
        return query


@attrs.frozen
class Packed:
    """:data:`~kvist_deepseek_v4.formats.PACKED` rows."""

    elements: int
    rope: int
    scale_bytes: int

    def encode(self, rows: torch.Tensor) -> Stored:
        plain = self.elements - self.rope
        blocks = _blocks(rows[:, :plain].float(), PACKED_BLOCK)
        exponents = _exponents(blocks.abs().amax(-1), _E4M3_MAX)
        codes = _e4m3(blocks * torch.exp2(-exponents)[..., None]).flatten(1)[:, :plain]
        scales = F.pad(_ue8m0(exponents), (0, self.scale_bytes - exponents.shape[1]))
        turning = rows[:, plain:].to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat((codes, turning), dim=1), scales

    def decode(self, stored: Stored) -> torch.Tensor:
        data, scales = stored
        plain = self.elements - self.rope
        count = ceil_div(plain, PACKED_BLOCK)
        blocks = _blocks(_from_e4m3(data[:, :plain]), PACKED_BLOCK)
        values = (blocks * _from_ue8m0(scales[:, :count])[..., None]).flatten(1)[:, :plain]
        return torch.cat((values, data[:, plain:].contiguous().view(torch.bfloat16).float()), dim=1)

    def turn(self, query: torch.Tensor) -> torch.Tensor:
        return query


@attrs.frozen
class IndexFP8:
    """:data:`~kvist_deepseek_v4.formats.INDEX_FP8` rows."""

    elements: int

    def encode(self, rows: torch.Tensor) -> Stored:
        turned = hadamard(rows)
        exponents = _exponents(turned.abs().amax(-1, keepdim=True), _E4M3_MAX)
        return _e4m3(turned * torch.exp2(-exponents)), torch.exp2(exponents).view(torch.uint8)

    def decode(self, stored: Stored) -> torch.Tensor:
        data, scales = stored
        return _from_e4m3(data) * scales.contiguous().view(torch.float32)

    def turn(self, query: torch.Tensor) -> torch.Tensor:
        return hadamard(query)


@attrs.frozen
class IndexMXFP4:
    """:data:`~kvist_deepseek_v4.formats.INDEX_MXFP4` rows: of two elements in a byte, the first in the lower bits."""

    elements: int

    def encode(self, rows: torch.Tensor) -> Stored:
        blocks = _blocks(hadamard(rows), MXFP4_BLOCK)
        exponents = _exponents(blocks.abs().amax(-1), _E2M1_MAX)
        codes = _e2m1(blocks * torch.exp2(-exponents)[..., None]).flatten(1)[:, : self.elements]
        return codes[:, 0::2] | codes[:, 1::2] << 4, _ue8m0(exponents)

    def decode(self, stored: Stored) -> torch.Tensor:
        data, scales = stored
        codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1).long()
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=data.device)[codes]
        return (_blocks(values, MXFP4_BLOCK) * _from_ue8m0(scales)[..., None]).flatten(1)[:, : self.elements]

    def turn(self, query: torch.Tensor) -> torch.Tensor:
        return hadamard(query)


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., n]`` times the Hadamard matrix of Sylvester's order over the root of ``n``, which is its own
    inverse, in float32 (float64 for float64)."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return rows.to(dtype) @ _matrix(rows.shape[-1]).to(rows.device, dtype)


@functools.cache
def _matrix(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


def _blocks(rows: torch.Tensor, size: int) -> torch.Tensor:
    """``[n, blocks, size]``, the last one filled up with zeros."""
    return F.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))


def _exponents(largest: torch.Tensor, top: float) -> torch.Tensor:
    """The smallest powers of two, as float32 exponents, with which ``largest`` stays within ``top``; NaN for NaN."""
    mantissa, exponent = torch.frexp(largest.float().clamp(min=_LEAST) / top)
    found = (exponent - (mantissa == 0.5).int()).float()
    return found.masked_fill(~largest.isfinite(), float("nan"))


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.float().clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def _ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents + _BIAS).clamp(0, _NAN - 1).nan_to_num(_NAN).to(torch.uint8)


def _from_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    return torch.exp2(codes.float() - _BIAS).masked_fill(codes == _NAN, float("nan"))


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    middles = torch.tensor([(one + other) / 2 for one, other in pairwise(_E2M1)], device=values.device)
    # A value in the middle goes to the even code: below every second middle it is the upper one already.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    codes = torch.bucketize(values.float().abs().nan_to_num(0.0), middles)
    return (codes + 8 * values.signbit()).to(torch.uint8)
