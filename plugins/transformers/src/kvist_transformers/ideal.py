"""What an unbounded prefix cache could have reused: brute force on token lists, sharing no code with Kvist."""

from __future__ import annotations

from collections.abc import Sequence

#: One wave of a workload: prompt and answer of each request, in order.
Wave = Sequence[tuple[list[int], list[int]]]


def unbounded_reuse(waves: Sequence[Wave]) -> list[int]:
    """Prompt tokens of each request that some earlier row could serve, token by token.

    A request of a wave can reuse the prompts that come before it in its wave, and everything that the waves before
    have computed: prompts and answers without each answer's last token, which is never fed back to the model. At
    least one token of every prompt has to be computed, for its logits.
    """
    computed: list[list[int]] = []
    reusable = []
    for wave in waves:
        prompts: list[list[int]] = []
        for prompt, _ in wave:
            longest = max((_shared(prompt, known) for known in computed + prompts), default=0)
            reusable.append(min(longest, len(prompt) - 1))
            prompts.append(prompt)
        computed += [prompt + answer[:-1] for prompt, answer in wave]
    return reusable


def _shared(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
