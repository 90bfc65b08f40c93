"""Drafts in an engine's steps: which requests get them, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvist.errors import SpecError
from kvist.layout import Layout
from kvist.scheduling import Chunk, Scheduler
from kvist.step import IntArray
from kvist_transformers.drafting import Draftable, Drafter, DraftLengths
from kvist_transformers.job import EngineJob
from kvist_transformers.request import TokenArray
from kvist_transformers.slots import Slots, SlotTable


class Speculation:
    """Between an engine and its drafter.

    Raises SpecError for a drafter with another vocabulary, or when the model's spec can take no drafts back.
    """

    def __init__(self, drafter: Drafter, layout: Layout) -> None:
        if drafter.vocab_size not in (None, layout.spec.vocab_size):
            raise SpecError(
                f"the drafter has a vocabulary of {drafter.vocab_size} tokens, the model has {layout.spec.vocab_size}",
                hint="draft with a model of the same family and tokenizer",
            )
        if layout.most_drafts == 0:
            raise SpecError(
                "the model's spec can take no drafts back",
                hint="its spec factory takes no drafts: serve it without a drafter",
            )
        self._drafter = drafter
        most = drafter.most if layout.most_drafts is None else min(drafter.most, layout.most_drafts)
        self._lengths = DraftLengths(most)

    def drafts(self, scheduler: Scheduler[EngineJob], slots: SlotTable) -> dict[int, IntArray]:
        """By job number, for :meth:`Scheduler.turn`."""
        room = scheduler.draft_room
        rows = []
        for job in scheduler.decoding:
            # The last token of a request needs no draft behind it.
            most = min(room, int(slots.limit[job.slot] - slots.count[job.slot]) - 1)
            if most < 1:
                continue
            most = min(most, self._lengths.next(job.number))
            if most:
                tokens = np.concatenate([job.request.tokens, slots.generated(job.slot)])
                rows.append(Draftable(job.number, tokens, job.scope, most))
        if not rows:
            return {}
        proposed = zip(rows, self._drafter.propose(rows), strict=True)
        return {row.number: tokens for row, tokens in proposed if len(tokens)}

    def learn(self, chunks: Sequence[Chunk[EngineJob]], accepted: Sequence[int]) -> None:
        """What was kept of a step's drafts, as for :meth:`Scheduler.complete`."""
        drafting = (chunk for chunk in chunks if len(chunk.drafts))
        for chunk, count in zip(drafting, accepted, strict=True):
            self._lengths.learn(chunk.job.number, len(chunk.drafts), count - 1)

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._lengths.forget(number)
        self._drafter.forget(number)

    def close(self) -> None:
        """The engine is closed."""
        self._drafter.close()


class Chosen:
    """The rows of a step after which a token is chosen: one for each job that decodes and each prompt that ends, and
    with drafts one more for each of them.

    rows: slots of the jobs. slots, offsets: int64 ``[rows of logits]``, the slot, and how many tokens of this step come
    before the one that is chosen there.
    """

    def __init__(self, decode_slots: Slots, chunks: Sequence[Chunk[EngineJob]]) -> None:
        self._chunks = chunks
        self._drafts = any(len(chunk.drafts) for chunk in chunks)
        ends = np.array([chunk.job.slot for chunk in chunks], np.int64)
        self.rows: Slots = np.concatenate([decode_slots, ends])
        self.slots: Slots = self.rows
        if not self._drafts:
            self.offsets = np.zeros(len(self.rows), np.int64)
            return
        self._decode_rows = len(decode_slots)
        self._widths = np.array([1 + len(chunk.drafts) for chunk in chunks], np.int64)
        self.slots = np.concatenate([decode_slots, np.repeat(ends, self._widths)])
        self.offsets = np.zeros(len(self.slots), np.int64)
        for start, width in self._drafting():
            self.offsets[start : start + width] = np.arange(width)

    def keep(self, tokens: TokenArray, table: SlotTable) -> list[int]:
        """Give each job its tokens: those chosen as long as the drafts before them were right, up to a stop token or
        the job's limit. Returns how many the jobs with drafts got, in order."""
        if not self._drafts:
            table.append(self.slots, tokens)
            return []
        single = np.ones(len(tokens), np.bool_)
        kept = []
        drafting = [chunk for chunk in self._chunks if len(chunk.drafts)]
        for chunk, (start, width) in zip(drafting, self._drafting(), strict=True):
            single[start : start + width] = False
            run = tokens[start : start + width]
            wrong = np.flatnonzero(run[:-1] != chunk.drafts)
            kept.append(table.extend(chunk.job.slot, run[: int(wrong[0]) + 1] if len(wrong) else run))
        table.append(self.slots[single], tokens[single])
        return kept

    def _drafting(self) -> list[tuple[int, int]]:
        """First row of logits and number of them, for each job with drafts."""
        starts = self._decode_rows + np.cumsum(self._widths) - self._widths
        return [(start, width) for start, width in zip(starts.tolist(), self._widths.tolist()) if width > 1]
