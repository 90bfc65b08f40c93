"""What happens to others, and to the cache, when clients go away, ask for too much, or the engine or server ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_server import Running, running

from kvist.events import Moved, Removed, Stored, apply
from kvist_transformers.serving.server import ListenError, listen

ENDLESS = {"ignore_eos": True}
LONG = {"prompt": "the twig", "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}


def metrics(server: Running) -> dict[tuple[str, str], float]:
    page = httpx2.get(f"{server.url}/metrics").text
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def slowly(server: Running, seconds: float) -> None:
    """Each step takes at least so long."""
    engine = server.service.worker.engine
    step = engine.step

    def slow() -> bool:
        time.sleep(seconds)
        return step()

    engine.step = slow


def wait_until(true, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_goes_away_frees_its_pages_and_harms_nobody():
    with running() as server, server.client() as client:
        slowly(server, 0.01)
        manager = server.service.worker.engine.manager
        with ThreadPoolExecutor(1) as pool:
            prompt = server.tokenizer("a branch").input_ids
            other = pool.submit(
                lambda: client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=60, temperature=0, extra_body=ENDLESS
                )
            )
            # One in the middle of its stream, one that waits for the whole answer, one before its request is whole.
            with httpx2.stream("POST", f"{server.url}/v1/completions", json=LONG) as stream:
                next(stream.iter_lines())
            with pytest.raises(httpx2.ReadTimeout):
                httpx2.post(f"{server.url}/v1/completions", json={**LONG, "stream": False}, timeout=0.3)
            with socket.create_connection(server.url.removeprefix("http://").split(":")) as raw:
                raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            text = other.result(60).choices[0].text
        assert text == server.text(server.greedy(prompt, 60))
        wait_until(lambda: server.service.worker.in_flight == 0)
        assert server.settled()
        found = metrics(server)
        assert found["kvist_requests_total", "cancelled"] == 2
        assert found["kvist_requests_total", "length"] == 1
        # Far fewer steps than the two would have taken to their end.
        assert manager.stats().computed_tokens < 400


def test_a_full_queue_sends_clients_away_until_there_is_room():
    with running(max_in_flight=2) as server, server.client() as client:
        slowly(server, 0.01)
        with httpx2.stream("POST", f"{server.url}/v1/completions", json={**LONG, "n": 2}) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"] == {
                "message": "2 requests wait or run, and this server takes 2\nhint: try again later",
                "type": "rate_limit_error",
                "param": None,
                "code": "queue_full",
            }
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="x")
        wait_until(lambda: server.service.worker.in_flight == 0)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_what_never_fits_is_refused_while_others_run():
    with running(memory="64KiB") as server:
        slowly(server, 0.01)
        body = {**LONG, "max_tokens": 60}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": [5] * 300, "max_tokens": 100})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith("399 tokens never fit: they need ")
            assert error["message"].endswith("hint: shorten the request or give the cache more memory")
            text = "".join(
                json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                for line in lines
                if line and "[DONE]" not in line
            )
        prompt = server.tokenizer("the twig").input_ids
        assert server.text(server.greedy(prompt, 60)).endswith(text)
        assert server.settled()


def failing(server: Running, *, steps: int, after: int = 0) -> None:
    """The model fails in some steps."""
    adapter = server.service.worker.engine.adapter
    forward, calls = adapter.forward, iter(range(10**9))

    def fail(*arguments):
        if after <= next(calls) < after + steps:
            raise RuntimeError("broken chip")
        return forward(*arguments)

    adapter.forward = fail


def test_a_failed_step_ends_its_requests_and_the_server_goes_on():
    with running() as server, server.client() as client:
        failing(server, steps=1)
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(model="tiny", prompt="the twig", max_tokens=4)
        assert raised.value.body == {
            "message": "the engine failed: RuntimeError: broken chip\nhint: try again",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
        prompt = server.tokenizer("the twig").input_ids
        again = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0, extra_body=ENDLESS)
        assert again.choices[0].text == server.text(server.greedy(prompt, 8))
        assert server.settled()
        failing(server, steps=1, after=3)
        stream = client.completions.create(model="tiny", prompt="the twig", max_tokens=50, stream=True)
        with pytest.raises(openai.APIError) as told:
            list(stream)
        assert told.value.message == "the engine failed: RuntimeError: broken chip\nhint: try again"
        assert server.settled()
        assert httpx2.get(f"{server.url}/health").status_code == 200


def test_an_engine_that_always_fails_is_reported_and_nobody_hangs():
    with running() as server, server.client() as client:
        failing(server, steps=10**9)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model="tiny", prompt="the twig", max_tokens=4)
        for answered in (
            httpx2.get(f"{server.url}/health"),
            httpx2.get(f"{server.url}/v1/kv_events"),
            httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x"}),
        ):
            assert answered.status_code == 503
            assert answered.json()["error"]["message"] == (
                "the engine is broken: broken chip\nhint: see the server's log"
            )
        found = metrics(server)
        assert found["kvist_requests_total", "error"] == 3
        assert not any(name.startswith("kvist_cache") for name, _ in found)


def test_at_shutdown_what_runs_ends_and_nothing_new_is_taken():
    with running(drain_s=20) as server:
        slowly(server, 0.01)
        body = {**LONG, "max_tokens": 80}
        with httpx2.Client() as idle, httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
            assert idle.get(f"{server.url}/health").status_code == 200
            lines = stream.iter_lines()
            next(lines)
            server.server.should_exit = True
            wait_until(lambda: server.service.draining)
            with pytest.raises(httpx2.TransportError):
                httpx2.get(f"{server.url}/health")
            last = [line for line in lines if line][-2:]
        assert json.loads(last[0].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert last[1] == "data: [DONE]"
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_at_the_deadline_of_a_shutdown_what_is_left_is_told_and_cancelled():
    with running(drain_s=0.3) as server:
        slowly(server, 0.02)
        events = httpx2.stream("GET", f"{server.url}/v1/kv_events", timeout=30)
        with (
            ThreadPoolExecutor(1) as pool,
            events as feed,
            httpx2.stream("POST", f"{server.url}/v1/completions", json=LONG) as stream,
        ):
            whole = pool.submit(httpx2.post, f"{server.url}/v1/completions", json={**LONG, "stream": False})
            lines = stream.iter_lines()
            next(lines)
            wait_until(lambda: server.service.worker.in_flight == 2)
            server.server.should_exit = True
            last = [line for line in lines if line][-2:]
            assert json.loads(last[0].removeprefix("data: "))["error"]["code"] == "cancelled"
            assert last[1] == "data: [DONE]"
            answered = whole.result(30)
            assert answered.status_code == 503
            assert answered.json()["error"]["message"] == (
                "the request was cancelled\nhint: the server is shutting down"
            )
            list(feed.iter_lines())  # it ends
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_an_address_in_use_is_said():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError) as raised:
            listen("127.0.0.1", port)
    assert str(raised.value) == (
        f"cannot listen on 127.0.0.1, port {port}: Address already in use\n"
        "hint: choose another --host or --port; port 0 takes a free one"
    )


def as_event(name: str, data: dict) -> Stored | Moved | Removed:
    common = {
        "number": data["number"],
        "scope": data["scope"],
        "start": data["start"],
        "keys": tuple(bytes.fromhex(key) for key in data["keys"]),
        "groups": tuple(data["groups"]),
    }
    if name == "stored":
        return Stored(**common, parent=data["parent"], tokens=data["tokens"], tier=data["tier"])
    return Removed(**common, reason=data["reason"], tier=data["tier"])


def test_events_begin_with_a_snapshot_and_follow_the_index():
    with running(memory="128KiB") as server, server.client() as client:
        manager = server.service.worker.engine.manager
        client.completions.create(model="tiny", prompt=[7] * 50, max_tokens=2)
        index: set = set()
        numbers: list[int] = []
        ready = threading.Event()

        def read() -> None:
            with httpx2.stream("GET", f"{server.url}/v1/kv_events", timeout=60) as stream:
                name = ""
                for line in stream.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "event":
                        name = value
                    elif field == "data" and name == "snapshot":
                        snapshot = json.loads(value)
                        apply(index, [as_event("stored", each) for each in snapshot["stored"]])
                        numbers.append(snapshot["number"])
                        ready.set()
                    elif field == "data":
                        found = json.loads(value)
                        apply(index, [as_event(name, found)])
                        numbers.append(found["number"])

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert ready.wait(20)
        assert len(index) == 3
        # More than the cache holds, so that some is evicted.
        for token in range(20, 40):
            client.completions.create(
                model="tiny", prompt=[token] * 60, max_tokens=20, temperature=0, extra_body=ENDLESS
            )
        assert server.settled()
        with_listener = manager.listen()
        expected: set = set()
        apply(expected, with_listener.snapshot().stored)
        with_listener.close()
        wait_until(lambda: index == expected)
        assert manager.stats().groups[0].evicted > 0
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        server.server.should_exit = True
        reader.join(20)
        assert not reader.is_alive()


def test_metrics_are_the_stats():
    with running() as server, server.client() as client:
        for _ in range(3):
            client.completions.create(model="tiny", prompt=[9] * 40, max_tokens=6, temperature=0, extra_body=ENDLESS)
        httpx2.get(f"{server.url}/nowhere/at/all")
        assert server.settled()
        found = metrics(server)
        stats = server.service.worker.engine.manager.stats()
        # 39 of 40 tokens of a prompt can be reused, twice.
        assert found["kvist_cache_reused_tokens_total", ""] == stats.reused_tokens == 78
        assert found["kvist_cache_prompt_tokens_total", ""] == stats.prompt_tokens == 120
        assert found["kvist_request_cached_tokens_total", ""] == 78
        assert found["kvist_request_output_tokens_total", ""] == 18
        assert found["kvist_engine_generated_tokens_total", ""] == 18
        assert found["kvist_requests_total", "length"] == 3
        assert found["kvist_requests_in_flight", ""] == 0
        assert found["kvist_http_answers_total", "/v1/completions,200"] == 3
        assert found["kvist_http_answers_total", "other,404"] == 1
        group = stats.groups[0]
        pages = [found[f"kvist_cache_pages_{state}", group.name] for state in ("free", "cached", "held")]
        assert pages == [group.free, group.cached, 0]
        assert found["kvist_request_first_token_seconds_count", ""] == 3
        assert found["kvist_request_total_seconds_sum", ""] >= found["kvist_request_first_token_seconds_sum", ""] > 0


def test_iteration_statistics_are_those_of_the_requests_and_only_newer_ones_when_asked():
    with running() as server, server.client() as client:
        for _ in range(2):
            client.completions.create(model="tiny", prompt=[9] * 40, max_tokens=6, temperature=0, extra_body=ENDLESS)
        assert server.settled()
        url = f"{server.url}/v1/iteration_stats"
        answered = httpx2.get(url)
        assert answered.headers["content-type"] == "application/x-ndjson"
        first, *records = map(json.loads, answered.text.splitlines())
        assert (first["kind"], first["source"]) == ("begin", "tiny")
        requests = [record for record in records if record["kind"] == "request"]
        assert [(each["prompt_tokens"], each.get("reused_tokens", 0)) for each in requests] == [(40, 0), (40, 39)]
        steps = [record for record in records if record["kind"] == "step"]
        assert sum(step.get("reused_tokens", 0) for step in steps) == 39
        last = records[-1]["number"]
        newer = httpx2.get(f"{url}?since={last - 2}").text.splitlines()
        assert [json.loads(line).get("number") for line in newer] == [None, last - 1, last]
