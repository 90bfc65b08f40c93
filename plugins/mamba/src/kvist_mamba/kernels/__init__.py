"""Triton kernels. Each has a plain form in :mod:`kvist_mamba.reference`, which is its oracle.

They are given whole batches: tensors over all tokens of a step, a layer's states as ``[page, *shape]`` with any stride
between pages, and a :class:`kvist_mamba.kernels.rows.Rows` that says where each row's states are read and written.
Sums are made in float32, and what is stored is rounded to the dtype of its place.
"""
