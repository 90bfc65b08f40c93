"""Tokens per second with drafts by prompt lookup, beside the same engine without.

SmolLM2-135M, greedy, float32, one request at a time and eight at a time: the model is shown a text and asked for it
again, so that much of the answer stands in the prompt already. The tokens are the same with and without, or the script
fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import harness
from records import Figure

FIGURES = ("speculation.speedup_copy_1", "speculation.speedup_copy_8", "speculation.accepted")

TEXTS = (
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n",
    "Take the second road on the left, walk past the mill, and cross the bridge. The boat house is on the right.",
    "1. Wash the rice. 2. Boil two cups of water. 3. Add the rice. 4. Cover the pot and wait for twenty minutes.",
    "Dear Anna, thank you for the letter. We arrived on Monday. The house is small, but the garden is large.",
    'name: "kvist", kind: "library", language: "python", cores: 2, memory: "24 GiB", system: "linux"',
    "The lake is cold in spring. In summer it is warm enough to swim. In winter it is covered with ice.",
    "for name in names:\n    print(name)\nfor number in numbers:\n    print(number)\n",
    "Monday: soup. Tuesday: fish. Wednesday: bread and cheese. Thursday: soup. Friday: fish.",
)


def measure(options: argparse.Namespace) -> list[Figure]:
    from kvist_transformers import Engine, PromptLookup, Request
    from kvist_transformers.models import load_model, load_tokenizer, prepare

    folder = prepare(harness.progress)
    tokenizer = load_tokenizer(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Write this text again, word for word:\n\n{text}"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for text in TEXTS
    ]
    new_tokens, runs = (24, 1) if options.quick else (96, 5)
    requests = [Request(prompt, max_new_tokens=new_tokens) for prompt in prompts]
    model = load_model(folder, "float32")
    seconds: dict[tuple[int, bool], list[float]] = {}
    answers = set()
    drafted = accepted = 0
    for _ in range(runs):
        for at_once in (1, 8):
            for drafting in (True, False):
                with Engine(model, max_sequences=at_once, drafter=PromptLookup() if drafting else None) as engine:
                    engine.generate([Request(prompts[0], max_new_tokens=2)])
                    begin = time.perf_counter()
                    done = engine.generate(requests)
                    seconds.setdefault((at_once, drafting), []).append(time.perf_counter() - begin)
                    drafted += engine.stats.drafted_tokens
                    accepted += engine.stats.accepted_tokens
                answers.add(tuple(tuple(each.tokens.tolist()) for each in done))
    if len(answers) != 1:
        raise AssertionError("drafts have changed what is generated")
    total = sum(map(len, answers.pop()))
    figures = [_speedup(at_once, seconds[at_once, True], seconds[at_once, False], total) for at_once in (1, 8)]
    share = accepted / drafted if drafted else 0.0
    return [*figures, Figure(figure=FIGURES[2], value=100 * share, unit="% of drafts", runs=runs)]


def _speedup(at_once: int, with_drafts: list[float], without: list[float], tokens: int) -> Figure:
    return Figure(
        figure=f"speculation.speedup_copy_{at_once}",
        value=tokens / statistics.median(with_drafts),
        unit="tokens/s",
        peer="without drafts",
        peer_value=tokens / statistics.median(without),
        ratio=statistics.median(slow / fast for slow, fast in zip(without, with_drafts)),
        runs=len(without),
    )


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
