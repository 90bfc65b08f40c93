"""Scenarios of area A: what makes content the same, and what makes it different."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from cache_requests import manager_of

from kvist.keys import block_keys, format_digest, scope_seed
from kvist.manager import Run
from kvist.spec import Scope
from kvist.testing.engine import MIXES, Engine, shared_length
from kvist.testing.values import tokens

W1, W2, OTHER = (Scope(adapter=name * 64) for name in "abc")
HIGH_BITS = ("8" + "0" * 63, "0" * 64)


@pytest.mark.parametrize("mix", MIXES)
def test_replaced_adapter_weights_share_nothing(mix: str) -> None:
    """1: an adapter is named by a digest of its weights, so new weights under an old name are another scope."""
    engine = Engine(manager_of(60, *MIXES[mix]))
    assert engine.turn(range(1, 10), scope=W1) == 0
    for scope in (W2, Scope(), OTHER):
        assert engine.probe(range(1, 10), scope=scope) == 0
        assert engine.turn(range(1, 10), scope=scope) == 0
    # All four are there now, each found under its own scope only; states can resume where a snapshot was made.
    assert {engine.probe(range(1, 10), 99, scope=scope) for scope in (W1, W2, Scope(), OTHER)} == {9}
    engine.drained()


_LOAD_ORDER = """
import sys
import numpy as np
from kvist.keys import block_keys, scope_seed
from kvist.spec import Scope
for name in sys.argv[1:]:
    key = block_keys(scope_seed(bytes(32), Scope(adapter=name * 64)), np.arange(4, dtype=np.int32), 4)[-1]
    print(name, key.hex())
"""


def test_the_key_of_an_adapter_does_not_depend_on_the_load_order() -> None:
    """1 and 4: keys name weights, so two processes agree whatever they loaded first and whatever their hash seeds."""
    answers = []
    for seed, order in (("1", "ab"), ("2", "ba"), ("random", "ab")):
        ran = subprocess.run(
            [sys.executable, "-c", _LOAD_ORDER, *order],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        answers.append(sorted(ran.stdout.split("\n")))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) == 3


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        pytest.param([(2, HIGH_BITS[0])], [(2, HIGH_BITS[1])], id="digests that differ in high bits only"),
        pytest.param([(2, "a"), (4, "b")], [(2, "b"), (4, "a")], id="two items swapped"),
        pytest.param([(2, "rows:1")], [(2, "rows:2")], id="the same ids with other embedding rows"),
        pytest.param([(2, "a")], [(3, "a")], id="another mask of which rows come from ids"),
        pytest.param([(2, "a/256px")], [(2, "a/512px")], id="other decode options"),
        pytest.param([(2, "a")], [(2, "a"), (4, "b")], id="one more item"),
        pytest.param([(2, "a")], [], id="no digest at all"),
        pytest.param([(1, "2:a")], [(12, "a")], id="position and digest that read alike when joined"),
    ],
)
@pytest.mark.parametrize("mix", ["history", "history+windows+state"])
def test_other_media_share_nothing(stored: list, asked: list, mix: str) -> None:
    """2: placeholders are equal for all pictures; the scope has position and digest of each, and the caller's digest
    covers all that the rows depend on: the bytes, how they were decoded, which rows they replace.

    The core cannot know which ids are placeholders. A caller with a picture and no digest opens with ``reuse=False``.
    """
    engine = Engine(manager_of(60, *MIXES[mix]))
    prompt = (1, 2, 99, 99, 99, 99, 3, 4, 5)
    scope = Scope(media=stored)
    assert engine.turn(*prompt, scope=scope) == 0
    assert engine.probe(*prompt, scope=Scope(media=asked)) == 0
    assert engine.turn(*prompt, scope=Scope(media=asked)) == 0
    assert engine.turn(*prompt, scope=scope) == 8
    assert engine.turn(*prompt, scope=scope, reuse=False) == 0
    assert scope_seed(bytes(32), scope) != scope_seed(bytes(32), Scope(media=asked))
    engine.drained()


def test_a_request_that_opts_out_is_never_found() -> None:
    """2: rows of a picture without a digest are not published, so nobody can take them for another picture's."""
    engine = Engine(manager_of(60))
    engine.turn(1, 2, 99, 99, 99, 99, 3, 4, 5, reuse=False)
    assert engine.probe(1, 2, 99, 99, 99, 99, 3, 4, 5) == 0
    assert engine.used() == [(0, 0)]


def test_absent_and_empty_extras_are_one_scope() -> None:
    """4: inside a process too, by value and in any container."""
    engine = Engine(manager_of(20))
    engine.turn(range(1, 9))
    for scope in (Scope(), Scope("", "", ()), Scope(media=[])):
        assert engine.probe(range(1, 9), 99, scope=scope) == 8
    assert len({Scope(), Scope("", "", ()), Scope(media=[])}) == 1


def test_salts_and_adapters_are_kept_apart_from_each_other() -> None:
    """1 and 4: texts that are equal only when joined are different scopes."""
    pairs = [("ab", ""), ("a", "b"), ("", "ab"), ("b", "a")]
    engine = Engine(manager_of(60))
    for number, (adapter, salt) in enumerate(pairs):
        scope = Scope(adapter=adapter, salt=salt)
        assert engine.turn(range(1, 9), scope=scope) == 0
        assert engine.probe(range(1, 9), scope=scope) == 7
        assert sum(engine.probe(range(1, 9), scope=Scope(a, s)) > 0 for a, s in pairs) == number + 1
    assert len({scope_seed(bytes(32), Scope(a, s)) for a, s in pairs}) == len(pairs)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("mix", MIXES)
def test_many_scopes_over_the_same_texts_at_once(mix: str, block: int) -> None:
    """1, 2: equal texts in different scopes, open at the same time, cancelled, reused and evicted in random order.

    The oracle's values depend on the scope, and reuse is at most what the same scope has seen.
    """
    rng = np.random.default_rng(block)
    # Small enough that old prefixes must go.
    engine = Engine(manager_of(30 * len(MIXES[mix]), *MIXES[mix], block_tokens=block))
    scopes = [Scope(), W1, W2, Scope(salt="t"), Scope(media=((0, "p"),))]
    seen: dict[Scope, list[np.ndarray]] = {scope: [] for scope in scopes}
    texts = [rng.integers(0, 3, 8 + 2 * number) for number in range(3)]
    for _ in range(15):
        scope = scopes[rng.integers(len(scopes))]
        text = texts[rng.integers(len(texts))]
        both = [(scope, text), (scopes[rng.integers(len(scopes))], text)]
        opened = []
        for each, prompt in both:
            sequence = engine.open(*prompt.tolist(), scope=each)
            assert sequence.reused <= max((shared_length(prompt, old) for old in seen[each]), default=0)
            opened.append(sequence)
        engine.prefill(*opened, chunk=5)
        engine.close(*opened)
        for each, prompt in both:
            seen[each].append(prompt)
    engine.drained()


def test_keys_chain_over_all_tokens_before() -> None:
    """4: the same block after another beginning, or in another scope, has another key."""
    digest = format_digest(manager_of(20).layout)
    text, changed = tokens(range(1, 13)), tokens(7, range(2, 13))
    keys = {
        key
        for scope in (Scope(), W1)
        for run in (text, changed)
        for key in block_keys(scope_seed(digest, scope), run, 4)
    }
    assert len(keys) == 12


def test_an_adapter_swapped_under_running_requests() -> None:
    """1: the old weights' requests go on while the new ones' start, step by step, and publish under their own names."""
    engine = Engine(manager_of(40))
    old, new = engine.open(range(1, 10), scope=W1), None
    engine.run(Run(old, 5))
    new = engine.open(range(1, 10), scope=W2)
    assert new.reused == 0
    engine.run(Run(new, 7), Run(old, 4))
    for _ in range(6):
        for sequence in (old, new):
            if sequence.known == sequence.computed:
                engine.learn(sequence)
        engine.run(Run(old, 1), Run(new, 1))
    engine.close(old, new)
    assert engine.probe(range(1, 10), 99, scope=W1) == engine.probe(range(1, 10), 99, scope=W2) == 9
