"""Prompts computed by one engine and answers by another: tokens are those of one engine, whatever goes wrong."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvist.errors import RequestError, StateError
from kvist.registry import default_registry
from kvist.transfer.outcome import Patience
from kvist.transfer.transport import TransportContext
from kvist_transformers import Engine, Request, Sampling
from kvist_transformers.disaggregation.port import Arrival, Port
from kvist_transformers.job import Source

PATIENCE = Patience(request_s=20.0, silent_s=15.0)


class Side:
    """An engine with a port. arrivals: what its port was told."""

    def __init__(self, engines: Callable[..., Engine], model: Any, scheme: str) -> None:
        entry = default_registry().transceiver(scheme)
        self.arrivals: list[Arrival] = []
        transport = entry.resolve(entry.info.factory)(TransportContext("side"))
        self.port = Port(transport, patience=PATIENCE, on_arrival=self.arrivals.append)
        self.engine = engines(model, port=self.port)

    @property
    def source(self) -> Callable[[str], Source]:
        return lambda name: Source(name, (self.port.hello(),))


@pytest.fixture
def pair(engines: Callable[..., Engine], tiny: Callable[..., Any]) -> Callable[..., tuple[Side, Side]]:
    """``pair(model_type, scheme)``: a prefill and a decode side, on models of their own."""

    def make(model_type: str, scheme: str = "shm") -> tuple[Side, Side]:
        made = [Side(engines, copy.deepcopy(tiny(model_type)), scheme) for _ in range(2)]
        return made[0], made[1]

    return make


def run(*sides: Side, until: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20.0
    while not until():
        assert time.monotonic() < until_s, "it has not happened within 20 s"
        for side in sides:
            side.engine.step()


def moved(prefill: Side, decode: Side, name: str, request: Request) -> np.ndarray:
    """The tokens of a request that goes through both."""
    first = prefill.engine.prefill(request, name)
    run(prefill, until=lambda: first.done)
    assert first.completion().finish_reason == "moved" and len(first.tokens) == 1
    last = decode.engine.adopt(request, prefill.source(name), first.tokens)
    run(prefill, decode, until=lambda: last.done)
    completion = last.completion()
    assert completion.error is None and completion.prompt_tokens == len(request.tokens)
    return completion.tokens


def settled(*sides: Side) -> None:
    """Nothing of any request is left."""
    run(*sides, until=lambda: all(not side.port.open and side.engine.idle for side in sides))
    for side in sides:
        stats = side.port.stats()
        assert (stats.open_sessions, stats.quarantined_pages) == (0, 0)
        assert side.engine.manager.stats().open_sequences == 0
        assert all(group.held == 0 for group in side.engine.manager.stats().groups)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_tokens_are_those_of_one_engine(pair, tiny, greedy, model_type, scheme):
    prefill, decode = pair(model_type, scheme)
    rng, model = np.random.default_rng(1), tiny(model_type)
    prompt = rng.integers(1, 97, 45)
    answer = moved(prefill, decode, "first", Request(prompt, max_new_tokens=9))
    assert answer.tolist() == greedy(model, prompt, 9)
    turn = np.concatenate([prompt, answer, rng.integers(1, 97, 7)])
    assert moved(prefill, decode, "second", Request(turn, max_new_tokens=6)).tolist() == greedy(model, turn, 6)
    settled(prefill, decode)
    # 45 and 9 tokens, of which the last was never fed back, in blocks of 16: three of them are whole.
    assert [(each.tokens, each.reused) for each in decode.arrivals] == [(45, 0), (61, 48)]
    assert all(each.outcome.ok and each.byte_count > 0 for each in decode.arrivals)
    assert decode.arrivals[1].byte_count < decode.arrivals[0].byte_count


def test_samples_are_those_of_one_engine(pair, engines, tiny, prompts):
    [prompt] = prompts(1)
    request = Request(prompt, max_new_tokens=12, sampling=Sampling(temperature=1.0, seed=11))
    [alone] = engines(copy.deepcopy(tiny("llama"))).generate([request])
    prefill, decode = pair("llama")
    assert moved(prefill, decode, "r", request).tolist() == alone.tokens.tolist()
    settled(prefill, decode)


def test_what_ends_with_its_first_token_does_not_move(pair, tiny, greedy, prompts):
    [prompt] = prompts(1)
    prefill, _ = pair("llama")
    [token] = greedy(tiny("llama"), prompt, 1)
    for request, reason in (
        (Request(prompt, max_new_tokens=1), "length"),
        (Request(prompt, max_new_tokens=5, stop_token_ids={token}), "stop"),
    ):
        handle = prefill.engine.prefill(request, reason)
        run(prefill, until=lambda: handle.done)  # noqa: B023
        assert (handle.completion().finish_reason, handle.tokens.tolist()) == (reason, [token])
        assert prefill.port.open == 0
    settled(prefill)


def test_rows_that_do_not_come_are_computed(pair, tiny, greedy, prompts):
    [prompt] = prompts(1)
    prefill, decode = pair("llama")
    request = Request(prompt, max_new_tokens=8)
    given = np.array(greedy(tiny("llama"), prompt, 1), np.int32)
    gone = prefill.source("nobody knows it")
    prefill.engine.close()
    handle = decode.engine.adopt(request, gone, given)
    run(decode, until=lambda: handle.done)
    assert handle.tokens.tolist() == greedy(tiny("llama"), prompt, 8)
    assert handle.completion().computed_tokens == len(prompt) + 1
    assert not decode.arrivals[0].outcome.ok
    settled(decode)


def test_a_request_that_is_on_its_way_can_be_cancelled(pair, prompts):
    [prompt] = prompts(1)
    prefill, decode = pair("llama")
    handle = decode.engine.adopt(
        Request(prompt, max_new_tokens=8), prefill.source("never offered"), np.ones(1, np.int32)
    )
    decode.engine.step()
    assert decode.port.open == 1
    handle.cancel()
    assert handle.completion().finish_reason == "cancelled" and handle.tokens.tolist() == [1]
    settled(prefill, decode)
    assert decode.arrivals == []


def test_callbacks_hear_of_the_given_tokens_too(pair, tiny, greedy, prompts):
    [prompt] = prompts(1)
    prefill, decode = pair("llama")
    request, heard = Request(prompt, max_new_tokens=6), []
    first = prefill.engine.prefill(request, "r")
    run(prefill, until=lambda: first.done)
    last = decode.engine.adopt(
        request, prefill.source("r"), first.tokens, lambda _, tokens: heard.extend(tokens.tolist())
    )
    run(prefill, decode, until=lambda: last.done)
    assert heard == greedy(tiny("llama"), prompt, 6)


def test_refusals(pair, engines, tiny):
    engine = engines(copy.deepcopy(tiny("llama")))
    request = Request([1, 2, 3], max_new_tokens=2)
    with pytest.raises(StateError) as caught:
        engine.prefill(request, "r")
    assert str(caught.value) == (
        "prefill() of an engine without a port\nhint: make it with Engine(..., port=Port(...))"
    )
    with pytest.raises(StateError) as caught:
        engine.adopt(request, Source("r", (b"",)), np.ones(1, np.int32))
    assert str(caught.value) == "adopt() of an engine without a port\nhint: make it with Engine(..., port=Port(...))"
    side, _ = pair("llama")
    hint = "\nhint: adopt what prefill() ended as 'moved', with the tokens of its completion"
    for count, what in ((0, "not begun"), (2, "ended")):
        with pytest.raises(RequestError) as error:
            side.engine.adopt(request, side.source("r"), np.ones(count, np.int32))
        assert str(error.value) == f"adopt() of a request with {count} of 2 tokens, which has {what}{hint}"
    with pytest.raises(StateError) as caught:
        engines(copy.deepcopy(tiny("llama")), port=side.port)
    assert str(caught.value) == "this port has an engine already\nhint: make a port for each engine"
