"""Triton kernels. Each has a plain form in :mod:`kvist_minimax_m3.blocks` or ``reference``, which is its oracle."""
