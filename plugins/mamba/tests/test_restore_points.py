"""Where prompts leave snapshots: points worked out by hand for blocks of 32 tokens, and what another prompt reuses."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.layout import Layout
from kvist.manager import PagedCacheManager, Run
from kvist.restore import RestorePolicy
from kvist_mamba import cache_spec

BLOCK = 32
#: Few and small, but of both kinds: keys and values beside states.
CONFIG = {
    "model_type": "bamba",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "attn_layer_indices": [1],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_n_heads": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "max_position_embeddings": 16384,
    "vocab_size": 1 << 20,
}


@pytest.mark.parametrize(
    ("prompt_length", "every", "points"),
    [
        (7639, 4096, [4096, 7616]),
        (8193, 4096, [4096, 8192]),
        (100, 4096, [96]),
        (31, 4096, []),
        (64, 4096, [32]),  # The last token is always computed: a snapshot at 64 would serve nobody.
        (7680, 256, [*range(256, 7648, 256), 7648]),
    ],
)
def test_points_of_a_prompt(prompt_length, every, points):
    policy = RestorePolicy(every_blocks=every // BLOCK)
    assert policy.prompt_points(prompt_length, 0, 0, BLOCK) == points


@pytest.mark.parametrize(
    ("known", "reused", "points"),
    [
        (1500, 0, [1472, 2176]),  # Leaves what is known at 1500, in the block that begins at 1472.
        (1500, 1472, [2176]),  # That is reused already.
        (31, 0, [2176]),  # In its first block.
        (0, 0, [2176]),  # Nothing is known.
    ],
)
def test_a_branch_is_a_point(known, reused, points):
    assert RestorePolicy().prompt_points(2200, reused, known, BLOCK) == points


class Cache:
    """A manager of a hybrid, asked for whole prompts."""

    def __init__(self, **policy):
        layout = Layout.build(cache_spec(CONFIG, block_tokens=BLOCK), 32 << 20)
        self.manager = PagedCacheManager(layout, restore=RestorePolicy(**policy))

    def turn(self, prompt):
        """Computes a prompt as its restore points ask for. Returns what it reused."""
        sequence = self.manager.open(prompt)
        while sequence.computed < len(prompt):
            end = sequence.next_end(len(prompt))
            self.manager.complete(self.manager.plan([Run(sequence, end - sequence.computed)]).commit())
        self.manager.close(sequence)
        self.manager.check()
        return sequence.reused


def text(*parts):
    """``(seed, count)`` each: as many tokens of a text that the seed names."""
    return np.concatenate([np.random.default_rng(seed).integers(0, 1 << 20, count) for seed, count in parts])


def test_the_same_prompt_of_whole_blocks_reuses_all_blocks_but_its_last():
    cache = Cache()
    assert [cache.turn(text((1, 2 * BLOCK))) for _ in range(2)] == [0, BLOCK]
    assert [cache.turn(text((2, 7648))) for _ in range(2)] == [0, 7616]


def test_siblings_reuse_what_they_share_from_the_third_on():
    """The only other point lies in what the first has for itself: the second finds the branch and leaves a snapshot."""
    cache = Cache(every_blocks=1584 // BLOCK)
    assert [cache.turn(text((1, 1500), (seed, 700))) for seed in (2, 3, 4, 5)] == [0, 0, 1472, 1472]


def test_a_conversation_reuses_the_turn_before():
    cache = Cache()
    parts, reused = [], []
    for turn in range(5):
        parts.append((turn, 100))
        reused.append(cache.turn(text(*parts)))
    assert reused == [0, 100, 200, 300, 400]


def test_a_regular_point_serves_who_leaves_behind_it():
    cache = Cache(every_blocks=128)
    cache.turn(text((1, 8000)))
    assert cache.turn(text((1, 5000), (2, 100))) == 4096
    assert Cache().turn(text((1, 5000), (2, 100))) == 0


def test_without_a_snapshot_keys_and_values_alone_are_no_hit():
    """The pages of attention are all there, at every block; the state is not."""
    cache = Cache()
    cache.turn(text((1, 1000)))
    assert cache.turn(text((1, 900), (2, 50))) == 0
    assert cache.turn(text((1, 900), (3, 50))) == 896
