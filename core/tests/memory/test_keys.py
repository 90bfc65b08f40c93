"""Content keys: the same for the same content in every process, other ones for anything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import struct
import subprocess
import sys

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import SpecError
from kvist.keys import block_keys, format_digest, scope_seed
from kvist.layout import Layout
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, ScaleFormat, Scope, Stream, Window

ROW = RowFormat((2, 8), "float16")


def spec_of(**changes: object) -> CacheSpec:
    layers = (
        Layer(0, (Stream("k", ROW, History()), Stream("v", ROW, History()))),
        Layer(3, (Stream("k", ROW, Window(8, sinks=2)),)),
    )
    return CacheSpec(**{"layers": layers, "block_tokens": 4, "fingerprint": "weights-1", **changes})  # type: ignore[arg-type]


def layout_of(memory_bytes: int = 1 << 16, **changes: object) -> Layout:
    return Layout.build(spec_of(**changes), memory_bytes)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_chain_by_hand():
    seed = bytes(range(32))
    first = hashlib.sha256(seed + bytes.fromhex("0100000002000000")).digest()
    second = hashlib.sha256(first + bytes.fromhex("03000000ffffff7f")).digest()
    assert block_keys(seed, ids(1, 2, 3, 2**31 - 1, 5), 2) == [first, second]


def test_the_seed_by_hand():
    def part(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    scope = Scope("lora-7", "tenant", ((2, "d" * 64), (9, "e" * 64)))
    inner = hashlib.sha256(part("lora-7") + part("tenant") + part("2:" + "d" * 64) + part("9:" + "e" * 64)).digest()
    assert scope_seed(bytes(32), scope) == hashlib.sha256(bytes(32) + inner).digest()


def test_the_format_digest_by_hand():
    def stream(name: str, retention: str) -> str:
        row = '{"fields":{"dtype":"float16","scale":null,"shape":[2,8]},"type":"kvist.spec.RowFormat"}'
        return (
            f'{{"fields":{{"continued":false,"name":"{name}","retention":{retention},"row":{row},'
            '"sharding":{"fields":{},"type":"kvist.spec.Replicated"},"tokens_per_row":1},"type":"kvist.spec.Stream"}'
        )

    history = '{"fields":{},"type":"kvist.spec.History"}'
    window = '{"fields":{"ring":0,"sinks":2,"tokens":8},"type":"kvist.spec.Window"}'
    k, v, w = stream("k", history), stream("v", history), stream("k", window)
    text = (
        f'{{"block_tokens":4,"byte_order":"{sys.byteorder}","domains":[["target","weights-1"]],"groups":['
        f'{{"content_bytes":256,"domain":"target","parts":[{{"bytes":128,"layer":0,"offset":0,"rows":4,"stream":{k}}},'
        f'{{"bytes":128,"layer":0,"offset":128,"rows":4,"stream":{v}}}],"retention":{history}}},'
        f'{{"content_bytes":128,"domain":"target","parts":[{{"bytes":128,"layer":3,"offset":0,"rows":4,"stream":{w}}}],'
        f'"retention":{window}}}],"tag":"row-major-1","version":1}}'
    )
    json.loads(text)
    assert format_digest(layout_of()) == hashlib.sha256(text.encode()).digest()


SCRIPT = """
import numpy as np
from kvist.keys import block_keys, format_digest, scope_seed
from kvist.layout import Layout
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Scope, Stream, Window
row = RowFormat((2, 8), "float16")
layers = [Layer(0, [Stream("k", row, History()), Stream("v", row, History())]),
          Layer(3, [Stream("k", row, Window(8, sinks=2))])]
digest = format_digest(Layout.build(CacheSpec(layers, 4, "weights-1"), 1 << 16))
for scope in (Scope(), Scope("", "", []), Scope(adapter="a" * 64), Scope(media=[(2, "d" * 64)])):
    print(block_keys(scope_seed(digest, scope), np.arange(1, 9, dtype=np.int32), 4)[-1].hex())
import sys
print("torch" in sys.modules)
"""


def test_keys_are_equal_in_every_process():
    answers = []
    for seed in (None, "0", "1", "4294967295"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
        )
        answers.append(ran.stdout.split())
    here = format_digest(layout_of())
    scopes = (Scope(), Scope(), Scope(adapter="a" * 64), Scope(media=((2, "d" * 64),)))
    keys = [block_keys(scope_seed(here, scope), np.arange(1, 9, dtype=np.int32), 4)[-1].hex() for scope in scopes]
    assert answers == [[*keys, "False"]] * 4
    assert len(set(keys)) == 3


def test_absent_and_empty_extras_are_the_same():
    assert scope_seed(bytes(32), Scope()) == scope_seed(bytes(32), Scope(adapter="", salt="", media=()))


def test_the_size_of_the_memory_is_not_part_of_the_format():
    small = layout_of()
    padded = tuple(attrs.evolve(group, page_bytes=3 * group.page_bytes) for group in small.groups)
    large = attrs.evolve(small, slab_bytes=3 * small.slab_bytes, slab_count=99, groups=padded)
    assert format_digest(large) == format_digest(small) == format_digest(layout_of(1 << 20))


def test_the_longest_sequence_and_the_vocabulary_are_not_part_of_the_format():
    assert format_digest(layout_of(max_tokens=9, vocab_size=100)) == format_digest(layout_of())


def layers_with(stream: Stream) -> tuple[Layer, ...]:
    return (Layer(0, (stream, Stream("v", ROW, History()))), spec_of().layers[1])


OTHER_FORMATS = {
    "fingerprint": {"fingerprint": "weights-2"},
    "domain": {"domain": "draft"},
    "block_tokens": {"block_tokens": 8},
    "a layer less": {"layers": spec_of().layers[:1]},
    "another layer id": {"layers": (attrs.evolve(spec_of().layers[0], id=1), spec_of().layers[1])},
    "stream name": {"layers": layers_with(Stream("q", ROW, History()))},
    "dtype": {"layers": layers_with(Stream("k", attrs.evolve(ROW, dtype="bfloat16"), History()))},
    "shape of as many bytes": {"layers": layers_with(Stream("k", attrs.evolve(ROW, shape=(8, 2)), History()))},
    "scales of as many bytes": {
        "layers": layers_with(Stream("k", RowFormat((2, 12), "uint8", ScaleFormat(2)), History()))
    },
    "retention": {"layers": layers_with(Stream("k", ROW, Window(64)))},
    "sinks": {"layers": (spec_of().layers[0], Layer(3, (Stream("k", ROW, Window(8, sinks=3)),)))},
    "tokens_per_row": {"layers": layers_with(Stream("k", ROW, History(), tokens_per_row=2))},
    "sharding": {"layers": layers_with(Stream("k", ROW, History(), sharding=Heads(2)))},
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_everything_that_makes_bytes_incompatible_changes_the_format(name):
    assert format_digest(layout_of(**OTHER_FORMATS[name])) != format_digest(layout_of())


def test_all_formats_differ_from_each_other():
    assert len({format_digest(layout_of(**changes)) for changes in OTHER_FORMATS.values()}) == len(OTHER_FORMATS)


def test_the_page_layout_tag_is_part_of_the_format():
    layout = layout_of()
    assert format_digest(attrs.evolve(layout, tag="tiled-16")) != format_digest(layout)


def test_the_model_of_another_domain_is_part_of_the_format():
    def with_draft(fingerprint: str) -> bytes:
        draft = spec_of(domain="draft", fingerprint=fingerprint)
        return format_digest(Layout.build(spec_of(), 1 << 16, drafts=[draft]))

    assert len({with_draft("a"), with_draft("b"), format_digest(layout_of())}) == 3


def test_scopes_that_differ_anywhere_have_other_seeds():
    digest, other = "d" * 63 + "1", "d" * 63 + "2"
    scopes = [
        Scope(),
        Scope(adapter="x"),
        Scope(salt="x"),
        Scope("x", "x"),
        Scope("xx"),
        # Full width: digests that differ only at their end.
        Scope(media=((2, digest),)),
        Scope(media=((2, other),)),
        Scope(media=((3, digest),)),
        # Two items, and the same two swapped.
        Scope(media=((2, digest), (9, other))),
        Scope(media=((2, other), (9, digest))),
        # What would be one string if the parts were only joined.
        Scope(media=((2, digest + other),)),
        Scope(salt=f"2:{digest}"),
    ]
    assert len({scope_seed(bytes(32), scope) for scope in scopes}) == len(scopes)
    assert scope_seed(bytes(32), Scope()) != scope_seed(bytes(31) + b"\1", Scope())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.integers(1, 9),
    st.integers(0, 6),
    st.integers(0, 40),
)
def test_keys_of_pieces_are_keys_of_the_whole(tokens, block_tokens, cut, changed):
    whole = block_keys(bytes(32), ids(*tokens), block_tokens)
    assert len(whole) == len(tokens) // block_tokens
    # An extent goes on where the one above it ended.
    cut = min(cut, len(whole))
    head = block_keys(bytes(32), ids(*tokens[: cut * block_tokens]), block_tokens)
    tail = block_keys(head[-1] if head else bytes(32), ids(*tokens[cut * block_tokens :]), block_tokens)
    assert head + tail == whole
    # Another token changes the keys of its block and of all after it, and no other.
    if changed < len(tokens):
        tokens[changed] ^= 1
        after = block_keys(bytes(32), ids(*tokens), block_tokens)
        same = changed // block_tokens
        assert after[:same] == whole[:same]
        assert not set(after[same:]) & set(whole[same:])


def test_equal_blocks_at_other_places_have_other_keys():
    keys = block_keys(bytes(32), ids(*[7] * 64), 4)
    assert len(set(keys)) == 16 and {len(key) for key in keys} == {32}


def test_tokens_of_another_width_are_not_cut_short():
    with pytest.raises(TypeError):
        block_keys(bytes(32), np.array([2**32 + 1, 2]), 2)
    swapped = ids(1, 2).astype(">i4")
    assert block_keys(bytes(32), swapped, 2) == block_keys(bytes(32), ids(1, 2), 2)
    rng = random.Random(0)
    every_other = np.array([rng.randrange(2**31) for _ in range(20)], np.int32)[::2]
    assert block_keys(bytes(32), every_other, 5) == block_keys(bytes(32), every_other.copy(), 5)


def test_a_spec_without_fingerprint_is_refused():
    with pytest.raises(SpecError) as raised:
        format_digest(layout_of(fingerprint=""))
    assert str(raised.value) == (
        "domain 'target' has no fingerprint and so no content keys: blocks of two models would get the same ones\n"
        "hint: set CacheSpec.fingerprint to a digest of the weights"
    )


class Anonymous:
    """Answers every question of a retention, and compares by address."""

    exact = False
    ring = 0
    most_drafts = None
    live = required = lambda self, length, block: ((0, -(-length // block)),) if length else ()
    droppable = lambda self, length, rollback, block: ()  # noqa: E731


@dataclasses.dataclass(frozen=True)
class Named(Anonymous):
    depth: int
    note: str = dataclasses.field(default="", compare=False)


@attrs.frozen
class AlsoNamed(Anonymous):
    depth: int
    note: str = attrs.field(default="", eq=False)


def test_a_retention_without_fields_is_refused():
    with pytest.raises(SpecError) as raised:
        format_digest(layout_of(layers=layers_with(Stream("k", ROW, Anonymous()))))
    assert str(raised.value) == (
        f"{__name__}.Anonymous cannot enter a content key: it is neither an attrs class nor a dataclass\n"
        "hint: make it one, frozen; its fields then enter the key"
    )


@pytest.mark.parametrize("kind", [Named, AlsoNamed])
def test_a_plugin_s_retention_enters_with_what_it_compares_by(kind):
    def digest(retention: Named | AlsoNamed) -> bytes:
        return format_digest(layout_of(layers=(Layer(0, (Stream("k", ROW, retention),)),)))

    assert digest(kind(1)) == digest(kind(1, "other")) != digest(kind(2))
    assert digest(Named(1)) != digest(AlsoNamed(1))
