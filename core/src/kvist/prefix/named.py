"""The content keys of an extent's blocks, computed when somebody asks and kept on the extent."""

from __future__ import annotations

from kvist.keys import block_keys, scope_seed
from kvist.prefix.extent import Extent
from kvist.prefix.tree import scope_of


def keys_of(extent: Extent, format_digest: bytes) -> list[bytes]:
    """The keys of the whole blocks of ``extent``, in order; an open last block has none. The extent's own list: do not
    change it, and copy what is to be kept.

    format_digest: of the cache's layout, see :func:`kvist.keys.format_digest`. Always the same one for one tree.

    Costs a hash for each block that was not asked for before, on the path down to the extent.
    """
    block = extent.block_tokens
    behind = []
    node = extent
    # Without recursion: depth grows with the turns.
    while node.parent is not None:
        known = node.keys
        if known is not None and len(known) == node.length // block:
            break
        behind.append(node)
        node = node.parent
    for node in reversed(behind):
        if node.keys is None:
            node.keys = []
        keys = node.keys
        previous = keys[-1] if keys else key_before(node, format_digest)
        keys += block_keys(previous, node.tokens_from(len(keys) * block), block)
    assert extent.keys is not None
    return extent.keys


def key_before(extent: Extent, format_digest: bytes) -> bytes:
    """The key of the block before ``extent``: the seed of its scope at the start of a sequence."""
    parent = extent.parent
    assert parent is not None
    if parent.parent is None:
        return scope_seed(format_digest, scope_of(extent))
    # Whatever has children ends in a whole block.
    return keys_of(parent, format_digest)[-1]
