"""Text as it comes: whole characters, and nothing beyond a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_server import tiny_tokenizer

from kvist_transformers.serving.text import Detokenizer, StopStrings, decoder

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@given(st.text(max_size=30), st.text(max_size=10))
def test_pieces_are_whole_characters_and_make_the_text(text, prompt):
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(decoder(tokenizer), tokenizer(prompt).input_ids)
    pieces = [detokenizer.push(token) for token in tokenizer(text).input_ids]
    assert all(UNKNOWN not in piece for piece in pieces) or UNKNOWN in text
    assert "".join(pieces) == text.rstrip(UNKNOWN)


def test_a_character_of_four_bytes_comes_with_its_last_one():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer("\N{HERB}").input_ids
    assert len(tokens) == 4
    detokenizer = Detokenizer(decoder(tokenizer))
    assert [detokenizer.push(token) for token in tokens] == ["", "", "", "\N{HERB}"]


def test_bytes_that_are_no_character_are_replaced_once_something_follows():
    tokenizer = tiny_tokenizer()
    first = tokenizer("\N{HERB}").input_ids[0]
    letter = tokenizer("x").input_ids[0]
    detokenizer = Detokenizer(decoder(tokenizer))
    assert [detokenizer.push(token) for token in (first, first, letter)] == ["", "", f"{UNKNOWN}{UNKNOWN}x"]


def test_random_tokens_give_what_decode_gives_for_all():
    tokenizer = tiny_tokenizer()
    rng = random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 40))]
        detokenizer = Detokenizer(decoder(tokenizer))
        text = "".join(map(detokenizer.push, tokens))
        assert text == tokenizer.decode(tokens, skip_special_tokens=True).rstrip(UNKNOWN)


def test_decoders_that_drop_a_leading_space_keep_it_behind_a_prompt():
    words = {1: " the", 2: " twig", 3: "s"}
    detokenizer = Detokenizer(lambda ids: "".join(words[token] for token in ids).lstrip(), [1])
    assert [detokenizer.push(token) for token in (2, 3, 1)] == [" twig", "s", " the"]


def brute(text: str, stops: list[str]) -> tuple[str, bool]:
    """What comes before the first end of a stop string: streams cannot look ahead."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_end_the_text_wherever_tokens_begin(text, stops):
    found = StopStrings(stops)
    given_out = "".join(found.push(letter) for letter in text)
    if not found.found:
        given_out += found.finish()
    assert (given_out, found.found) == brute(text, stops)


def test_what_may_become_a_stop_string_is_held_back():
    stops = StopStrings(["END", "\n\n"])
    pieces = ["one E", "N", "X\n", "two", "\n", "\nthree"]
    assert [stops.push(piece) for piece in pieces] == ["one ", "", "ENX", "\ntwo", "", ""]
    assert stops.found
    assert stops.push("more") == ""


@pytest.mark.parametrize("piece", ["a stop b", "stop"])
def test_a_stop_string_within_one_piece(piece):
    stops = StopStrings(["stop"])
    assert stops.push(piece) == piece.partition("stop")[0]
    assert stops.found
