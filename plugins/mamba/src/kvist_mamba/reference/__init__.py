"""Plain torch, one sequence at a time: the oracle of every faster kernel, and of the scans in chunks that are here too.

Tensors of floats are in the dtype to compute in. States have the shapes of the spec's streams; nothing is changed in
place. ``after`` are numbers of tokens, ascending, from 1 to ``T``, or none: the functions return the state after each
of them, stacked on a new axis 0.
"""

from kvist_mamba.reference.conv import causal_conv, conv_states
from kvist_mamba.reference.delta_net import delta_net_chunked_scan, delta_net_scan, split_delta_net
from kvist_mamba.reference.mamba1 import mamba1_scan
from kvist_mamba.reference.mamba2 import mamba2_chunked_scan, mamba2_scan, split_mamba2
from kvist_mamba.reference.replay import gates_of, turn, with_tokens
from kvist_mamba.reference.scan import scan_of

__all__ = [
    "causal_conv",
    "conv_states",
    "delta_net_chunked_scan",
    "delta_net_scan",
    "gates_of",
    "mamba1_scan",
    "mamba2_chunked_scan",
    "mamba2_scan",
    "scan_of",
    "split_delta_net",
    "split_mamba2",
    "turn",
    "with_tokens",
]
