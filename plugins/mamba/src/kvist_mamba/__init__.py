"""Recurrent and hybrid models on Kvist. Importing this imports neither torch nor triton."""

from __future__ import annotations

from kvist_mamba.inputs import DeltaNetInputs, Mamba1Inputs, Mamba2Inputs, RecurrentInputs, ShortConvInputs
from kvist_mamba.spec import cache_spec

__all__ = ["DeltaNetInputs", "Mamba1Inputs", "Mamba2Inputs", "RecurrentInputs", "ShortConvInputs", "cache_spec"]
