"""Requests of every family of models move between processes: index keys, compressed rows, window tails and states."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from moving import MODELS, OtherProcess, build

from kvist.errors import TransferError
from kvist_transformers import Request

NEW = 12


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def require_ucx() -> None:
    from kvist_transceiver_ucx.library import load

    try:
        load()
    except TransferError as error:
        pytest.skip(f"UCX is needed: {error.message}")


def in_one_process(family: str, turns: list[list[int]], new: int) -> list[list[int]]:
    with build(family) as engine:
        return [
            completion.tokens.tolist()
            for turn in turns
            for completion in engine.generate([Request(turn, max_new_tokens=new)])
        ]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shm", "tcp", "ucx"])
def test_families_move_and_go_on(scheme: str) -> None:
    """A first turn, and a second one of which the decode side has all but the newest tokens."""
    if scheme == "ucx":
        require_ucx()
    with OtherProcess(scheme, "prefill") as prefill, OtherProcess(scheme, "decode") as decode:
        for family in MODELS:
            rng = np.random.default_rng(5)
            prefill.begin("build", family)
            decode.call("build", family)
            hello = prefill.end()
            # Longer than every window, and neither of them a multiple of a block.
            turns = [rng.integers(1, 97, 77).tolist()]
            for number in range(2):
                prompt, name = turns[-1], f"{family} {number}"
                given, reason, sent = prefill.call("prefill", name, prompt, NEW)
                assert (len(given), reason) == (1, "moved"), name
                tokens, computed, reused, come = decode.call("adopt", name, prompt, NEW, given, hello)
                # By value: every page that was to come is the one that left.
                assert len(sent) == len(come), name
                for group, (left, right) in enumerate(zip(sent, come)):
                    assert right.items() <= left.items(), f"{name}: other bytes came in group {group}"
                assert any(come), f"{name}: nothing came"
                # Of the prompt nothing was computed again; the first token is fed back here.
                assert computed == 1, name
                assert (reused > 0) == (number > 0), name
                # By continued decoding.
                turns.append([*prompt, *tokens, *rng.integers(1, 97, 9).tolist()])
                assert tokens == in_one_process(family, [turns[number]], NEW)[0], name
            assert prefill.call("close") == decode.call("close") == [], family
