"""Both spellings of the config, the bytes of the published model, and the text of every refusal."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.spec import Heads, History, Replicated
from kvist_minimax_m3.config import read_config
from kvist_minimax_m3.dtypes import dtype_name, index_dtype_name, require_fp8_bound
from kvist_minimax_m3.selection import Selection
from kvist_minimax_m3.spec import cache_spec

#: The published geometry as a checkpoint spells it, cut to five layers.
NESTED = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 5,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "vocab_size": 200064,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "dtype": "bfloat16",
    "sparse_attention_config": {
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_local_block": 1,
        "sparse_init_block": 0,
        "sparse_score_type": "max",
        "sparse_disable_index_value": [0, 0, 0, 1, 1],
        "sparse_attention_freq": [0, 0, 0, 1, 1],
    },
}


def changed(**fields):
    return {**NESTED, **fields}


def nested(**fields):
    return changed(sparse_attention_config={**NESTED["sparse_attention_config"], **fields})


def flat():
    config = MiniMaxM3VLTextConfig(**{name: value for name, value in NESTED.items() if name != "model_type"})
    return config.to_dict()


def test_streams_of_dense_and_sparse_layers():
    spec = cache_spec(NESTED, fingerprint="weights")
    assert [layer.id for layer in spec.layers] == [0, 1, 2, 3, 4]
    for layer in spec.layers:
        streams = {stream.name: stream for stream in layer.streams}
        assert list(streams) == (["k", "v"] if layer.id < 3 else ["k", "v", "index_k"])
        assert {stream.retention for stream in layer.streams} == {History()}
        for name in ("k", "v"):
            assert (streams[name].row.shape, streams[name].sharding) == ((4, 128), Heads(4))
    assert (streams["index_k"].row.shape, streams["index_k"].sharding) == ((128,), Replicated())
    assert (spec.block_tokens, spec.fingerprint, spec.max_tokens, spec.vocab_size) == (128, "weights", 524288, 200064)
    assert len(Layout.build(spec, 1 << 30).groups) == 1


@pytest.mark.parametrize("index_dtype", [None, "fp8"])
def test_bytes_of_the_published_model(index_dtype):
    """Table A.3 of the model's description: 60 layers, 57 of them sparse."""
    config = nested(sparse_attention_freq=[0] * 3 + [1] * 57, sparse_disable_index_value=True)
    spec = cache_spec({**config, "num_hidden_layers": 60}, index_dtype=index_dtype)
    per_token = {"k": 0, "v": 0, "index_k": 0}
    for layer in spec.layers:
        for stream in layer.streams:
            per_token[stream.name] += stream.row.row_bytes
    assert per_token["k"] + per_token["v"] == 122_880
    assert per_token["index_k"] == (14_592 if index_dtype is None else 7_296)
    [group] = Layout.build(spec, 1 << 30).groups
    assert group.content_bytes == 128 * sum(per_token.values())


def test_both_spellings_say_the_same():
    assert "sparse_attention_config" not in flat()
    one, other = (cache_spec(config, fingerprint="weights") for config in (NESTED, flat()))
    assert one == other
    assert read_config(NESTED) == read_config(flat())
    multimodal = {"model_type": "minimax_m3_vl", "text_config": NESTED}
    assert cache_spec(multimodal, fingerprint="weights") == one
    text = {name: value for name, value in NESTED.items() if name != "model_type"}
    through_transformers = MiniMaxM3VLConfig(text_config=text).to_dict()
    assert cache_spec(through_transformers, fingerprint="weights") == one


def test_defaults_are_those_of_transformers():
    bare = {name: NESTED[name] for name in ("model_type", "num_hidden_layers", "num_attention_heads")}
    ours = read_config({**bare, "num_key_value_heads": 4, "layer_types": ["minimax_m3_sparse"] * 5})
    theirs = MiniMaxM3VLTextConfig(num_hidden_layers=5)
    assert ours.head_dim == theirs.head_dim
    assert (ours.index_heads, ours.index_size) == (theirs.index_n_heads, theirs.index_head_dim)
    rule = (theirs.index_block_size, theirs.index_topk_blocks, theirs.index_local_blocks)
    assert ours.selection == Selection(*rule)
    assert read_config({**bare, "num_key_value_heads": 4}).sparse == (False,) * 5
    assert theirs.layer_types == ["full_attention"] * 5


def test_fingerprints_tell_dtypes_apart():
    digests = {cache_spec(NESTED, dtype=dtype).fingerprint for dtype in (None, "float16")}
    digests |= {cache_spec(NESTED, index_dtype=dtype).fingerprint for dtype in ("fp8", "float32")}
    assert len(digests) == 4
    assert cache_spec(NESTED).fingerprint == cache_spec({**NESTED, "use_cache": False}).fingerprint


def test_the_index_dtype_follows_the_rows_unless_it_is_named():
    def index(config, **how):
        return cache_spec(config, **how).layers[-1].streams[-1].row.dtype

    assert index(NESTED) == "bfloat16"
    assert index(NESTED, dtype="float32") == "float32"
    assert index(NESTED, dtype="float32", index_dtype="bf16") == "bfloat16"
    assert index({**NESTED, "index_dtype": "fp8"}) == "float8_e4m3fn"
    assert index({"model_type": "minimax_m3_vl", "text_config": NESTED, "index_dtype": "fp8"}) == "float8_e4m3fn"


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "e4m3", "FP8", "torch.float8_e4m3fn", "float8_e4m3fn"])
def test_one_type_has_many_names(name):
    """S8: a comparison with one spelling took the wrong branch."""
    assert index_dtype_name(name) == "float8_e4m3fn"
    one, other = cache_spec(NESTED, index_dtype=name), cache_spec(NESTED, index_dtype="float8_e4m3fn")
    assert one == other
    assert Layout.build(one, 1 << 30) == Layout.build(other, 1 << 30)


def refusal(call, *arguments, **how):
    with pytest.raises(SpecError) as caught:
        call(*arguments, **how)
    return str(caught.value)


REFUSED = [
    (
        {"model_type": "minimax_m2"},
        "model_type 'minimax_m2' is not served\nhint: served are minimax_m3_vl, minimax_m3_vl_text",
    ),
    ({"model_type": "minimax_m3_vl"}, "minimax_m3_vl: config field 'text_config' is missing"),
    (changed(num_hidden_layers=None), "config field 'num_hidden_layers' is missing"),
    (changed(num_attention_heads=0), "config field 'num_attention_heads' must be an int of at least 1, got 0"),
    (changed(num_key_value_heads=5), "num_key_value_heads=5 does not divide num_attention_heads=64"),
    (changed(head_dim=-1), "config field 'head_dim' must be an int of at least 1, got -1"),
    (nested(sparse_num_index_heads=0), "config field 'index_n_heads' must be an int of at least 1, got 0"),
    (nested(sparse_num_index_heads=6), "num_key_value_heads=4 does not divide index_n_heads=6"),
    (nested(sparse_num_index_heads=12), "index_n_heads=12 does not divide num_attention_heads=64"),
    (nested(sparse_index_dim=0), "config field 'index_head_dim' must be an int of at least 1, got 0"),
    (nested(sparse_block_size=0), "config field 'index_block_size' must be an int of at least 1, got 0"),
    (nested(sparse_topk_blocks=0), "config field 'index_topk_blocks' must be an int of at least 1, got 0"),
    (nested(sparse_local_block=-1), "config field 'index_local_blocks' must be an int of at least 0, got -1"),
    (nested(sparse_init_block=True), "config field 'index_init_blocks' must be an int of at least 0, got True"),
    (
        nested(sparse_score_type="mean"),
        "sparse_score_type='mean' is not served\nhint: blocks are ranked by their 'max' score",
    ),
    (
        nested(sparse_disable_index_value=False),
        "layer 3: sparse_disable_index_value=False: index values are not served\n"
        "hint: an index key only ranks blocks; use a checkpoint whose index branch has no values",
    ),
    (
        nested(sparse_disable_index_value=[1, 1, 1, 1, 0]),
        "layer 4: sparse_disable_index_value=0: index values are not served\n"
        "hint: an index key only ranks blocks; use a checkpoint whose index branch has no values",
    ),
    (
        nested(sparse_disable_index_value=[1]),
        "sparse_disable_index_value has 1 entries for num_hidden_layers=5",
    ),
    (nested(sparse_attention_freq=[1]), "sparse_attention_freq has 1 entries for num_hidden_layers=5"),
    (changed(layer_types=["full_attention"]), "layer_types has 1 entries for num_hidden_layers=5"),
    (
        changed(layer_types=["sliding_attention"] * 5),
        "layer_types[0] is 'sliding_attention', which is not served\n"
        "hint: served are 'full_attention' and 'minimax_m3_sparse'",
    ),
    (
        changed(index_topk_blocks=8),
        "index_topk_blocks=8, but sparse_attention_config has sparse_topk_blocks=16\nhint: leave one of the two out",
    ),
    (
        changed(rope_parameters={"rope_type": "dynamic"}),
        "rope type 'dynamic': rows would change with the length of the sequence\n"
        "hint: use a rope type that does not depend on the length",
    ),
    (
        {**nested(sparse_index_dim=32), "rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope turns 64 elements of a head, an index key has index_head_dim=32\n"
        "hint: set rope_parameters['partial_rotary_factor'] as the checkpoint has it",
    ),
    (
        changed(index_group_reduce="mean"),
        "Selection(group_reduce='mean') is unknown\nhint: use one of per_index_head, union, max",
    ),
    (
        changed(index_dtype="uint8"),
        "index keys cannot be stored as uint8\nhint: use one of bfloat16, float16, float32, float64, float8_e4m3fn; "
        "8 bits are float8_e4m3fn without scales, and no other type of 8 bits",
    ),
    (
        changed(index_dtype="float8_e5m2"),
        "index keys cannot be stored as float8_e5m2\nhint: use one of bfloat16, float16, float32, float64, "
        "float8_e4m3fn; 8 bits are float8_e4m3fn without scales, and no other type of 8 bits",
    ),
    (
        changed(dtype="nvfp4"),
        "unknown dtype 'nvfp4'\nhint: use one of bfloat16, float16, float32, float64, float8_e4m3fn, float8_e5m2, "
        "int16, int32, int64, int8, uint8",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refusals(config, message):
    assert refusal(cache_spec, config) == message


@pytest.mark.parametrize("page_tokens", [48, 256])
def test_a_page_that_does_not_divide_a_block_is_refused(page_tokens):
    """S6: pages that are no part of a block were taken for blocks."""
    assert refusal(cache_spec, NESTED, block_tokens=page_tokens) == (
        f"pages of {page_tokens} tokens do not divide sparse blocks of 128\n"
        "hint: use block_tokens=128, or a divisor of it"
    )
    dense = {**NESTED, "layer_types": ["full_attention"] * 5}
    assert cache_spec(dense, block_tokens=page_tokens).block_tokens == page_tokens


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [("block_tokens", 0, 1), ("topk", 0, 1), ("topk", 1.5, 1), ("local_blocks", -1, 0), ("init_blocks", -1, 0)],
)
def test_numbers_of_a_selection(field, value, least):
    assert refusal(Selection, **{field: value}) == f"Selection({field}={value!r}): must be an int of at least {least}"


def test_the_bound_of_fp8_index_keys():
    require_fp8_bound(64, 448 / 8)  # exactly 448
    require_fp8_bound(128, 1.5)
    assert refusal(require_fp8_bound, 128, 40.0) == (
        "index keys may reach 452.5, float8_e4m3fn ends at 448\nhint: store the index keys of this model as bfloat16"
    )
    assert refusal(require_fp8_bound, 128, float("nan")).startswith("index keys may reach nan,")


def test_names_of_dtypes():
    assert [dtype_name(name) for name in ("bf16", "torch.bfloat16", "half", "fp32")] == [
        "bfloat16",
        "bfloat16",
        "float16",
        "float32",
    ]


def test_the_spec_factory_is_light():
    script = "import sys, kvist_minimax_m3, kvist_minimax_m3.plugin, kvist_minimax_m3.spec; kvist_minimax_m3.Selection;"
    script += "kvist_minimax_m3.SparseInputs; print(sorted({'torch', 'triton', 'transformers'} & {*sys.modules}))"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
