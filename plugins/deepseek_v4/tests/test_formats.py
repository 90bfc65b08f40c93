"""Encoded rows: their bytes against a packer of its own, written from the formats' description; what they are worth;
and that caches of two formats are never taken for one another."""

from __future__ import annotations

import bisect
import itertools
import math
import struct

import attrs
import numpy as np
import pytest
import torch
from deepseek_v4_drive import Cache, tokens
from deepseek_v4_models import model_logits

from kvist.attention.base import BackendContext
from kvist.errors import SpecError
from kvist.keys import format_digest
from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.memory.device import DeviceMemory
from kvist.testing.attention import Case
from kvist.transfer.compatibility import differences
from kvist.transfer.pagetable import describe
from kvist_deepseek_v4.codecs import codec_of, hadamard
from kvist_deepseek_v4.formats import INDEX_FP8, INDEX_MXFP4, index_row, packed_row, pages_of
from kvist_deepseek_v4.reference import ReferenceBackend
from kvist_deepseek_v4.rows import StreamRows
from kvist_deepseek_v4.spec import cache_spec
from kvist_deepseek_v4.testing import DeepseekV4BackendTests, tiny_spec

#: Sizes of the released models: a layer of each kind and a second with an index.
REAL = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0]}


# The packer: one number after the other, in Python's own floats.


def decoded(mantissa_bits: int, bias: int, count: int) -> list[float]:
    """Values of the codes of a small float, positive ones, which ascend."""
    values = []
    for code in range(count):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return values


E4M3, E2M1 = decoded(3, 7, 127), decoded(1, 1, 8)


def nearest(value: float, values: list[float], sign: int) -> int:
    """The nearest code, of two the even one, with the number's sign."""
    above = min(bisect.bisect_left(values, abs(value)), len(values) - 1)
    below = max(above - 1, 0)
    down, up = abs(value) - values[below], values[above] - abs(value)
    code = below if down < up or (down == up and below % 2 == 0) else above
    return code + sign * (math.copysign(1, value) < 0)


def e4m3(value: float) -> int:
    return nearest(value, E4M3, 128)


def e2m1(value: float) -> int:
    return nearest(value, E2M1, 8)


def power(values: list[float], top: float) -> int:
    """The exponent of the smallest power of two with which all values stay within ``top``."""
    largest = max(1e-4, *(abs(value) for value in values))
    exponent = -126
    while top * 2.0**exponent < largest:
        exponent += 1
    return exponent


def bfloat16(value: float) -> bytes:
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16)


def pack_584(row: list[float]) -> tuple[bytes, bytes]:
    """448 numbers of 8 bits, 64 of 16, then in the scales' place 7 exponents and a byte of nothing."""
    data, scales = b"", b""
    for first in range(0, 448, 64):
        exponent = power(row[first : first + 64], 448.0)
        data += bytes(e4m3(value / 2.0**exponent) for value in row[first : first + 64])
        scales += bytes([exponent + 127])
    return data + b"".join(map(bfloat16, row[448:])), scales + b"\0"


def pack_132(row: list[float]) -> tuple[bytes, bytes]:
    exponent = power(row, 448.0)
    return bytes(e4m3(value / 2.0**exponent) for value in row), struct.pack("<f", 2.0**exponent)


def pack_68(row: list[float]) -> tuple[bytes, bytes]:
    data, scales = b"", b""
    for first in range(0, 128, 32):
        exponent = power(row[first : first + 32], 6.0)
        codes = [e2m1(value / 2.0**exponent) for value in row[first : first + 32]]
        data += bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2]))
        scales += bytes([exponent + 127])
    return data, scales


def page(packed: list[tuple[bytes, bytes]], size: int) -> bytes:
    """All data, then all scales, then nothing."""
    return (b"".join(data for data, _ in packed) + b"".join(scales for _, scales in packed)).ljust(size, b"\xab")


def wild(count: int, elements: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, each of them too, with zeros, ties and the smallest numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, elements, generator=generator)
    rows *= torch.exp2(torch.randint(-20, 20, (count, elements // 32), generator=generator)).repeat_interleave(32, 1)
    rows[0] = 0
    rows[1, ::3] = torch.tensor([448.0, 27.0, 29.0, -0.0]).repeat(elements)[: len(rows[1, ::3])]
    return rows


@pytest.mark.parametrize(
    ("dtype", "stream", "count", "size", "pack"),
    [
        ("fp8", "compressed", 64, 37440, pack_584),
        ("fp8", "compressed-heavy", 2, 1728, pack_584),
        ("fp8", "index_k", 64, 8640, pack_132),
        ("fp8-mxfp4", "index_k", 64, 4608, pack_68),
    ],
)
def test_pages_byte_for_byte(dtype, stream, count, size, pack):
    """Both layers' rows, with scales of their own, in shuffled pages of 256 tokens; what is behind stays as it was."""
    spec = cache_spec(REAL, block_tokens=256, dtype=dtype)
    layout = Layout.build(spec, 1 << 26, pages_of(spec))
    memory = DeviceMemory(layout)
    memory.bytes.fill_(0xAB)
    name = stream.removesuffix("-heavy")
    written = {}
    for layer in (2,) if stream != name else (1, 3):
        described = next(each for each in spec.layers[layer].streams if each.name == name)
        assert layout.part(layer, name)[1].byte_count == size
        rows = StreamRows.of(memory, layer, described)
        assert (rows.slots, rows.block_rows) == (count, count)
        content = wild(2 * count, 512 if name == "compressed" else 128, layer)
        table = np.array([3, 1], np.int32)
        # In two goes, the second of which begins inside a page.
        first = max(1, count // 3)
        rows.write(table, 0, content[:first])
        rows.write(table, first, content[first:])
        turned = content if name == "compressed" else hadamard(content)
        written[layer] = [pack([float(value) for value in row]) for row in turned]
    for layer, packed in written.items():
        view = memory.view(layer, name, (size,), torch.uint8)
        for number, of_page in ((3, packed[:count]), (1, packed[count:])):
            assert bytes(view[number].numpy()) == page(of_page, size), f"layer {layer}"


def test_a_window_of_packed_rows_byte_for_byte():
    """A ring of 128 rows in a block of 256 tokens: the rows of positions 200 to 300."""
    spec = cache_spec(REAL, block_tokens=256, dtype="fp8")
    layout = Layout.build(spec, 1 << 26, pages_of(spec))
    memory = DeviceMemory(layout)
    memory.bytes.fill_(0xAB)
    rows = StreamRows.of(memory, 0, spec.layers[0].streams[0])
    content = wild(100, 512, 0)
    rows.write(np.array([2, 5], np.int32), 200, content)
    view = memory.view(0, "kv", (130 * 576,), torch.uint8)
    for index in range(100):
        number, slot = (2, (200 + index) % 128) if index < 56 else (5, index - 56)
        data, scales = pack_584([float(value) for value in content[index]])
        assert bytes(view[number, slot * 576 : (slot + 1) * 576].numpy()) == data
        assert bytes(view[number, 128 * 576 + slot * 8 : 128 * 576 + (slot + 1) * 8].numpy()) == scales


def test_the_turn_is_its_own_inverse_and_cancels_on_both_sides_only():
    one, other = wild(8, 128, 1).double(), wild(8, 128, 2).double()
    signs = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    assert torch.allclose(hadamard(one), one @ torch.tensor(signs, dtype=torch.float64) * 128**-0.5)
    assert torch.allclose(hadamard(hadamard(one)), one)
    assert torch.allclose(hadamard(one) @ hadamard(other).T, one @ other.T)
    assert not torch.allclose(hadamard(one) @ other.T, one @ other.T)


@pytest.mark.parametrize("row", [packed_row(512, 64), index_row(128, INDEX_FP8), index_row(128, INDEX_MXFP4)])
def test_what_is_read_back(row):
    """Within half a step of a block's scale, which is a power of two; once more it is the same; NaN stays NaN."""
    codec, content = codec_of(row), wild(32, row.elements, 3)
    stored = codec.encode(content)
    assert [each.shape[1] for each in stored] == [row.data_bytes, row.scale_bytes]
    read, wanted = codec.decode(stored), codec.turn(content) if row.rope == 0 else content
    steps, size = (0.0625, 64) if row.rope else (0.0625, 128) if row.encoding == INDEX_FP8 else (0.25, 32)
    largest = wanted.abs().unflatten(1, (-1, size)).amax(-1).clamp(min=1e-4).repeat_interleave(size, 1)
    # A number keeps its leading bits, and small ones what the block's largest leaves of the grid.
    assert bool(((read - wanted).abs() <= steps * wanted.abs() + largest * 2.0**-2 * steps).all())
    if row.encoding == INDEX_FP8:
        scales = stored[1].contiguous().view(torch.float32)
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    content[4, 0] = torch.nan
    assert bool(codec.decode(codec.encode(content))[4, :32].isnan().any())
    assert bool(codec.decode(tuple(torch.full_like(each, 255) for each in stored)).isnan().all())


@pytest.mark.parametrize("dtype", ["fp8", "fp8-mxfp4"])
def test_the_selected_scores_are_the_best(dtype):
    """More rows than are selected, over pages of 8 rows: what the backend chooses has the best scores of all, worked
    out from the bytes in the pages; also in the second layer with an index."""
    spec = tiny_spec(32, dtype)
    layout = Layout.build(spec, 1 << 22, ReferenceBackend.page_layout(spec))
    memory, manager = DeviceMemory(layout), PagedCacheManager(layout)
    manager.shuffle_free_pages(np.random.default_rng(0))
    backend, author = ReferenceBackend(BackendContext(memory)), DeepseekV4BackendTests()
    sequence = manager.open(np.arange(90, dtype=np.int32))
    step = manager.plan([Run(sequence, 90)]).commit()
    backend.begin(step)
    chosen = {}
    for layer in spec.layers:
        inputs = author.inputs(Case(name="any", spec=spec), layer, 90, torch.Generator().manual_seed(layer.id))
        if layer.id not in (1, 3):
            continue
        inputs = attrs.evolve(inputs, topk=5)
        backend.forward(layer.id, inputs)
        group, part = layout.part(layer.id, "index_k")
        data_bytes, scale_bytes = (8, 4) if dtype == "fp8" else (4, 1)
        table = step.tables[group.index][step.slots[0]]
        pages = memory.view(layer.id, "index_k", (part.byte_count,), torch.uint8)
        keys = []
        for number in range(90 // 4):
            raw, slot = bytes(pages[int(table[number // 8])].numpy()), number % 8
            data = raw[slot * data_bytes : (slot + 1) * data_bytes]
            scales = raw[8 * data_bytes + slot * scale_bytes : 8 * data_bytes + (slot + 1) * scale_bytes]
            keys.append(unpack(data, scales, dtype))
        signs = np.array([[(-1) ** (i & j).bit_count() for j in range(8)] for i in range(8)])
        query = inputs.index_query.double().numpy() @ signs * 8**-0.5
        products = np.maximum(query @ np.array(keys).T, 0.0)
        scores = (products * inputs.index_weights.double().numpy()[..., None]).sum(1)
        ids = backend.select(layer.id, 0, inputs)
        for position in range(90):
            visible = (position + 1) // 4
            own = [number for number in ids[position].tolist() if number >= 0]
            assert len(own) == len(set(own)) == min(5, visible) and all(number < visible for number in own)
            best = np.sort(scores[position, :visible])[::-1][: len(own)]
            assert np.allclose(np.sort(scores[position, own])[::-1], best, rtol=1e-5, atol=1e-5)
        chosen[layer.id] = ids
    assert not torch.equal(chosen[1], chosen[3])


def unpack(data: bytes, scales: bytes, dtype: str) -> list[float]:
    if dtype == "fp8":
        [scale] = struct.unpack("<f", scales)
        return [scale * (-1) ** (byte >> 7) * E4M3[byte & 127] for byte in data]
    codes = [code for byte in data for code in (byte & 15, byte >> 4)]
    return [2.0 ** (scales[0] - 127) * (-1) ** (code >> 3) * E2M1[code & 7] for code in codes]


FORMATS = ["float32", "bfloat16", "fp8", "fp8-mxfp4"]


def test_formats_are_never_taken_for_one_another():
    """One name for all weights, so that the format alone tells: by a tier's key, and by two sides of a transfer."""
    specs = {dtype: cache_spec(REAL, block_tokens=256, dtype=dtype, fingerprint="one") for dtype in FORMATS}
    layouts = {dtype: Layout.build(spec, 1 << 26, pages_of(spec)) for dtype, spec in specs.items()}
    tags = {dtype: layout.tag for dtype, layout in layouts.items()}
    rows = "compressed=e4m3-ue8m0x64-bf16,index_k=hadamard-{},kv=e4m3-ue8m0x64-bf16"
    assert tags == {
        "float32": "row-major-1",
        "bfloat16": "row-major-1",
        "fp8": "deepseek-v4-planar-1:" + rows.format("e4m3-f32"),
        "fp8-mxfp4": "deepseek-v4-planar-1:" + rows.format("e2m1-ue8m0x32"),
    }
    assert len({format_digest(layout) for layout in layouts.values()}) == len(FORMATS)
    tables = {dtype: describe(layout) for dtype, layout in layouts.items()}
    for one, other in itertools.permutations(FORMATS, 2):
        assert differences(tables[one], tables[other]), (one, other)
    assert differences(tables["fp8"], tables["fp8-mxfp4"])[0] == (
        f"page layout: the sender has {tags['fp8']}, the receiver {tags['fp8-mxfp4']}"
    )
    assert not differences(tables["fp8"], describe(Layout.build(specs["fp8"], 1 << 27, pages_of(specs["fp8"]))))
    fingerprints = {cache_spec(REAL, block_tokens=256, dtype=dtype).fingerprint for dtype in FORMATS}
    assert len(fingerprints) == len(FORMATS)


@pytest.mark.parametrize("dtype", ["fp8", "fp8-mxfp4"])
def test_a_model_over_encoded_rows(dtype):
    """However it is cut, and with all that nobody needs being no number: the same logits, which are not those of plain
    rows, but near them."""
    prompt, found = tokens(50, 2), []
    for block, chunks in ((16, [50]), (64, [7, 1, 1, 24, 17])):
        with Cache(block=block, dtype=dtype, alone=True) as cache:
            sequence = cache.manager.open(prompt, reuse=False)
            parts = []
            for chunk in chunks:
                at = sequence.computed
                parts += cache.logits([(sequence, prompt[at : at + chunk], 0)])
            found.append(torch.cat(parts))
    assert float((found[0] - found[1]).abs().max()) < 1e-4
    off = (found[0] - model_logits(prompt)).abs()
    assert 1e-3 < float(off.mean()) < 0.3


def test_sizes_without_a_turn_are_refused():
    with pytest.raises(SpecError) as caught:
        cache_spec({**REAL, "index_head_dim": 96}, dtype="fp8")
    assert str(caught.value) == (
        "index rows of 96 elements cannot be turned by a Hadamard matrix\n"
        "hint: store the rows of this model plainly, or use a power of two from 4 on"
    )
