"""The engine's own behaviour: streaming, stop tokens, cancellation, refusals, statistics."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvist.errors import CapacityError, DeadlockError, PluginError, RequestError, SpecError, StateError
from kvist.iterations.records import BranchesRecord, RequestRecord, StepRecord, read_run
from kvist.manager import Run
from kvist.wishes import Wish, Wishes
from kvist_transformers import Engine, Request, Sampling


def test_streaming_gives_each_token_once_and_in_order(tiny, greedy, engines, prompts):
    model = tiny("llama")
    first, second = prompts(2)
    engine = engines(model)
    seen: dict[int, list[int]] = {}

    def on_tokens(handle, tokens):
        seen.setdefault(handle.request_id, []).extend(tokens.tolist())

    other = engine.submit(Request(second, max_new_tokens=9), on_tokens)
    assert list(engine.stream(Request(first, max_new_tokens=7))) == greedy(model, first, 7)
    while not other.done:
        engine.step()
    assert seen == {other.request_id: greedy(model, second, 9)}


def test_a_callback_may_cancel_and_may_fail(tiny, greedy, engines, prompts):
    model = tiny("llama")
    first, second = prompts(2)
    engine = engines(model)

    def cancel_soon(handle, tokens):
        if len(handle.tokens) == 3:
            handle.cancel()

    def fail_once(handle, tokens):
        if len(handle.tokens) == 2:
            raise ValueError("the caller's own")

    cancelled = engine.submit(Request(first, max_new_tokens=9), cancel_soon)
    failing = engine.submit(Request(second, max_new_tokens=9), fail_once)
    failures = 0
    while not engine.idle:
        try:
            engine.step()
        except ValueError:
            failures += 1
    assert failures == 1
    assert cancelled.completion().finish_reason == "cancelled"
    assert cancelled.tokens.tolist() == greedy(model, first, 3)
    assert failing.tokens.tolist() == greedy(model, second, 9)


def test_leaving_a_stream_cancels_its_request(tiny, greedy, engines, prompts):
    model = tiny("llama")
    [prompt] = prompts(1)
    engine = engines(model)
    stream = engine.stream(Request(prompt, max_new_tokens=50))
    assert [next(stream), next(stream)] == greedy(model, prompt, 2)
    stream.close()
    assert engine.idle
    assert engine.manager.stats().open_sequences == 0


def test_stop_tokens_end_a_request_and_are_part_of_it(tiny, greedy, engines, prompts):
    model = tiny("llama")
    asked = prompts(4, seed=5)
    expected = [greedy(model, prompt, 16) for prompt in asked]
    stop = expected[0][3]
    engine = engines(model)
    completions = engine.generate([Request(prompt, max_new_tokens=16, stop_token_ids={stop, 96}) for prompt in asked])
    for completion, tokens in zip(completions, expected):
        ends = [index for index, token in enumerate(tokens) if token in (stop, 96)]
        if ends:
            assert completion.finish_reason == "stop"
            assert completion.tokens.tolist() == tokens[: ends[0] + 1]
        else:
            assert completion.finish_reason == "length"
            assert completion.tokens.tolist() == tokens
    assert completions[0].finish_reason == "stop"


def test_a_stop_token_only_concerns_its_own_request(tiny, greedy, engines, prompts):
    model = tiny("llama")
    [prompt] = prompts(1)
    expected = greedy(model, prompt, 8)
    engine = engines(model)
    stopping = Request(prompt, max_new_tokens=8, stop_token_ids={expected[0]})
    first, second = engine.generate([stopping, Request(prompt, max_new_tokens=8)])
    assert first.tokens.tolist() == expected[:1]
    assert second.tokens.tolist() == expected


def test_one_new_token_and_a_one_token_prompt(tiny, greedy, engines):
    model = tiny("llama")
    engine = engines(model)
    [completion] = engine.generate([Request([5], max_new_tokens=1)])
    assert completion.tokens.tolist() == greedy(model, [5], 1)
    assert engine.stats.steps == 1


def test_a_sequence_may_fill_every_position_of_the_model(tiny, greedy, engines, prompts):
    model = tiny("llama", max_position_embeddings=40)
    [prompt] = prompts(1, shared=25, longest=2)
    engine = engines(model)
    room = 40 - len(prompt) + 1
    [completion] = engine.generate([Request(prompt, max_new_tokens=room)])
    assert completion.tokens.tolist() == greedy(model, prompt, room)


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "error", "message"),
    [
        ([], 4, RequestError, "the prompt is empty\nhint: send at least one token, e.g. the model's start token"),
        (
            [5, 97],
            4,
            RequestError,
            "token id 97 at position 1 is outside the vocabulary of 97 tokens\n"
            "hint: tokenize with the model's own tokenizer",
        ),
        (
            [-1],
            4,
            RequestError,
            "token id -1 at position 0 is outside the vocabulary of 97 tokens\n"
            "hint: tokenize with the model's own tokenizer",
        ),
        (
            [5] * 300,
            4,
            RequestError,
            "a prompt of 300 tokens and 4 new ones take 303 positions, the model has 256\n"
            "hint: shorten the prompt or lower max_new_tokens",
        ),
        (
            [5] * 200,
            40,
            CapacityError,
            "239 tokens never fit: they need 122880 bytes (15 pages of group target/History()) "
            "and the cache has 73728\nhint: shorten the request or give the cache more memory",
        ),
    ],
)
def test_bad_requests_are_refused_and_the_engine_goes_on(prompt, new_tokens, error, message, tiny, greedy, engines):
    model = tiny("llama")
    good = [3, 1, 4, 1, 5, 9, 2, 6]
    engine = engines(model, memory=10 * 8192, backend="torch-reference")
    running = engine.submit(Request(good, max_new_tokens=6))
    engine.step()
    with pytest.raises(error) as caught:
        engine.submit(Request(np.array(prompt, np.int64), max_new_tokens=new_tokens))
    assert str(caught.value) == message
    refused, other = engine.generate(
        [Request(np.array(prompt, np.int64), max_new_tokens=new_tokens), Request([7, 7], max_new_tokens=3)]
    )
    assert (refused.finish_reason, str(refused.error)) == ("error", message)
    assert other.tokens.tolist() == greedy(model, [7, 7], 3)
    while not running.done:
        engine.step()
    assert running.tokens.tolist() == greedy(model, good, 6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Request([1], max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (
            lambda: Request([[1, 2]]),
            "a prompt is a flat sequence of token ids, got an array of shape (1, 2) and dtype int64",
        ),
        (
            lambda: Request([1.5]),
            "a prompt is a flat sequence of token ids, got an array of shape (1,) and dtype float64",
        ),
        (lambda: Request([1 << 40]), "token id 1099511627776 does not fit 32 bits"),
        (lambda: Sampling(temperature=-1), "temperature=-1 must be 0 (greedy) or a positive number"),
        (lambda: Sampling(temperature=float("nan")), "temperature=nan must be 0 (greedy) or a positive number"),
        (lambda: Sampling(top_k=-1), "top_k=-1 must be 0 (all tokens) or positive"),
        (lambda: Sampling(top_p=0), "top_p=0 must be in (0, 1]"),
        (lambda: Sampling(top_p=1.1), "top_p=1.1 must be in (0, 1]"),
    ],
)
def test_bad_parameters(build, message):
    with pytest.raises(RequestError) as caught:
        build()
    assert caught.value.message == message


def test_memory_too_small_for_one_block(tiny):
    with pytest.raises(CapacityError) as caught:
        Engine(tiny("llama"), memory=1000, backend="torch-reference")
    assert str(caught.value) == (
        "1000 bytes cannot hold one page of each of the 1 group(s) beside the reserved page: "
        "16384 bytes are the least\n"
        "hint: give the cache more memory or use smaller blocks"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "many"}, "memory='many' is not a positive size\nhint: use bytes or e.g. '512MiB', '2GiB'"),
        ({"memory": 0}, "memory=0 is not a positive size\nhint: use bytes or e.g. '512MiB', '2GiB'"),
        ({"block_tokens": 0}, "block_tokens=0 must be at least 1"),
        ({"max_sequences": 9, "max_batch_tokens": 8}, "max_sequences=9 must be in 1 .. max_batch_tokens=8"),
    ],
)
def test_sizes_that_cannot_work(arguments, message, tiny):
    model = tiny("llama")
    with pytest.raises(SpecError) as caught:
        Engine(model, **arguments)
    assert str(caught.value) == message
    # The model is as it was.
    assert model.config._attn_implementation != "kvist"


def tiny_refused(model_type, **fields):
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **fields)).eval()


def test_an_unknown_model_type_is_refused_by_name():
    with pytest.raises(PluginError) as caught:
        Engine(tiny_refused("bloom", n_head=4))
    assert caught.value.message == "no installed plugin serves model type 'bloom'"
    assert "served are: " in caught.value.hint


def test_layers_of_another_kind_are_refused(tiny):
    model = copy.deepcopy(tiny("qwen2"))
    model.config.layer_types = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(SpecError) as caught:
        Engine(model)
    assert caught.value.message == "qwen2: layer_types[1] is 'chunked_attention', which is not served"


def disguised(model, model_type):
    """A model whose config names another, served type: what a wrong table of families would do."""
    model.config.__class__ = type("Disguised", (type(model.config),), {"model_type": model_type})
    return model


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        (
            "falcon",
            {},
            "llama: FalconForCausalLM does not use transformers' attention interface",
        ),
        (
            "stablelm",
            {"num_key_value_heads": 2},
            "llama: StableLmForCausalLM does not pass keyword arguments on to attention",
        ),
        (
            "nemotron",
            {"num_key_value_heads": 2, "head_dim": 8},
            "llama: NemotronForCausalLM does not pass keyword arguments on to attention",
        ),
        (
            "doge",
            {"num_key_value_heads": 2},
            "llama: DogeAttention cannot be served: it passes an attention mask of its own",
        ),
        (
            "diffllama",
            {"num_key_value_heads": 2},
            "llama: attention ran for layers [0, 0, 1, 1], expected each of [0, 1] once",
        ),
    ],
)
def test_attention_that_cannot_be_served_is_refused_by_name(model_type, fields, message):
    model = disguised(tiny_refused(model_type, intermediate_size=48, **fields), "llama")
    before = model.config._attn_implementation
    with pytest.raises(SpecError) as caught:
        Engine(model)
    assert caught.value.message == message
    assert model.config._attn_implementation == before


def test_a_window_that_the_spec_does_not_know_is_refused(tiny):
    model = disguised(copy.deepcopy(tiny("mistral")), "llama")
    with pytest.raises(SpecError) as caught:
        Engine(model)
    assert caught.value.message == (
        "llama: MistralAttention cannot be served: layer 0 has sliding_window=7, its spec says None"
    )


def test_training_mode_is_refused(tiny):
    model = copy.deepcopy(tiny("llama")).train()
    with pytest.raises(SpecError) as caught:
        Engine(model)
    assert str(caught.value) == "llama: the model is in training mode\nhint: call model.eval() first"


def test_an_attached_model_refuses_other_use_and_is_restored(tiny, greedy):
    model = copy.deepcopy(tiny("llama"))
    before = model.config._attn_implementation
    with Engine(model, memory="1MiB") as engine:
        with pytest.raises(StateError) as caught:
            model(input_ids=torch.tensor([[1, 2, 3]]))
        assert caught.value.message.startswith("LlamaAttention was called without a step")
        model.set_attn_implementation("sdpa")
        engine.submit(Request([1, 2, 3], max_new_tokens=2))
        with pytest.raises(SpecError) as switched:
            engine.step()
        assert switched.value.message == "llama: the attention implementation is 'sdpa'"
        engine.manager.check()
    assert model.config._attn_implementation == before
    with pytest.raises(StateError) as closed:
        engine.step()
    assert closed.value.message == "the engine is closed"


def test_a_failing_forward_leaves_the_engine_usable(tiny, greedy, engines, prompts):
    model = tiny("llama")
    asked = prompts(3)
    engine = engines(model)
    handles = [engine.submit(Request(prompt, max_new_tokens=6)) for prompt in asked]
    engine.step()
    forward, failures = engine.adapter.forward, [RuntimeError("out of memory")]

    def failing(*arguments):
        if failures:
            raise failures.pop()
        return forward(*arguments)

    engine.adapter.forward = failing
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.manager.check()
    while not engine.idle:
        engine.step()
    assert [handle.tokens.tolist() for handle in handles] == [greedy(model, prompt, 6) for prompt in asked]


def test_completion_of_a_running_request(tiny, engines):
    engine = engines(tiny("llama"))
    handle = engine.submit(Request([1, 2], max_new_tokens=2))
    with pytest.raises(StateError) as caught:
        handle.completion()
    assert caught.value.message == "request 0 has not ended"


def test_waiting_requests_can_be_cancelled(tiny, engines, prompts):
    engine = engines(tiny("llama"), max_sequences=1)
    handles = [engine.submit(Request(prompt, max_new_tokens=3)) for prompt in prompts(3)]
    handles[1].cancel()
    handles[1].cancel()
    while not engine.idle:
        engine.step()
    assert [handle.completion().finish_reason for handle in handles] == ["length", "cancelled", "length"]


def test_priorities_go_first_and_wishes_reach_the_cache(tiny, greedy, engines, prompts):
    model = tiny("llama")
    engine = engines(model, max_sequences=1)
    asked = prompts(4)
    priorities = [0, -1, 0, 2]
    wishes = Wishes(prompt=((0, 4, Wish(5)),))
    handles = [
        engine.submit(Request(prompt, max_new_tokens=3, priority=priority, wishes=wishes))
        for prompt, priority in zip(asked, priorities)
    ]
    ended = []
    while not engine.idle:
        engine.step()
        ended += [index for index, handle in enumerate(handles) if handle.done and index not in ended]
    assert ended == [3, 0, 2, 1]
    assert [handle.tokens.tolist() for handle in handles] == [greedy(model, prompt, 3) for prompt in asked]
    assert engine.manager._tree.wished
    with pytest.raises(RequestError, match="priority=11 is outside"):
        engine.submit(Request([1], priority=11))


def test_a_request_that_lacks_others_pages_says_so(tiny, engines):
    """Somebody else holds most of the cache: an error that names that, and all goes on when they are gone."""
    engine = engines(tiny("llama"), memory=10 * 8192, backend="torch-reference")
    alien = engine.manager.open(np.arange(100, dtype=np.int32) % 97)
    engine.manager.complete(engine.manager.plan([Run(alien, 100)]).commit())
    handle = engine.submit(Request(np.arange(1, 41), max_new_tokens=4))

    def finish():
        while not handle.done:
            engine.step()

    with pytest.raises(DeadlockError, match=r"request 0 waits for pages: .*; others than its requests have 1 open"):
        finish()
    engine.manager.close(alien)
    finish()
    assert handle.completion().finish_reason == "length"


def test_statistics_add_up(tiny, engines, prompts):
    engine = engines(tiny("llama"), block_tokens=4)
    asked = prompts(5, shared=30)
    completions = engine.generate([Request(prompt, max_new_tokens=5) for prompt in asked])
    stats = engine.stats
    assert stats.requests == stats.finished == 5
    assert stats.prompt_tokens == sum(map(len, asked))
    assert stats.generated_tokens == 25
    assert stats.reused_tokens == sum(completion.reused_tokens for completion in completions)
    # Every prompt token is reused or computed; every generated one but the last is computed too.
    assert stats.reused_tokens + stats.computed_tokens == stats.prompt_tokens + 5 * 4
    for completion, prompt in zip(completions, asked):
        assert completion.reused_tokens + completion.computed_tokens == len(prompt)
    assert stats.host_us_per_step > 0
    assert stats.model_ns > 0


def test_a_closed_engine_frees_its_memory(tiny):
    """Nothing keeps an engine: not the model, not transformers' registry."""
    import weakref

    model = tiny("llama")
    engine = Engine(model, memory="1MiB")
    engine.generate([Request([1, 2, 3], max_new_tokens=2)])
    engine.close()
    gone = weakref.ref(engine.memory)
    del engine
    gc.collect()
    assert gone() is None


def test_what_is_recorded_adds_up_to_what_was_done(tiny, engines, prompts, tmp_path):
    """Steps, requests and tokens of the records are the engine's and the manager's own, and all are in the file."""
    path = tmp_path / "records.jsonl"
    engine = engines(tiny("llama"), max_batch_tokens=24, memory="48KiB")
    with path.open("wb") as file:
        iterations = engine.record(source="tiny", file=file)
        handles = [engine.submit(Request(prompt, max_new_tokens=6)) for prompt in [*prompts(5), prompts(5)[0]]]
        cancelled = engine.submit(Request(prompts(1)[0], max_new_tokens=6))
        engine.step()
        cancelled.cancel()
        while not engine.idle:
            engine.step()
        engine.close()
    begin, records = read_run(path)
    assert iterations.since() == path.read_bytes()
    assert (begin.source, begin.time_unit) == ("tiny", "s")
    assert [record.number for record in records] == list(range(len(records)))
    steps = [record for record in records if isinstance(record, StepRecord)]
    stats = engine.manager.stats()
    assert sum(step.steps for step in steps) == stats.steps == engine.stats.steps
    assert sum(step.tokens for step in steps) == engine.stats.computed_tokens
    assert sum(step.reused_tokens for step in steps) == stats.reused_tokens
    assert max(step.running for step in steps) <= 6 and steps[0].waiting + steps[0].running == 7
    requests = {record.request: record for record in records if isinstance(record, RequestRecord)}
    assert requests[str(cancelled.request_id)].outcome == "cancelled"
    for handle in handles:
        completion, record = handle.completion(), requests[str(handle.request_id)]
        assert record.outcome == completion.finish_reason == "length"
        assert record.prompt_tokens == completion.prompt_tokens
        assert (record.reused_tokens, record.generated_tokens) == (completion.reused_tokens, 6)
        assert record.pauses == completion.pauses
        assert record.prefill > 0 and record.decode > 0 and record.queue > 0
        assert record.queue + record.prefill + record.decode <= record.time
    assert isinstance(records[-1], BranchesRecord) and records[-1].branches


def test_without_a_recorder_nothing_is_recorded(tiny, engines, prompts):
    engine = engines(tiny("llama"))
    engine.generate([Request(prompts(1)[0], max_new_tokens=2)])
    assert engine.iterations is None and engine.scheduler._roster.watch is None
