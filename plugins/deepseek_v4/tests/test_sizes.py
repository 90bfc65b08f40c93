"""Bytes of the released models: as their description counts them, as other engines count them, and as a manager hands
them out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.replay.command import command
from kvist_deepseek_v4.charges import charges
from kvist_deepseek_v4.formats import pages_of
from kvist_deepseek_v4.sizes import admission_bytes, fixed_bytes, growing_bytes_per_token
from kvist_deepseek_v4.spec import cache_spec

FLASH = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0]}
PRO = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}


@pytest.mark.parametrize(
    ("config", "dtype", "growing", "at_a_million"),
    [
        (FLASH, "fp8", 3850, 3.76),
        (FLASH, "fp8-mxfp4", 3514, 3.43),
        (FLASH, "bfloat16", 6880, 6.72),
        (PRO, "fp8", 5511, 5.38),
        (PRO, "fp8-mxfp4", 5031, 4.91),
        (PRO, "bfloat16", 9848, 9.62),
    ],
)
def test_history_of_a_token(config, dtype, growing, at_a_million):
    """The published figures: whole bytes, and GiB at 1 Mi tokens."""
    spec = cache_spec(config, block_tokens=256, dtype=dtype)
    found = growing_bytes_per_token(spec)
    assert int(found) == growing
    assert round(float(found) * 2**20 / 2**30, 2) == at_a_million
    # Pages add what fills them up, and it is told.
    layout = Layout.build(spec, 1 << 38, pages_of(spec))
    [history] = [group for group in layout.groups if not group.sparse]
    assert found <= history.page_bytes / 256 <= 1.05 * float(found)


@pytest.mark.parametrize(("config", "megabytes"), [(FLASH, (3.2, 1.7, 10.5)), (PRO, (4.6, 2.5, 16.3))])
def test_windows_and_states_of_a_sequence(config, megabytes):
    """Windows in all layers, states of the sparse ones, states of the heavy ones."""
    counts = {ratio: config["compress_ratios"][:-1].count(ratio) for ratio in (0, 4, 128)}
    parts = (sum(counts.values()) * 128 * 584, counts[4] * 8 * (8192 + 2048), counts[128] * 128 * 4096)
    assert tuple(round(part / 1e6, 1) for part in parts) == megabytes
    assert fixed_bytes(cache_spec(config, dtype="fp8")) == sum(parts)


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
@pytest.mark.parametrize(("dtype", "index"), [("fp8", 132), ("fp8-mxfp4", 68), ("bfloat16", 256)])
def test_a_replay_says_what_a_token_and_a_sequence_take(config, dtype, index, tmp_path):
    trace, path, out = tmp_path / "trace.jsonl", tmp_path / "config.json", tmp_path / "out.json"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [0, 1, 2]}))
    path.write_text(json.dumps(config))
    app = typer.Typer()
    app.command()(command)
    options = ["--config", path, "--memory", "2GiB", "--block-tokens", 256, "--dtype", dtype, "--json", out]
    ran = CliRunner().invoke(app, [str(each) for each in (trace, *options)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    row = 1024 if dtype == "bfloat16" else 584
    sparse, heavy = config["compress_ratios"].count(4), config["compress_ratios"].count(128)
    assert found["bytes_per_token"] == sparse * (row + index) / 4 + heavy * row / 128
    assert 0 <= found["padding_bytes_per_token"] < 0.06 * found["bytes_per_token"]
    # Two blocks of each window at most, which are rings of the window's tokens.
    windows = 128 * (config["num_hidden_layers"] * row + heavy * 4096) + 8 * sparse * 10_240
    assert 2 * windows <= found["bytes_per_sequence"] < 2.2 * windows
    assert f"{found['bytes_per_token']:,.2f} bytes per token" in " ".join(ran.stdout.split())


@pytest.mark.parametrize(
    ("config", "per_token", "vllm", "sglang"), [(FLASH, 322_437, 3915, 3899.25), (PRO, 470_362, 5609.25, 5586.75)]
)
def test_what_other_engines_count(config, per_token, vllm, sglang):
    """The figures of the models' description, and others by hand: pages of 37,440, 8,640 and 1,728 bytes."""
    kvist, trt, vl, sg = charges(config, 65_536, 8192)
    assert [each.engine for each in (kvist, trt, vl, sg)] == ["Kvist", "TensorRT-LLM", "vLLM", "SGLang"]
    assert trt.prompt == 65_536 * per_token
    sparse, heavy = config["compress_ratios"].count(4), config["compress_ratios"].count(128)
    layers = config["num_hidden_layers"]
    assert vl.token == (sparse * (37_440 + 8_640) + heavy * 1_728) / 256 == vllm
    # A window of 128 in pages of 64 touches 3, one of 8 in pages of 4 three, one of 128 in pages of 8 seventeen.
    assert vl.running == layers * 3 * 37_440 + sparse * 3 * (37_440 + 8_640) + heavy * 17 * 37_440
    assert sg.token == (sparse * (37_440 + 8_448) + heavy * 1_728) / 256 == sglang
    assert sg.running == layers * 2 * 149_760 + sparse * 2 * 8 * 10_240 + heavy * 128 * 4096
    # Kvist's long sequences cost no more than the least of these, and a prompt far less than all of its rows.
    assert kvist.token <= 1.03 * float(growing_bytes_per_token(cache_spec(config, dtype="fp8")))
    assert kvist.prompt < 0.1 * trt.prompt


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
@pytest.mark.parametrize("block_tokens", [128, 256])
@pytest.mark.parametrize("drafts", [0, 3])
def test_admission_bounds_what_a_manager_hands_out(config, block_tokens, drafts):
    """For all lengths and chunks: at least the pages of every kind, at most a tenth more in all. Afterwards all of it
    is free again, whether the sequence ended or was cancelled in the middle."""
    spec = cache_spec(config, block_tokens=block_tokens, dtype="fp8", drafts=drafts)
    layout = Layout.build(spec, 1 << 38, pages_of(spec))
    manager = PagedCacheManager(layout)
    for chunks in ([8192, 8192, 4096, 1, 1], [100] * 12, [1] * 300, [3, 129, 2048, 7, 5000], [257, 1, 383, 64] * 3):
        for cancelled in (False, True):
            sequence = manager.open(np.arange(sum(chunks), dtype=np.int32), reuse=False)
            for chunk in chunks[: len(chunks) // 2 if cancelled else None]:
                last = drafts if sequence.computed else 0
                estimate = admission_bytes(layout, sequence.computed, chunk, last)
                plan = manager.plan([Run(sequence, chunk, last)])
                step = plan.commit()
                held = {}
                for group in layout.groups:
                    table = step.tables[group.index][step.slots[0]]
                    held[group.name] = int(np.count_nonzero(table >= 0)) * group.page_bytes
                    assert estimate[group.name] >= held[group.name]
                assert sum(estimate.values()) <= 1.1 * sum(held.values())
                manager.complete(step, [chunk])
            manager.close(sequence)
            manager.check()
    manager.clear()
    assert list(manager._ledger.arena.taken_count) == [0] * len(layout.groups)
