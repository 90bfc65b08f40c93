"""OpenAI's client against a server: the tokens, texts, reasons, numbers and errors that it gets."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2
import numpy as np
import openai
import pytest
import torch
from tiny_server import MAX_TOKENS, Running, running

from kvist_transformers import Engine, Request, Sampling

ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
    assert server.settled()


def answer(client, prompt, count=12, **how):
    how = {"temperature": 0, "extra_body": ENDLESS, **how}
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=count, **how)


def said(chunks) -> tuple[str, str | None]:
    """Text and reason of a streamed completion of one choice."""
    text, reason = "", None
    for chunk in chunks:
        if chunk.choices:
            assert reason is None
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason
    return text, reason


def test_greedy_text_is_that_of_transformers_streamed_and_whole(server, client):
    for prompt in ("the twig", "a branch bears leaves, \N{HERB}!", [5, 60, 90]):
        tokens = server.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        expected = server.text(server.greedy(tokens, 24))
        whole = answer(client, prompt, 24)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "length")
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(tokens), 24)
        assert whole.usage.total_tokens == len(tokens) + 24
        assert said(answer(client, prompt, 24, stream=True)) == (expected, "length")


def test_chats_use_the_template_and_stream_with_usage(server, client):
    messages = [
        {"role": "system", "content": "be a tree"},
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "twig?"}]},
    ]
    text = "<|system|>be a tree<|end|><|user|>a twig?<|end|><|assistant|>"
    prompt = server.tokenizer(text, add_special_tokens=False).input_ids
    expected = server.text(server.greedy(prompt, 20))
    ask = {"model": "tiny", "messages": messages, "max_completion_tokens": 20, "temperature": 0, "extra_body": ENDLESS}
    whole = client.chat.completions.create(**ask)
    assert whole.object == "chat.completion"
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", expected)
    assert whole.usage.prompt_tokens == len(prompt)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20


def test_a_chat_without_a_limit_has_the_rest_of_the_positions(client):
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], temperature=0, extra_body=ENDLESS
    )
    assert chat.choices[0].finish_reason == "length"
    # The last token takes no position.
    assert chat.usage.total_tokens == MAX_TOKENS + 1


def test_the_end_token_ends_an_answer_and_is_not_in_it(server, client):
    tokenizer = server.tokenizer
    twig = tokenizer("the twig").input_ids
    found = ([*twig, letter] for letter in range(5, 97))
    prompt, tokens = next((p, t) for p in found if tokenizer.eos_token_id in (t := server.greedy(p, 16))[2:])
    count = tokens.index(tokenizer.eos_token_id) + 1
    ended = answer(client, prompt, 16, extra_body={})
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].text == server.text(tokens[: count - 1])
    assert ended.usage.completion_tokens == count
    other = answer(client, prompt, 16, extra_body={"ignore_eos": True, "stop_token_ids": [tokens[1]]})
    assert other.choices[0].finish_reason == "stop"
    assert other.usage.completion_tokens == tokens.index(tokens[1]) + 1


def test_stop_strings_end_an_answer_also_across_tokens(server, client):
    prompt = server.tokenizer("the tree").input_ids
    tokens = server.greedy(prompt, 60)
    text = server.text(tokens)
    middle = len(text) // 2
    # It begins within one token and ends in another.
    stop = text[middle : middle + 4]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never said", stop]):
        whole = answer(client, prompt, 60, stop=stops)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
        fewest = next(
            n for n in range(len(tokens) + 1) if stop in server.tokenizer.decode(tokens[:n], skip_special_tokens=True)
        )
        # A character is known to be none only when another follows.
        assert fewest <= whole.usage.completion_tokens <= fewest + 4
        assert said(answer(client, prompt, 60, stop=stops, stream=True)) == (expected, "stop")


def test_choices_have_seeds_of_their_own_and_equal_seeds_equal_answers(server, client):
    prompt = server.tokenizer("leaves").input_ids
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "n": 3, "extra_body": {**ENDLESS, "top_k": 40}}
    first = answer(client, prompt, 16, **how)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert first.usage.prompt_tokens == len(prompt) and first.usage.completion_tokens == 48
    streamed = ["", "", ""]
    for chunk in answer(client, prompt, 16, stream=True, **how):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    # The engine's own tokens for those seeds.
    with Engine(server.model, memory="1MiB", max_batch_tokens=64, max_sequences=4) as engine:
        requests = [
            Request(prompt, max_new_tokens=16, sampling=Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=seed))
            for seed in (5, 6, 7)
        ]
        assert [server.text(done.tokens.tolist()) for done in engine.generate(requests)] == texts
    unseeded = {answer(client, prompt, 16, temperature=1).choices[0].text for _ in range(3)}
    assert len(unseeded) > 1


def test_several_prompts_are_answered_in_order_with_echo(server, client):
    prompts = ["the twig", "a leaf"]
    made = answer(client, prompts, 8, n=2, echo=True)
    tokens = [server.tokenizer(prompt).input_ids for prompt in prompts]
    expected = [
        prompt + server.text(server.greedy(ids, 8)) for prompt, ids in zip(prompts, tokens, strict=True) for _ in (0, 1)
    ]
    assert [choice.text for choice in made.choices] == expected
    assert made.usage.prompt_tokens == sum(map(len, tokens))
    streamed = [""] * 4
    for chunk in answer(client, prompts, 8, n=2, echo=True, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def expected_logprobs(server, prompt, tokens) -> torch.Tensor:
    with torch.inference_mode():
        logits = server.model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)[len(prompt) - 1 : -1]


def test_logarithms_are_those_of_transformers(server, client):
    prompt = server.tokenizer("twig").input_ids
    made = answer(client, prompt, 10, logprobs=3, temperature=0.7, seed=1).choices[0].logprobs
    with Engine(server.model, memory="1MiB", max_batch_tokens=64, max_sequences=4) as engine:
        request = Request(prompt, max_new_tokens=10, sampling=Sampling(temperature=0.7, seed=1))
        tokens = engine.generate([request])[0].tokens.tolist()
    expected = expected_logprobs(server, prompt, tokens)
    assert made.tokens == [server.tokenizer.decode([token]) for token in tokens]
    chosen = expected[torch.arange(10), torch.tensor(tokens)]
    np.testing.assert_allclose(made.token_logprobs, chosen.numpy(), rtol=1e-4, atol=1e-4)
    for row, found in zip(expected, made.top_logprobs, strict=True):
        best = float(row.max())
        assert max(found.values()) == pytest.approx(best, abs=1e-4)
    assert made.text_offset[0] == 0 and made.text_offset == sorted(made.text_offset)


def test_chat_logarithms_have_bytes_and_alternatives_in_streams_too(server, client):
    prompt = server.tokenizer("<|user|>twig<|end|><|assistant|>", add_special_tokens=False).input_ids
    tokens = server.greedy(prompt, 9)
    expected = expected_logprobs(server, prompt, tokens)
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "twig"}],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": ENDLESS,
    }
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    streamed = [
        each
        for chunk in client.chat.completions.create(**ask, stream=True)
        if chunk.choices[0].logprobs
        for each in chunk.choices[0].logprobs.content
    ]
    # What was reused is computed in other batches: the last bits may differ.
    assert [each.token for each in streamed] == [each.token for each in whole]
    np.testing.assert_allclose([each.logprob for each in streamed], [each.logprob for each in whole], atol=1e-4)
    values, ids = expected.topk(2, dim=-1)
    for place, each in enumerate(whole):
        assert each.token == server.tokenizer.decode([tokens[place]])
        assert each.logprob == pytest.approx(float(values[place, 0]), abs=1e-4)
        assert [top.token for top in each.top_logprobs] == [server.tokenizer.decode([i]) for i in ids[place].tolist()]
        np.testing.assert_allclose([top.logprob for top in each.top_logprobs], values[place].numpy(), atol=1e-4)
        assert each.bytes is None or bytes(each.bytes).decode() == each.token
    without = client.chat.completions.create(**{**ask, "logprobs": None, "top_logprobs": None})
    assert without.choices[0].logprobs is None


def test_a_second_turn_and_an_equal_salt_reuse_others_do_not(server, client):
    first = list(range(20, 84))
    salted = {"extra_body": {**ENDLESS, "cache_salt": "a"}}
    one = answer(client, first, 16, **salted)
    assert one.usage.prompt_tokens_details.cached_tokens == 0
    second = [*first, *server.greedy(first, 16), 7, 8]
    two = answer(client, second, 4, **salted)
    # The last generated token was never computed.
    assert two.usage.prompt_tokens_details.cached_tokens == len(first) + 15
    other = answer(client, second, 4, extra_body={**ENDLESS, "cache_salt": "b"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0
    assert other.choices[0].text == two.choices[0].text == server.text(server.greedy(second, 4))


def test_models_health_and_unknown_pages(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvist"
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
    gone = httpx2.get(f"{server.url}/v2/nothing")
    assert (gone.status_code, gone.json()["error"]["message"]) == (
        404,
        "there is no /v2/nothing here\nhint: see /openapi.json",
    )
    assert httpx2.get(f"{server.url}/v1/completions").status_code == 405


REFUSED = {
    "unknown model": ({"model": "gpt"}, 404, "the model 'gpt' is not served here\nhint: this server's model is 'tiny'"),
    "no prompt": (
        {"prompt": []},
        400,
        "prompt: an empty list\nhint: send at least one prompt",
    ),
    "empty text": (
        {"prompt": ""},
        400,
        "the prompt is empty\nhint: send at least one token, e.g. the model's start token",
    ),
    "token out of range": (
        {"prompt": [1, 2, 320]},
        400,
        "token id 320 at position 2 is outside the vocabulary of 320 tokens\n"
        "hint: tokenize with the model's own tokenizer",
    ),
    "token out of 32 bits": ({"prompt": [1 << 40]}, 400, "token id 1099511627776 does not fit 32 bits"),
    "too long": (
        {"prompt": [9] * 500, "max_tokens": 14},
        400,
        "a prompt of 500 tokens and 14 new ones take 513 positions, the model has 512\n"
        "hint: shorten the prompt or lower max_new_tokens",
    ),
    "temperature": ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
    "max_tokens": ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
    "n": ({"n": 129}, 400, "n: Input should be less than or equal to 128"),
    "too many choices": ({"n": 100}, 400, "100 choices at once: this server takes 64"),
    "priority": ({"priority": 11}, 400, "priority: Input should be less than or equal to 10"),
    "logprobs": ({"logprobs": 21}, 400, "logprobs: Input should be less than or equal to 20"),
    "not served": ({"logit_bias": {"5": 1}}, 400, "logit_bias: not served here\nhint: leave the field out"),
    "empty stop": ({"stop": ["a", ""]}, 400, "stop: at most 16 strings, none of them empty"),
    "echo": (
        {"echo": True, "logprobs": 1},
        400,
        "echo with logprobs: a prompt's logarithms are not served\nhint: leave one out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_in_which_words(server, client, case):
    fields, status, message = REFUSED[case]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}
    answered = httpx2.post(f"{server.url}/v1/completions", json=body)
    assert (answered.status_code, answered.json()["error"]["message"]) == (status, message)
    with pytest.raises(openai.APIStatusError) as raised:
        client.post("/completions", body=body, cast_to=object)
    assert raised.value.status_code == status


def test_nonsense_is_answered_in_openai_s_shape(server, client):
    url = f"{server.url}/v1/completions"
    bodies = {
        b"{": "the body is not JSON: Expecting property name enclosed in double quotes at character 1",
        b"[1]": "the body is not a request: Input should be a valid dictionary or object to extract fields from\n"
        "hint: send a JSON object",
        b'{"prompt": {"a": 1}}': "prompt: Input should be a valid string, or: Input should be a valid list",
        b"{}": "prompt: Field required",
    }
    for body, message in bodies.items():
        answered = httpx2.post(url, content=body, headers={"content-type": "application/json"})
        assert answered.status_code == 400
        assert answered.json()["error"]["message"] == message
        assert set(answered.json()["error"]) == {"message", "type", "param", "code"}
    chat = f"{server.url}/v1/chat/completions"
    for messages, message in (
        ([], "messages: List should have at least 1 item after validation, not 0"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages: a part of type 'image_url' is not served here",
        ),
        ([{"content": "x"}], "messages: Field required"),
    ):
        answered = httpx2.post(chat, json={"messages": messages})
        assert (answered.status_code, answered.json()["error"]["message"]) == (400, message)
    top = httpx2.post(chat, json={"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2})
    assert top.json()["error"]["message"] == "top_logprobs: only with logprobs\nhint: set logprobs to true"


def test_unknown_fields_and_nulls_are_tolerated(server, client):
    body = {
        "model": None,
        "prompt": "x",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "user": "me",
        "store": False,
        "n": None,
        "stop": None,
        "seed": None,
        "presence_penalty": 0,
    }
    answered = httpx2.post(f"{server.url}/v1/completions", json=body)
    assert answered.status_code == 200
    assert answered.json()["choices"][0]["text"] == server.text(server.greedy(server.tokenizer("x").input_ids, 3))


def test_a_body_that_is_too_large_is_not_read_to_its_end(server, client):
    def chunks():
        yield b'{"prompt": "'
        for _ in range(33):
            yield b"x" * (1 << 20)

    answered = httpx2.post(f"{server.url}/v1/completions", content=chunks())
    assert (answered.status_code, answered.json()["error"]["message"]) == (413, "the body has more than 33554432 bytes")


def test_streams_are_events_that_end_with_done(server, client):
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "temperature": 0, "ignore_eos": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
