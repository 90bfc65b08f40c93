"""The contract between an engine and a cache manager."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy.typing as npt

from kvist.batch import DecodeBatch
from kvist.capacity import Capacity
from kvist.events import Listener
from kvist.handover import Hold, Landing
from kvist.layout import Layout
from kvist.plan import Plan, Run
from kvist.prefix.branches import Branch
from kvist.sequence import Sequence
from kvist.spec import Scope
from kvist.stats import Cleared, ManagerStats
from kvist.step import Step
from kvist.wishes import Wishes


class CacheManager(Protocol):
    """What an engine needs from a cache manager. One thread drives it; no call blocks.

    Between ``plan`` and ``commit`` nothing may change. Between ``commit`` and ``complete`` the next step may be planned
    and committed; what a step's tables say about its rows does not change until it is completed. Steps are executed in
    the order of their commits, completed oldest first and cancelled newest first, as far as they share sequences.
    Every method leaves everything unchanged when it raises.
    """

    layout: Layout

    @property
    def copying(self) -> int:
        """Batches of copies between tiers that ``poll`` has not taken in yet."""

    def open(
        self,
        tokens: npt.ArrayLike,
        scope: Scope = ...,
        *,
        reuse: bool = True,
        restore_at: SequenceOf[int] = (),
        wishes: Wishes | None = None,
    ) -> Sequence:
        """A new sequence with the prompt ``tokens`` (int ids), holding what it can reuse; nothing else is allocated.

        A read-only int32 array is kept, so nobody may write to its memory afterwards; anything else is copied.
        reuse: ``False`` takes nothing from the cache and gives nothing to it.
        restore_at: positions, rounded down to blocks, at which later prompts should be able to resume.
        wishes: how long its blocks should stay in the cache, softly; forks have the same.
        Raises RequestError for an empty prompt or ids out of range, CapacityError if it can never fit.
        """

    def probe(self, tokens: npt.ArrayLike, scope: Scope = ...) -> int:
        """Tokens that ``open`` would reuse now. Changes nothing."""

    def decode_batch(self) -> DecodeBatch:
        """A new, empty batch for sequences that advance one token a step."""

    def plan(self, runs: Iterable[Run] = ..., decode: DecodeBatch | None = None) -> Plan:
        """What the batch would need. Changes nothing. Rows of the step: ``decode``'s first, then runs of one query
        token, then the others, each in the order given.

        Pages that steps in flight name stay where they are, so a plan that does not fit may fit once they are
        completed: try that before anybody is suspended.

        Steps in flight count as completed; a sequence whose step in flight has drafts has to wait for it. Where a
        group keeps states, a run with drafts needs a page for the state after each of its query tokens.

        Raises StateError for sequences that are closed, suspended, in a batch, named twice, or in flight with drafts;
        RequestError for a run past the model's length.
        """

    def complete(self, step: Step, accepted: SequenceOf[int] | None = None) -> None:
        """The step's rows are written: advance lengths, publish, drop what is no longer read.

        accepted: tokens that stay, for each run in row order (``decode`` rows always keep their one); ``None`` keeps
        ``new_tokens`` of each run and no draft. Where a group keeps states or rings, a run without drafts keeps all.
        """

    def cancel(self, step: Step, *, ran: bool = True) -> None:
        """The step will not run or failed: its sequences are as before, but keep the pages they got.

        ran: has it begun? Its copies and zeros are then done, and any of its rows may be written. States and rings can
        be overwritten, so where a group has them the step's sequences leave their batch and are suspended, once their
        older steps are completed. Their whole blocks, with the snapshots in them, are published before, and
        :meth:`resume` takes them back to a restore point. With ``False`` the copies and zeros are left to the next
        step, and StateError is raised if there are any and a later step has begun.
        """

    def suspend(self, sequence: Sequence) -> None:
        """Publish what is committed and give every page back, so that others can have them; the sequence stays open.
        What a lower tier has room for is copied there first, and others get those pages once ``poll`` has seen that
        finished. Idempotent. Raises StateError if it is closed, in a batch or in a step."""

    def resume(self, sequence: Sequence) -> int:
        """Take back what is still there of a suspended sequence. Returns its computed tokens, perhaps fewer than
        before; the known ones after them have to be computed again. Raises StateError as ``suspend`` does."""

    def truncate(self, sequence: Sequence, length: int) -> int:
        """Forget the tokens from position ``length`` on. Returns the computed tokens: ``length``, or fewer where some
        group cannot go back that far; the known ones after them have to be computed again.

        Raises RequestError unless ``1 <= length <= sequence.known``, StateError as ``suspend`` does.
        """

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same tokens, computed as far. They share whole blocks and never see each other's
        later tokens; what they do not share is copied when the next step begins.

        Raises CapacityError when there is no room for the copies, StateError as ``suspend`` does, and for a sequence
        that opted out of reuse or has computed tokens of unknown ids.
        """

    def close(self, sequence: Sequence) -> None:
        """Publish what is committed, give every page back. Idempotent. During a step it takes effect at its end."""

    def load(self, sequence: Sequence) -> bool:
        """Begin to bring up from lower tiers what ``sequence.loadable`` promises beyond what the sequence has, after
        ``open`` or ``resume`` and before its next step. It is ``loading`` until ``poll`` has taken in all of it, then
        it has as much as arrived. To truncate, suspend or close it meanwhile ends its wait, and what arrives is cached.

        False, and nothing changes, when there is nothing to bring or no room for it now: compute the tokens, or try
        again later. Raises StateError as ``suspend`` does, and for a suspended sequence.
        """

    def hand_over(self, sequence: Sequence) -> Hold:
        """Close a sequence for somebody who still reads its pages, e.g. because they are sent to another process: the
        pages stay until the hold is released, and what was computed is published as by ``close``.

        Raises StateError as ``suspend`` does, for a sequence that has computed nothing, is suspended or loading, and
        while a step that is still to run copies one of its pages.
        """

    def lend(self, sequence: Sequence) -> Hold:
        """Keep the whole blocks that a sequence has published, for somebody who reads them while it goes on: those of
        groups that keep every block. Raises StateError as ``hand_over`` does."""

    def land(self, tokens: npt.ArrayLike, scope: Scope = ..., *, length: int | None = ...) -> Landing:
        """A new sequence for ``tokens``, the rows of the first ``length`` of which (default: of all) are to be written
        by somebody else: it holds what is cached, whole blocks only, and new pages for the rest. Nothing can be done
        with it, and nobody finds what is written, until ``landed`` or ``give_up``.

        Raises RequestError and CapacityError as ``open`` does, RequestError also for a length out of range, and
        CapacityError when there is no room now.
        """

    def landed(self, landing: Landing) -> Sequence:
        """All rows of a landing are written and nobody writes to its pages any more: publish them, and let the sequence
        go on. Raises StateError for a landing that is over."""

    def give_up(self, landing: Landing) -> Hold:
        """The rows do not come: close the sequence, and publish nothing. Its pages stay until the hold is released,
        which must wait until nobody can write to them. Raises StateError for a landing that is over."""

    def poll(self) -> None:
        """Take in finished copies between tiers and submit new ones. Cheap; call it once a step, before ``plan``, and
        when a plan does not fit although copies are in progress: what they keep can be had when they have finished.

        A sequence may have fewer tokens than before its load when part of that failed.
        """

    def clear(self) -> Cleared:
        """Forget everything cached in every tier, e.g. because the weights changed; what is being copied arrives
        nowhere. Open sequences go on with what they hold, and nothing that they compute is found by others."""

    def check(self) -> None:
        """Raise AssertionError naming every violated invariant. For tests and diagnosis: costs time."""

    def listen(self, max_blocks: int = ...) -> Listener:
        """Be told from now on which blocks can be found. Costs nothing while nobody listens.

        max_blocks: blocks named in events that nobody has taken yet; with more the listener is behind.
        Raises SpecError for a bound below 1, and for a spec without fingerprint: its blocks have no keys.
        """

    def capacity(self, chunk_tokens: int | None = ...) -> Capacity:
        """What would fit now. Changes nothing; takes time in proportion to the extents.

        chunk_tokens: the most tokens of one sequence that a step computes; ``None`` computes prompts in one step.
        Raises RequestError for chunks below 1.
        """

    def stats(self) -> ManagerStats:
        """Numbers so far. Takes time in proportion to groups, open sequences and copies, not to pages."""

    def branches(self, limit: int = ...) -> list[Branch]:
        """The ``limit`` largest branches of what can be found on the device, parents before their children, larger
        ones first. Changes nothing; takes time in proportion to the extents. Raises RequestError for a limit below 1.
        """
