"""A second, smaller model that drafts for the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kvist.errors import CapacityError, RequestError, SpecError
from kvist.manager import Run
from kvist.sequence import Sequence as CacheSequence
from kvist_transformers.drafting import Draftable
from kvist_transformers.request import TokenArray
from kvist_transformers.runtime import Runtime

_NONE: TokenArray = np.empty(0, np.int32)


@attrs.define(eq=False)
class _Partner:
    """The draft model's side of one request. tokens: those that ``sequence`` has computed, drafts included."""

    sequence: CacheSequence
    tokens: TokenArray
    wanted: int = 0
    drafts: list[int] = attrs.field(factory=list)


class DraftModel:
    """Drafts greedily with a model that has the target's vocabulary.

    Its cache is its own and only a help: when it is full, requests go without drafts until others end, and the
    target's requests never wait for it. Prompts are computed by both models, each with its own prefix reuse.

    model: a Hugging Face causal LM in eval mode. most: longest draft. memory, block_tokens: of its cache.
    max_batch_tokens: most tokens it computes at a time.

    Raises what :class:`~kvist_transformers.Engine` raises for the model, and SpecError for ``most`` below 1.
    """

    def __init__(
        self,
        model: Any,
        most: int = 4,
        *,
        memory: int | str = "128MiB",
        block_tokens: int = 16,
        max_batch_tokens: int = 512,
    ) -> None:
        if most < 1:
            raise SpecError(f"DraftModel(most={most}) drafts nothing", hint="draft at least one token")
        self.most = most
        self.runtime = Runtime(model, memory=memory, block_tokens=block_tokens, drafts=most)
        self.vocab_size = self.runtime.spec.vocab_size
        self._budget = max_batch_tokens
        self._partners: dict[int, _Partner] = {}

    def propose(self, rows: Sequence[Draftable]) -> list[TokenArray]:
        """See :class:`~kvist_transformers.drafting.Drafter`. Raises what the model raises; its cache is empty then."""
        try:
            with torch.inference_mode():
                partners = [self._follow(row) for row in rows]
                live = [partner for partner in partners if partner is not None]
                while self._advance(live):
                    pass
        except BaseException:
            for number in list(self._partners):
                self.forget(number)
            raise
        return [_NONE if each is None else np.array(each.drafts, np.int32) for each in partners]

    def forget(self, number: int) -> None:
        partner = self._partners.pop(number, None)
        if partner is not None:
            self.runtime.manager.close(partner.sequence)

    def close(self) -> None:
        for number in list(self._partners):
            self.forget(number)
        self.runtime.detach()

    def _follow(self, row: Draftable) -> _Partner | None:
        """The row's partner, having computed nothing that the target has not generated; ``None`` without room."""
        manager, tokens = self.runtime.manager, row.tokens
        partner = self._partners.get(row.number)
        try:
            if partner is None:
                sequence = manager.open(tokens, row.scope)
                partner = self._partners[row.number] = _Partner(sequence, tokens[: sequence.computed])
            else:
                sequence = partner.sequence
                # The newest token is computed in any case: what comes after it is asked for.
                common = min(_common(partner.tokens, tokens), len(tokens) - 1)
                sequence.extend(tokens[sequence.known : common])
                if common < sequence.computed:
                    manager.truncate(sequence, common)
                sequence.extend(tokens[sequence.known :])
                partner.tokens = tokens[: sequence.computed]
        except (CapacityError, RequestError):
            self.forget(row.number)
            return None
        limit = self.runtime.spec.max_tokens
        room = row.most if limit is None else min(row.most, limit - len(tokens) + 1)
        partner.wanted, partner.drafts = max(0, room), []
        partner.tokens = tokens
        return partner

    def _advance(self, partners: Sequence[_Partner]) -> bool:
        """One step of the draft model for those that still want drafts. False when nobody does, or nothing fits."""
        budget, runs, owners, parts = self._budget, [], [], []
        for partner in partners:
            sequence = partner.sequence
            if len(partner.drafts) >= partner.wanted or not budget:
                continue
            begin = sequence.computed
            count = sequence.next_end(begin + min(len(partner.tokens) - begin, budget)) - begin
            budget -= count
            runs.append(Run(sequence, count))
            owners.append(partner)
        while runs:
            plan = self.runtime.manager.plan(runs)
            if plan.fits:
                break
            # The last one does without; what it has computed stays cached.
            owners.pop().wanted = 0
            runs.pop()
        if not runs:
            return False
        step = plan.commit()
        by_sequence = {id(partner.sequence): partner for partner in owners}
        rows = [(by_sequence[id(run.sequence)], run.new_tokens) for run in plan.runs]
        logit_rows, end, ready = [], 0, []
        for partner, count in rows:
            begin = partner.sequence.computed
            parts.append(partner.tokens[begin : begin + count].astype(np.int64))
            end += count
            if begin + count == len(partner.tokens):
                logit_rows.append(end - 1)
                ready.append(partner)
        begun = False
        try:
            device = self.runtime.adapter.device
            self.runtime.memory.apply(step)
            begun = True
            logits = self.runtime.forward(
                step,
                torch.from_numpy(np.concatenate(parts)).to(device),
                torch.from_numpy(step.positions).to(device),
                torch.tensor(logit_rows, dtype=torch.int64, device=device),
            )
        except BaseException:
            self.runtime.manager.cancel(step, ran=begun)
            raise
        self.runtime.manager.complete(step)
        for partner, token in zip(ready, logits.argmax(dim=-1).tolist() if ready else ()):
            partner.drafts.append(token)
            partner.tokens = np.append(partner.tokens, np.int32(token))
        return True


def _common(left: TokenArray, right: TokenArray) -> int:
    """Leading tokens that both have."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
