"""Functions of one element, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """``x sigmoid(x)``."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, without losing small values in the 1 (Goldberg 1991, theorem 4)."""
    small = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + small
    # Both branches are computed: the quotient's divisor must not be 0 where it is not taken.
    quotient = small / tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    result = tl.where(one_more == 1.0, small, tl.log(one_more) * quotient)
    return tl.where(x > 20.0, x, result)


@triton.jit
def unit(vector):
    """A vector of length 1 in the same direction, but for the epsilon of gated delta nets."""
    return vector / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def unit_rows(vectors):
    """:func:`unit` of each row of a matrix."""
    return vectors / tl.sqrt(tl.sum(vectors * vectors, 1) + 1e-6)[:, None]
