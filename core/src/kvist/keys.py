"""Content keys: names of blocks that are equal in every process, for whatever outlives or leaves this one.

Inside a process prefixes are compared token by token. Where content goes to a disk or to a peer, a block is named by
32 bytes: ``key[i] = sha256(key[i - 1] + tokens of block i as little-endian int32)``. The chain starts at a seed that
covers the format of the bytes, the model and the scope, so equal keys mean equal bytes. Nothing here depends on
Python's ``hash``, on an address or on the order in which anything was loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from typing import Any

import attrs

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.spec import Scope
from kvist.step import IntArray

#: Raised whenever the same digest would stand for other bytes: the encoding below, or what a page holds.
FORMAT_VERSION = 1


def format_digest(layout: Layout) -> bytes:
    """32 bytes that differ wherever the page bytes of two caches must not be mixed.

    The SHA-256 of compact JSON with sorted keys. It covers every domain's fingerprint, block size, page layout tag and
    what every group stores where; slabs, padding and the size of the memory are left out, so that a cache of another
    size finds its blocks again. Where several workers share out one model, each needs a fingerprint of its own.

    Raises SpecError for a spec that cannot promise this: one without a fingerprint, or with a retention that is neither
    an attrs class nor a dataclass.
    """
    specs = (layout.spec, *layout.drafts)
    for spec in specs:
        if not spec.fingerprint:
            raise SpecError(
                f"domain {spec.domain!r} has no fingerprint and so no content keys: blocks of two models would get the "
                "same ones",
                hint="set CacheSpec.fingerprint to a digest of the weights",
            )
    groups = [
        {
            "domain": group.domain,
            "retention": group.retention,
            "content_bytes": group.content_bytes,
            "parts": [
                {
                    "layer": part.layer_id,
                    "offset": part.offset,
                    "bytes": part.byte_count,
                    "rows": part.row_count,
                    "stream": part.stream,
                }
                for part in group.parts
            ],
        }
        for group in layout.groups
    ]
    described = {
        "version": FORMAT_VERSION,
        "byte_order": sys.byteorder,
        "domains": [[spec.domain, spec.fingerprint] for spec in specs],
        "block_tokens": layout.block_tokens,
        "tag": layout.tag,
        "groups": groups,
    }
    text = json.dumps(described, default=_fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).digest()


def scope_seed(format_digest: bytes, scope: Scope) -> bytes:
    """The key before the first block of every sequence in ``scope``: ``sha256(format digest + scope digest)``."""
    return hashlib.sha256(format_digest + scope.digest()).digest()


def block_keys(previous: bytes, tokens: IntArray, block_tokens: int) -> list[bytes]:
    """The keys of the whole blocks in ``tokens``, in order; a partial last block has none.

    previous: the key of the block before ``tokens``, or the seed of the scope at the start of a sequence.
    tokens: int32, from a position that is a multiple of ``block_tokens``.
    """
    # "equiv" admits int32 only: a wider id cut short would give two prompts one key.
    data = tokens.astype("<i4", casting="equiv", copy=False).tobytes()
    step = 4 * block_tokens
    keys = []
    for begin in range(0, len(data) - step + 1, step):
        previous = hashlib.sha256(previous + data[begin : begin + step]).digest()
        keys.append(previous)
    return keys


def _fields(value: Any) -> dict[str, Any]:
    """What a record compares by, under its own name: the JSON form of everything that has none."""
    kind = type(value)
    if attrs.has(kind):
        names = [field.name for field in attrs.fields(kind) if field.eq]
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
    else:
        raise SpecError(
            f"{kind.__module__}.{kind.__qualname__} cannot enter a content key: it is neither an attrs class nor a "
            "dataclass",
            hint="make it one, frozen; its fields then enter the key",
        )
    described = {name: getattr(value, name) for name in names}
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "fields": described}
