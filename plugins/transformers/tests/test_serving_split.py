"""A server beside a process that computes prompts: the same answers, by the route that costs least."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx2
import pytest
from tiny_server import Running, running, tiny_model, tiny_tokenizer

from kvist_transformers import Engine, Request, Sampling
from kvist_transformers.disaggregation.worker import Settings
from kvist_transformers.models import load_model
from kvist_transformers.serving.split import SplitWorker, make_port

pytestmark = pytest.mark.slow
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    port = make_port("shm")
    prefill = Settings("prefill", folder, "shm", "float32", "2MiB", 1)
    # What is loaded has another config than what was made, and caches of different models do not mix.
    model = load_model(folder, "float32")
    with running(model=model, port=port, make=lambda engine: SplitWorker(engine, port, prefill)) as made:
        yield made
    assert made.service.worker.failure is None


def ask(client, prompt, count, **how):
    how = {"temperature": 0, "extra_body": ENDLESS, **how}
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=count, **how)


def routed(server: Running) -> tuple[int, int, int]:
    routes = server.service.worker.routes
    return routes.near, routes.far, routes.lost


def test_requests_go_where_most_of_their_prompt_is_or_is_computed_best(server):
    with server.client() as client:
        near, far, _ = routed(server)
        prompt = [20 + number % 60 for number in range(100)]
        expected = server.greedy(prompt, 20)
        first = ask(client, prompt, 20)
        assert first.choices[0].text == server.text(expected)
        assert routed(server) == (near, far + 1, 0)
        stats = server.service.worker.engine.manager.stats()
        assert stats.received_tokens == 100
        # The second turn is here already.
        second = ask(client, [*prompt, *expected, 9, 8], 6)
        assert second.choices[0].text == server.text(server.greedy([*prompt, *expected, 9, 8], 6))
        assert routed(server) == (near + 1, far + 1, 0)
        assert second.usage.prompt_tokens_details.cached_tokens == 119
        # For another tenant it is not, nor there.
        other = ask(client, prompt, 6, extra_body={**ENDLESS, "cache_salt": "other"}, stream=True)
        assert "".join(chunk.choices[0].text for chunk in other) == server.text(server.greedy(prompt, 6))
        assert routed(server) == (near + 1, far + 2, 0)
        # Another end of the same prompt: what that process has, it does not compute.
        forked = [*prompt[:40], *range(40, 90)]
        server.service.worker.engine.manager.clear()
        assert ask(client, forked, 6).usage.prompt_tokens_details.cached_tokens == 40
        assert server.settled()


def test_one_token_short_prompts_seeds_and_logarithms(server):
    with server.client() as client:
        prompt = [90 - number % 70 for number in range(80)]
        one = ask(client, prompt, 1)
        assert one.choices[0].text == server.text(server.greedy(prompt, 1))
        assert one.usage.completion_tokens == 1
        before = routed(server)
        ask(client, prompt[:10], 4)
        wanted = ask(client, prompt, 4, logprobs=1)
        assert len(wanted.choices[0].logprobs.token_logprobs) == 4
        assert routed(server) == (before[0] + 2, before[1], 0)
        how = {"temperature": 0.9, "seed": 3, "n": 2}
        salted = {**ENDLESS, "cache_salt": "seeds"}
        texts = [choice.text for choice in ask(client, prompt, 12, extra_body=salted, **how).choices]
        with Engine(server.model, memory="1MiB", max_batch_tokens=64, max_sequences=4) as engine:
            requests = [
                Request(prompt, max_new_tokens=12, sampling=Sampling(temperature=0.9, seed=seed)) for seed in (3, 4)
            ]
            assert [server.text(done.tokens.tolist()) for done in engine.generate(requests)] == texts
        assert server.settled()


def test_clients_that_go_away_leave_nothing(server):
    for number in range(12):
        body = {"prompt": [5 + number] * 200, "max_tokens": 200, "ignore_eos": True}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{server.url}/v1/completions", json=body, timeout=0.02 * (1 + number % 4))
    end = time.monotonic() + 30
    while server.service.worker.in_flight and time.monotonic() < end:
        time.sleep(0.02)
    assert server.settled()


def test_when_the_process_dies_prompts_are_computed_here(server):
    worker = server.service.worker
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok", "prefill": "ok"}
    with server.client() as client:
        worker._end._process.kill()
        prompt = [70] * 90
        assert ask(client, prompt, 8).choices[0].text == server.text(server.greedy(prompt, 8))
        end = time.monotonic() + 20
        while worker.routes.open and time.monotonic() < end:
            time.sleep(0.02)
        assert httpx2.get(f"{server.url}/health").json() == {"status": "ok", "prefill": "lost"}
        near, far, _ = routed(server)
        prompt = [71] * 90
        assert ask(client, prompt, 8).choices[0].text == server.text(server.greedy(prompt, 8))
        assert routed(server)[:2] == (near + 1, far)
        assert "kvist_prefill_open 0" in httpx2.get(f"{server.url}/metrics").text
        assert server.settled()


def test_what_nobody_will_ask_for_holds_no_page_once_it_is_withdrawn():
    port = make_port("shm")
    with Engine(tiny_model(), memory="1MiB", max_batch_tokens=64, max_sequences=4, port=port) as engine:
        handle = engine.prefill(Request(range(20, 90), max_new_tokens=5), "asked by nobody")
        while not handle.done:
            engine.step()
        assert engine.manager.stats().groups[0].held == 5
        port.withdraw("never sent")
        port.withdraw("asked by nobody")
        end = time.monotonic() + 20
        while engine.manager.stats().groups[0].held and time.monotonic() < end:
            engine.step()
            time.sleep(0.01)
        assert engine.manager.stats().groups[0].held == 0
