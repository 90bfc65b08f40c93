"""What the configs say, the bytes that follow, and what is refused."""

from __future__ import annotations

import attrs
import pytest

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.spec import CacheSpec, History, RowFormat, Stream, Window
from kvist_deepseek_v4.config import read_config
from kvist_deepseek_v4.geometry import layers_of
from kvist_deepseek_v4.sizes import fixed_bytes, growing_bytes_per_token
from kvist_deepseek_v4.spec import cache_spec, mtp_spec

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

#: The released schedules, each with the ratio of its one multi-token prediction layer at the end.
FLASH = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "dtype": "bfloat16",
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
}
PRO = {**FLASH, "num_hidden_layers": 61, "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0], "index_topk": 1024}
TINY = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "head_dim": 32,
    "index_head_dim": 16,
    "index_topk": 3,
    "sliding_window": 8,
    "partial_rotary_factor": 0.25,
    "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE, HEAVY],
    "compress_rates": {SPARSE: 4, HEAVY: 16},
}


def kinds(config):
    return [layer.ratio for layer in read_config(config).layers]


@pytest.mark.parametrize(("config", "csa", "hca", "sliding"), [(FLASH, 21, 20, 2), (PRO, 30, 31, 0)])
def test_the_schedule_is_the_checkpoints(config, csa, hca, sliding):
    found = read_config(config)
    assert (kinds(config).count(4), kinds(config).count(128), kinds(config).count(0)) == (csa, hca, sliding)
    assert all(layer.overlap == layer.indexed == (layer.ratio == 4) for layer in found.layers)
    assert [layer.ratio for layer in found.mtp_layers] == [0]


def test_spellings_agree():
    ratios = {0: SLIDING, 4: SPARSE, 128: HEAVY}
    types = [ratios[ratio] for ratio in FLASH["compress_ratios"][:43]]
    flat = {name: value for name, value in FLASH.items() if name != "compress_ratios"}
    assert kinds({**flat, "layer_types": types}) == kinds(FLASH)
    assert kinds({**FLASH, "layer_types": types}) == kinds(FLASH)
    # Without the ratio of the multi-token prediction layer, and with 1 for "not compressed".
    assert kinds({**FLASH, "compress_ratios": FLASH["compress_ratios"][:-1]}) == kinds(FLASH)
    assert kinds({**FLASH, "compress_ratios": [1, 1, *FLASH["compress_ratios"][2:]]}) == kinds(FLASH)
    legacy = {name: value for name, value in TINY.items() if name != "compress_rates"}
    assert kinds({**legacy, "compress_rate_csa": 4, "compress_rate_hca": 16}) == kinds(TINY) == [0, 4, 16, 4, 16]


def test_transformers_configs_are_read():
    from transformers import DeepseekV4Config

    assert kinds(DeepseekV4Config(**{k: v for k, v in FLASH.items() if k != "dtype"}).to_dict()) == kinds(FLASH)


@pytest.mark.parametrize(
    ("config", "growing", "fixed"),
    [
        # 21 layers of (1024 + 256) / 4 and 20 of 1024 / 128 bytes; windows of 1024 bytes in 43 layers, states of
        # 8 rows of 8192 + 2048 bytes in 21 and of 128 rows of 4096 bytes in 20.
        (FLASH, 6880, 43 * 128 * 1024 + 21 * 8 * 10240 + 20 * 128 * 4096),
        (PRO, 9848, 61 * 128 * 1024 + 30 * 8 * 10240 + 31 * 128 * 4096),
    ],
)
@pytest.mark.parametrize("block_tokens", [128, 256])
def test_bytes_of_the_released_models(config, growing, fixed, block_tokens):
    spec = cache_spec(config, block_tokens=block_tokens)
    assert growing_bytes_per_token(spec) == growing
    assert fixed_bytes(spec) == fixed
    layout = Layout.build(spec, 1 << 36)
    by_retention = {group.retention: group for group in layout.groups}
    # In a block of 256 tokens, a ring of 128 rows is half a block.
    window = Window(128, ring=128 if block_tokens == 256 else 0)
    assert set(by_retention) == {window, History(), Window(8, ring=8)}
    assert by_retention[History()].content_bytes == growing * block_tokens
    layers = len(spec.layers)
    heavy = sum(1 for layer in spec.layers for stream in layer.streams if stream.tokens_per_row == 128)
    assert by_retention[window].content_bytes == 128 * (layers * 1024 + heavy * 4096)
    # Short tails cost their rows, not a block's.
    assert by_retention[Window(8, ring=8)].content_bytes == 8 * 10240 * (21 if config is FLASH else 30)
    assert layout.reuse_unit == 1 and layout.padding_fraction < 0.03


def test_streams_of_every_kind_of_layer():
    spec = cache_spec(TINY, block_tokens=32, dtype="float32", drafts=4)
    row = RowFormat((32,), "float32")
    window = Stream("kv", row, Window(8, ring=12))
    heavy = (
        window,
        Stream("compressed", row, History(), 16, continued=True),
        Stream("state", RowFormat((2, 32), "float32"), Window(16)),
    )
    sparse = (
        window,
        Stream("compressed", row, History(), 4, continued=True),
        Stream("state", RowFormat((2, 64), "float32"), Window(8, ring=12)),
        Stream("index_k", RowFormat((16,), "float32"), History(), 4, continued=True),
        Stream("index_state", RowFormat((2, 32), "float32"), Window(8, ring=12)),
    )
    assert [layer.streams for layer in spec.layers] == [(window,), sparse, heavy, sparse, heavy]
    assert Layout.build(spec, 1 << 20).most_drafts == 4
    # A ring is worth it in longer blocks only.
    short = cache_spec(TINY, block_tokens=16, drafts=4)
    assert {stream.retention for layer in short.layers for stream in layer.streams} == {
        Window(8),
        History(),
        Window(16),
    }


def test_multi_token_prediction_has_streams_of_its_own():
    target, draft = cache_spec(FLASH), mtp_spec(FLASH)
    [layer] = draft.layers
    assert (layer.id, draft.domain) == (43, "mtp")
    assert layer.streams == (Stream("kv", RowFormat((512,), "bfloat16"), Window(128)),)
    layout = Layout.build(target, 1 << 34, drafts=[draft])
    assert [group.domain for group in layout.groups] == ["target", "target", "target", "mtp"]
    with pytest.raises(SpecError) as caught:
        mtp_spec({**TINY, "num_nextn_predict_layers": 0})
    assert str(caught.value) == "the model has no multi-token prediction layers: num_nextn_predict_layers=0"


def test_fingerprints_tell_models_apart():
    assert (
        cache_spec(TINY, block_tokens=16).fingerprint
        != cache_spec({**TINY, "rope_theta": 5.0}, block_tokens=16).fingerprint
    )
    assert (
        cache_spec(TINY, block_tokens=16, dtype="bfloat16").fingerprint != cache_spec(TINY, block_tokens=16).fingerprint
    )
    assert cache_spec({**TINY, "use_cache": False}, block_tokens=16) == cache_spec(TINY, block_tokens=16)
    assert cache_spec(TINY, block_tokens=16, fingerprint="w").fingerprint == "w"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not served\nhint: served is deepseek_v4"),
        ({"num_hidden_layers": None}, "config field 'num_hidden_layers' is missing"),
        ({"head_dim": 0}, "config field 'head_dim' must be an int of at least 1, got 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2: DeepSeek-V4 has one row for all heads\nhint: set it to 1"),
        (
            {"layer_types": None},
            "config fields 'compress_ratios' and 'layer_types' are missing\nhint: the released models differ in their "
            "schedules, so none is assumed: take it from the checkpoint",
        ),
        ({"layer_types": [SLIDING] * 4}, "layer_types has 4 entries for num_hidden_layers=5"),
        ({"layer_types": "all"}, "config field 'layer_types' must be a list, got 'all'"),
        (
            {"layer_types": [SLIDING] * 4 + ["full_attention"]},
            "layer_types[4] is 'full_attention', which is not served\nhint: served are sliding_attention, "
            "compressed_sparse_attention, heavily_compressed_attention",
        ),
        (
            {"compress_ratios": [0, 4, 4, 4, 16]},
            "layer 2: compress_ratios has 4, but layer_types has 'heavily_compressed_attention'\n"
            "hint: leave one of the two out",
        ),
        (
            {"compress_ratios": [0, 4, 16, 4]},
            "compress_ratios has 4 entries for num_hidden_layers=5 and num_nextn_predict_layers=1",
        ),
        (
            {"compress_ratios": [0, 4, 2, 4, 16]},
            "compress_ratios[2] is 2, which is not served\nhint: served are 0, 4, 16",
        ),
        (
            {"compress_ratios": [0, 4, 16, 4, 16, 4]},
            "compress_ratios[5] is 4, of a multi-token prediction layer\n"
            "hint: these layers have a window only, their ratio is 0",
        ),
        (
            {"compress_rates": {SPARSE: 1}},
            "config field \"compress_rates['compressed_sparse_attention']\" must be an int of at least 2, got 1",
        ),
        ({"compress_rate_hca": 4}, "both kinds of compressed layers have the rate 4"),
        (
            {"partial_rotary_factor": 1.0},
            "rope turns 32 elements, of rows of 16: they are pairs, and no more than there are\n"
            "hint: set partial_rotary_factor or qk_rope_head_dim as the checkpoint has it",
        ),
        (
            {"rope_parameters": {"compress": {"rope_type": "dynamic"}}},
            "rope type 'dynamic': rows would change with the length of the sequence\n"
            "hint: use a rope type that does not depend on the length",
        ),
    ],
)
def test_configs_that_are_refused(change, text):
    with pytest.raises(SpecError) as caught:
        cache_spec({**TINY, **change}, block_tokens=16)
    assert str(caught.value) == text


def test_pages_hold_whole_rows():
    with pytest.raises(SpecError) as caught:
        cache_spec(FLASH, block_tokens=64)
    assert str(caught.value) == (
        "layer 3 stream 'compressed': block_tokens=64 is not a multiple of tokens_per_row=128\n"
        "hint: use a multiple of 128"
    )
    with pytest.raises(SpecError) as caught:
        cache_spec(FLASH, drafts=-1)
    assert str(caught.value) == "drafts=-1 cannot be negative"


def changed(stream, layer=1, **fields) -> CacheSpec:
    """The tiny model's spec with one stream changed."""
    spec = cache_spec(TINY, block_tokens=16, dtype="float32")
    layers = list(spec.layers)
    streams = [attrs.evolve(each, **fields) if each.name == stream else each for each in layers[layer].streams]
    layers[layer] = attrs.evolve(layers[layer], streams=streams)
    return attrs.evolve(spec, layers=layers)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            changed("index_k", name="k"),
            "has streams ['compressed', 'index_state', 'k', 'kv', 'state']\nhint: DeepSeek-V4 has 'kv' in each layer, "
            "with it 'compressed' and 'state', with these 'index_k' and 'index_state'",
        ),
        (changed("kv", row=RowFormat((1, 32), "float32")), "stream 'kv' has rows of shape (1, 32), expected (size,)"),
        (
            changed("kv", row=RowFormat((32,), "int8")),
            "stream 'kv' is stored as int8\nhint: use one of float32, bfloat16, float16",
        ),
        (
            changed("kv", retention=History()),
            "stream 'kv' is kept for History(), expected a Window without sinks",
        ),
        (
            changed("compressed", retention=Window(64)),
            "stream 'compressed' keeps rows of (32,) for Window(tokens=64, sinks=0), expected rows of (32,) "
            "for History()",
        ),
        (
            changed("state", row=RowFormat((2, 64), "bfloat16")),
            "stream 'state' holds sums to be: plain float32, one row per token",
        ),
        (
            changed("state", retention=Window(4)),
            "stream 'state' has rows of (2, 64) for Window(tokens=4, sinks=0), expected (2, 32) for Window(4), "
            "or (2, 64) for Window(8) where windows overlap",
        ),
    ],
)
def test_specs_that_no_backend_serves(spec, text):
    with pytest.raises(SpecError) as caught:
        layers_of(spec, "some")
    assert str(caught.value) == f"backend 'some': layer 1 {text}"
