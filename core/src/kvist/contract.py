"""The contract between an engine and a cache manager."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy.typing as npt

from kvist.batch import DecodeBatch
from kvist.layout import Layout
from kvist.plan import Plan, Run
from kvist.sequence import Sequence
from kvist.spec import Scope
from kvist.stats import ManagerStats
from kvist.step import Step


class CacheManager(Protocol):
    """What an engine needs from a cache manager. One thread drives it; no call blocks.

    Between ``plan`` and ``commit`` nothing may change; between ``commit`` and ``complete`` the step's sequences belong
    to the step. Every method leaves everything unchanged when it raises.
    """

    layout: Layout

    def open(self, tokens: npt.ArrayLike, scope: Scope = ...) -> Sequence:
        """A new sequence with the prompt ``tokens`` (int ids), holding what it can reuse; nothing else is allocated.

        A read-only int32 array is kept, so nobody may write to its memory afterwards; anything else is copied.
        Raises RequestError for an empty prompt or ids out of range, CapacityError if it can never fit.
        """

    def probe(self, tokens: npt.ArrayLike, scope: Scope = ...) -> int:
        """Tokens that ``open`` would reuse now. Changes nothing."""

    def decode_batch(self) -> DecodeBatch:
        """A new, empty batch for sequences that advance one token a step."""

    def plan(self, runs: Iterable[Run] = ..., decode: DecodeBatch | None = None) -> Plan:
        """What the batch would need. Changes nothing. Rows of the step: ``decode``'s first, then runs of one query
        token, then the others, each in the order given.

        Raises StateError for sequences that are closed, in flight, in a batch or named twice, RequestError for a run
        past the model's length.
        """

    def complete(self, step: Step, accepted: SequenceOf[int] | None = None) -> None:
        """The step's rows are written: advance lengths, publish, drop what is no longer read.

        accepted: tokens that stay, for each run in row order (``decode`` rows always keep their one); ``None`` keeps
        ``new_tokens`` of each run and no draft.
        """

    def cancel(self, step: Step) -> None:
        """The step will not run or failed: its sequences are as before, but keep the pages they got."""

    def close(self, sequence: Sequence) -> None:
        """Publish what is committed, give every page back. Idempotent. During a step it takes effect at its end."""

    def check(self) -> None:
        """Raise AssertionError naming every violated invariant. For tests and diagnosis: costs time."""

    def stats(self) -> ManagerStats:
        """Numbers so far."""
