"""The demo's workload: conversations with one assistant that share a long system prompt and branch.

All text was written for this project. Turns come in waves: a turn is asked when every turn of the wave before has
been answered, and its prompt contains that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

SYSTEM = """You are the desk assistant of the Ravensmoor Boatyard, a small cooperative that repairs and rents wooden
boats on the east shore of Lake Elder. Answer in plain English, in at most four short sentences, and never invent a
price that is not in this notice.

Opening hours. From April to September the yard is open every day from eight in the morning until seven in the
evening. In October and March it is open from Thursday to Sunday between ten and four. From November to February the
workshop works behind closed doors and the rental pier is shut, but the telephone is answered on weekday mornings.

Rental. A rowing boat for up to four people costs nine euros an hour or thirty euros a day. A sailing dinghy for two
costs fourteen euros an hour or fifty euros a day, and the helm has to show a sailing certificate. The long punt, with
room for ten, is rented by the half day only, for sixty euros. Life jackets are included and must be worn by everyone
under sixteen. Dogs are welcome in rowing boats and in the punt. Boats come back thirty minutes before closing time.

Workshop. Members of the cooperative bring their own boats in for a yearly check, which costs forty euros and takes two
days. Replacing a plank takes a week, because the wood is steamed and has to settle. New varnish needs three dry days.
We do not repair plastic hulls or engines, and gladly name a yard across the lake that does. Work is paid when the
boat is collected, in cash or by card.

Weather. When the flag on the crane is red nobody leaves the pier. A yellow flag means that dinghies stay in the bay.
Somebody who is caught by a storm should make for the nearest shore, stay with the boat and call the yard."""


@attrs.frozen
class Turn:
    """One question. ``parent`` is the turn that it follows, ``None`` at the start of a conversation.

    Several turns with one parent are branches: different questions after the same answer.
    """

    name: str
    parent: str | None
    text: str


#: Waves of turns, in the order in which they are asked.
WAVES: tuple[tuple[Turn, ...], ...] = (
    (
        Turn("family", None, "We are two adults with three children aged four, nine and twelve. Which boat is best?"),
        Turn("plank", None, "My grandfather's skiff has a cracked plank below the waterline. Can you mend it?"),
        Turn("sail", None, "I would like to take a sailing dinghy out on Saturday afternoon. What do I have to bring?"),
        Turn("dog", None, "Can our old retriever come along, or is the lake closed to dogs during the summer season?"),
        Turn("winter", None, "Is there any way to reach you in January? I want to plan repairs for my boat."),
        Turn("party", None, "Our choir of ten wants to spend a whole morning on the water. What does that cost?"),
        Turn("plastic", None, "The hull of my motor boat is plastic and it leaks near the engine. Do you do that?"),
    ),
    (
        Turn("family-price", "family", "Good. What do we pay for three hours, and what for a whole day?"),
        Turn("plank-why", "plank", "Why does it take that long? A carpenter told me it was an afternoon's work."),
        Turn("sail-flag", "sail", "And if the flag on the crane is yellow, may we still go out to the island?"),
        Turn("dog-jacket", "dog", "He cannot swim well any more. Does he need a life jacket, or only the children?"),
        Turn("winter-check", "winter", "Then please note the yearly check for me. How many days will you keep it?"),
        Turn("party-late", "party", "We may be a little late on the way back. When must the punt be at the pier?"),
    ),
    (
        Turn("family-small", "family", "Must the twelve year old wear a life jacket as well, although she swims well?"),
        Turn("plank-pay", "plank", "When do I pay for this, and must I leave a deposit when I bring the boat in?"),
        Turn("sail-learn", "sail", "Sorry, my certificate has expired. Which other boat could the two of us rent?"),
        Turn("party-rain", "party-late", "Suppose it rains that morning. Write a short message to the choir about it."),
        Turn("dog-sum", "dog-jacket", "Thank you. Sum up in two sentences what I have to remember for our trip."),
    ),
)


@attrs.frozen
class Prompts:
    """Turns as token ids. A prompt is the parent's prompt, the answer's tokens, and the new question.

    Answers are used as tokens and never tokenized again, so a history is exactly what the model computed.
    """

    system: tuple[int, ...]
    questions: Mapping[str, tuple[int, ...]]
    after_answer: tuple[int, ...]
    stop_token_id: int

    @classmethod
    def build(cls, tokenizer: Any) -> Prompts:
        """For a tokenizer with ``<|im_start|>`` and ``<|im_end|>`` and no start token of its own."""
        encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        questions = {
            turn.name: tuple(encode(f"<|im_start|>user\n{turn.text}<|im_end|>\n<|im_start|>assistant\n"))
            for wave in WAVES
            for turn in wave
        }
        return cls(
            tuple(encode(f"<|im_start|>system\n{' '.join(SYSTEM.split())}<|im_end|>\n")),
            questions,
            tuple(encode("<|im_end|>\n")),
            tokenizer.convert_tokens_to_ids("<|im_end|>"),
        )

    def prompt(self, turn: Turn, history: Mapping[str, tuple[list[int], list[int]]]) -> list[int]:
        """Token ids of a turn's prompt. history: prompt and answer of every turn asked before, by name."""
        if turn.parent is None:
            return [*self.system, *self.questions[turn.name]]
        prompt, answer = history[turn.parent]
        if answer and answer[-1] == self.stop_token_id:
            answer = answer[:-1]
        return [*prompt, *answer, *self.after_answer, *self.questions[turn.name]]
