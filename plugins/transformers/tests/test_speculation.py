"""Drafts change how many tokens a step generates, never which.

Every engine here hands out shuffled pages, keeps NaN in pages that nobody owns, and is checked before each step.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from everybody import Everybody

from kvist.errors import SpecError
from kvist.restore import RestorePolicy
from kvist.spec import Scope
from kvist_transformers import DraftModel, PromptLookup, Request, Sampling
from kvist_transformers.drafting import Draftable, DraftLengths

MODELS = ["llama", "qwen2", "gemma3_text", "gpt_oss"]
NO_TOKENS = np.zeros(0, np.int32)


class Oracle:
    """Knows what each prompt's answer is, and drafts it with mistakes: each draft is right up to a random place."""

    vocab_size = None

    def __init__(self, answers, seed=0, right=0.7, most=6):
        self.most = most
        self.forgotten = []
        self._answers = answers
        self._right = right
        self._rng = np.random.default_rng(seed)

    def propose(self, rows):
        return [self._draft(row) for row in rows]

    def _draft(self, row):
        assert row.most >= 1
        for prompt, answer in self._answers:
            whole = [*prompt, *answer]
            if row.tokens.tolist() == whole[: len(row.tokens)] and len(row.tokens) >= len(prompt):
                draft = np.array(whole[len(row.tokens) :][: row.most], np.int32)
                wrong = self._rng.random(len(draft)) > self._right
                return np.where(wrong, (draft + 1) % 97, draft).astype(np.int32)
        raise AssertionError("a request that generated something else than it should")

    def forget(self, number):
        self.forgotten.append(number)

    def close(self):
        pass


def run(engine, requests, rng, *, cancel=()):
    """Submit at random times. Returns the handles."""
    handles = []
    pending = list(requests)
    while pending or not engine.idle:
        while pending and rng.random() < 0.4:
            handles.append(engine.submit(pending.pop(0)))
        for index in cancel:
            if index < len(handles) and len(handles[index].tokens) > 2:
                handles[index].cancel()
        engine.step()
    engine.manager.check()
    return handles


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_drafts_right_and_wrong(model_type, right, block_tokens, tiny, greedy, engines, prompts):
    model = tiny(model_type)
    asked = prompts(6, shared=21, longest=40)
    expected = [greedy(model, prompt, 20) for prompt in asked]
    drafter = Oracle(list(zip(asked, expected)), right=right)
    engine = engines(model, drafter=drafter, block_tokens=block_tokens, restore=RestorePolicy(every_blocks=1))
    rng = np.random.default_rng(block_tokens)
    for _ in range(2):
        handles = run(engine, [Request(prompt, max_new_tokens=20) for prompt in asked], rng)
        assert [handle.tokens.tolist() for handle in handles] == expected
    assert engine.stats.drafted_tokens
    if right == 1:
        assert engine.stats.accepted_tokens == engine.stats.drafted_tokens
    if right == 0:
        assert not engine.stats.accepted_tokens
    assert engine.stats.generated_tokens == 2 * 6 * 20
    assert sorted(drafter.forgotten) == list(range(12))


def test_all_right_saves_steps(tiny, greedy, engines, prompts):
    model = tiny("llama")
    (prompt,) = prompts(1)
    expected = greedy(model, prompt, 40)
    engine = engines(model, drafter=Oracle([(prompt, expected)], right=1, most=7))
    assert engine.generate([Request(prompt, max_new_tokens=40)])[0].tokens.tolist() == expected
    # The prompt gives one token, then 1+4, 1+7, ... of them a step.
    assert engine.stats.steps == 1 + 1 + -(-(40 - 1 - 5) // 8)


def test_pauses_and_cancellations_under_pressure(tiny, greedy, engines, prompts):
    model = tiny("qwen2")
    asked = prompts(8, longest=30, seed=3)
    expected = [greedy(model, prompt, 60) for prompt in asked]
    drafter = Oracle(list(zip(asked, expected)), right=0.7)
    engine = engines(
        model, drafter=drafter, block_tokens=4, memory="100KiB", admission=Everybody(), max_batch_tokens=32
    )
    rng = np.random.default_rng(0)
    handles = run(engine, [Request(prompt, max_new_tokens=60) for prompt in asked], rng, cancel=(2, 5))
    for index, (handle, answer) in enumerate(zip(handles, expected)):
        got = handle.tokens.tolist()
        assert got == answer[: len(got)]
        assert len(got) == 60 or index in (2, 5)
    assert engine.stats.pauses and engine.stats.accepted_tokens
    assert engine.manager.stats().open_sequences == 0


def test_a_stop_token_inside_a_draft_ends_the_request(tiny, greedy, engines, prompts):
    model = tiny("llama")
    (prompt,) = prompts(1, seed=5)
    answer = greedy(model, prompt, 30)
    stop = answer[9]
    expected = answer[: answer.index(stop) + 1]
    engine = engines(model, drafter=Oracle([(prompt, answer)], right=1))
    completion = engine.generate([Request(prompt, max_new_tokens=30, stop_token_ids={stop})])[0]
    assert completion.tokens.tolist() == expected
    assert completion.finish_reason == "stop"
    assert engine.generate([Request(prompt, max_new_tokens=7)])[0].tokens.tolist() == answer[:7]


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_sampled_tokens_are_those_without_drafts(right, tiny, engines, prompts):
    model = tiny("llama")
    asked = prompts(5, seed=8)
    sampling = [Sampling(temperature=0.7, seed=index, top_k=8 * index) for index in range(5)]
    requests = [Request(prompt, max_new_tokens=25, sampling=each) for prompt, each in zip(asked, sampling)]
    plain = [each.tokens.tolist() for each in engines(model).generate(requests)]
    engine = engines(model, drafter=Oracle(list(zip(asked, plain)), right=right))
    assert [each.tokens.tolist() for each in engine.generate(requests)] == plain
    assert engine.stats.accepted_tokens


@pytest.mark.parametrize("model_type", MODELS)
def test_a_draft_model(model_type, tiny, greedy, engines, prompts):
    """The drafting model is the same model, so all drafts are right; or another one, so hardly any is."""
    model = tiny(model_type)
    asked = prompts(6, shared=19, longest=30)
    expected = [greedy(model, prompt, 24) for prompt in asked]
    requests = [Request(prompt, max_new_tokens=24) for prompt in asked]
    torch.manual_seed(3)
    for twin in (True, False):
        drafter_model = type(model)(model.config).eval()
        if twin:
            drafter_model.load_state_dict(model.state_dict())
        drafter = DraftModel(drafter_model, 5, memory="1MiB", block_tokens=4)
        engine = engines(model, drafter=drafter)
        handles = run(engine, requests, np.random.default_rng(1))
        assert [handle.tokens.tolist() for handle in handles] == expected
        drafter.runtime.manager.check()
        assert drafter.runtime.manager.stats().open_sequences == 0
        share = engine.stats.accepted_tokens / engine.stats.drafted_tokens
        assert share > 0.95 if twin else share < 0.5
        engine.close()


def test_a_draft_model_without_room_drafts_for_some(tiny, greedy, engines, prompts):
    model = tiny("llama")
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    asked = prompts(6, longest=60, seed=2)
    expected = [greedy(model, prompt, 30) for prompt in asked]
    drafter = DraftModel(twin, 4, memory="40KiB", block_tokens=4)
    engine = engines(model, drafter=drafter)
    done = engine.generate([Request(prompt, max_new_tokens=30) for prompt in asked])
    assert [each.tokens.tolist() for each in done] == expected
    assert engine.stats.accepted_tokens
    assert drafter.runtime.manager.stats().open_sequences == 0


def test_refusals(tiny, engines):
    other = tiny("llama", vocab_size=50)
    twin = type(other)(other.config).eval()
    with pytest.raises(SpecError) as caught:
        engines(tiny("llama"), drafter=DraftModel(twin))
    assert str(caught.value) == (
        "the drafter has a vocabulary of 50 tokens, the model has 97\nhint: draft with a model of the same family "
        "and tokenizer"
    )
    with pytest.raises(SpecError, match="drafts nothing"):
        DraftModel(twin, 0)
    with pytest.raises(SpecError, match="needs numbers from 1 on"):
        PromptLookup(0)


def lookup(tokens, most=4, **arguments):
    (draft,) = PromptLookup(8, **arguments).propose([Draftable(0, np.array(tokens, np.int32), Scope(), most)])
    return draft.tolist()


def test_prompt_lookup_takes_what_followed_the_newest_such_place():
    assert lookup([1, 2, 3, 4, 1, 2, 9, 8, 1, 2]) == [9, 8, 1, 2]
    assert lookup([1, 2, 3, 4, 1, 2, 9, 8, 1, 2], most=1) == [9]
    assert lookup([5, 5, 5, 5]) == [5]
    assert lookup([1, 2, 3]) == []
    assert lookup([7]) == []
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2], look_back=6) == []
    assert lookup([4, 1, 6, 2, 1], ngram=1) == [6, 2, 1]


def test_prompt_lookup_equals_a_plain_search():
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(0, 4, rng.integers(1, 40)).tolist()
        ngram = int(rng.integers(1, 4))
        expected = []
        for start in range(len(tokens) - ngram - 1, -1, -1):
            if tokens[start : start + ngram] == tokens[-ngram:]:
                expected = tokens[start + ngram :][:4]
                break
        assert lookup(tokens, ngram=ngram) == expected


def test_draft_lengths_follow_what_is_right():
    lengths = DraftLengths(12)
    assert lengths.next(1) == 4
    lengths.learn(1, 4, 4)
    assert lengths.next(1) == 8
    lengths.learn(1, 8, 8)
    assert lengths.next(1) == 12
    for expected in (6, 3, 1):
        lengths.learn(1, 12, 0)
        assert lengths.next(1) == expected
    lengths.learn(1, 1, 0)
    assert [lengths.next(1) for _ in range(3)] == [0, 0, 1]
    lengths.learn(1, 1, 0)
    assert [lengths.next(1) for _ in range(5)] == [0, 0, 0, 0, 1]
    lengths.learn(1, 1, 1)
    assert lengths.next(1) == 2
    assert lengths.next(2) == 4
