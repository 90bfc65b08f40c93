"""What the cache machine keeps: one manager, its memory, the models, everything open; and how they are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvist.errors import KvistError
from kvist.events import Entry, Listener, apply
from kvist.manager import DecodeBatch, PagedCacheManager, Plan, Run, Sequence
from kvist.spec import Scope
from kvist.stats import ManagerStats
from kvist.testing.memory import Flight, Live, Memory, fold_on
from kvist.testing.mixes import Draw, Setup
from kvist.testing.model import ReuseModel
from kvist.testing.under_test import ManagerFactory

#: Open sequences, steps in flight, tokens of a prompt and of a sequence, at most.
MOST_LIVE, MOST_FLIGHTS, MOST_PROMPT, MOST_TOKENS = 6, 3, 40, 56
SCOPES = (Scope(), Scope(salt="other"))


def refused(error: type[KvistError], call: Callable[[], object], text: str = "") -> None:
    """Assert that a call raises. Not pytest.raises, whose failure is no Exception and would end the driver."""
    raised: KvistError | None = None
    try:
        call()
    except error as caught:
        raised = caught
    assert raised is not None and text in str(raised), f"no {error.__name__}: {text}"


class CacheBase:
    """Bookkeeping and comparisons; the operations are in subclasses."""

    def __init__(self, setup: Setup, factory: ManagerFactory = PagedCacheManager) -> None:
        self.setup = setup
        self.manager = setup.manager(factory)
        self.layout = layout = self.manager.layout
        self.block = setup.block
        self.sparse = any(group.sparse for group in layout.groups)
        self.windows = any(group.sparse and not group.exact for group in layout.groups)
        self.states = layout.has_states
        self.draft_pages = any(group.exact and group.retention.draft_pages for group in layout.groups)
        self.rings = layout.has_rings
        #: Does a step overwrite what the one before has left?
        self.overwrites = self.states or self.rings
        #: Pages in all, if each serves any group; otherwise None.
        same = {layout.slab_bytes} == {group.page_bytes for group in layout.groups} or len(layout.groups) == 1
        apart = len(layout.groups) > 1 and any(layout.floor_slabs)
        self.pages = layout.page_capacity(layout.groups[0]) if same and not apart else None
        self.memory = Memory(self.manager)
        self.model = ReuseModel(self.block)
        #: Somebody who is told what can be found, and believes it.
        self.listener = self.manager.listen() if setup.listened else None
        self.index: set[Entry] = set()
        self.lives: list[Live] = []
        self.flights: list[Flight] = []
        self.batches = [self.manager.decode_batch(), self.manager.decode_batch()]
        #: The latest step that was completed, or cancelled after it had begun.
        self.newest_run = 0
        self.past = [b"\0" * 9]
        self._noise = setup.noise * 2 + 1
        #: What the numbers of the manager must be.
        self.requests = self.prompt_tokens = self.reused_tokens = self.computed_tokens = self.steps = 0
        self.resumes = self.resumed_tokens = self.forks = self.forked_tokens = 0
        self.last = self.manager.stats()

    def noise(self) -> int:
        """A token that nobody chooses: what the model samples."""
        self._noise = (self._noise * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self._noise >> 40) % self.setup.vocab

    def need(self, live: Live, length: int) -> None:
        """Decide the sequence's tokens up to ``length``, and some more."""
        missing = length + 6 - len(live.text)
        if missing > 0:
            added = bytes(self.noise() for _ in range(missing))
            live.values = fold_on(live.values, live.scope, added)
            live.text += added

    def pick(self, draw: Draw, lives: list[Live]) -> Live | None:
        return lives[draw(len(lives))] if lives else None

    def idle(self, *, suspended: bool = False) -> list[Live]:
        """Sequences that are in no step and no batch."""
        return [
            live
            for live in self.lives
            if live.suspended == suspended and live.sequence.batch is None and not live.sequence.in_flight
        ]

    def flying(self, live: Live) -> bool:
        return any(live in flight.rows for flight in self.flights)

    def live_of(self, sequence: Sequence) -> Live:
        return next(live for live in self.lives if live.sequence is sequence)

    def _extend(self, live: Live, known: int) -> None:
        self.need(live, known)
        if known > live.known and (self.setup.max_tokens is None or known < self.setup.max_tokens):
            live.sequence.extend(np.frombuffer(live.text[live.known : known], np.uint8).astype(np.int32))
            live.known = known

    def _began(self, live: Live) -> None:
        """A step with this sequence is completed: if it is the first, the sequence counts from now on."""
        live.stepped = True
        if live.started:
            return
        live.started = True
        if live.origin == "resumed":
            self.resumes += 1
            self.resumed_tokens += live.claimed
        elif live.origin == "forked":
            self.forks += 1
            self.forked_tokens += live.claimed
        else:
            self.requests += 1
            self.prompt_tokens += live.prompt_length
            self.reused_tokens += live.claimed

    def _published(self, live: Live, before: int, flight: Flight) -> None:
        """A run is completed: whole blocks can be found, and so can the restore points in them."""
        ahead = self.flying(live)
        self.model.publish(live, ended=False, surely=not ahead)
        live.delayed = live.delayed or ahead
        end = live.committed - live.committed % self.block
        if live.shares and not live.delayed and live.computed == live.committed:
            if self.windows:
                self.model.keep_windows(live, [p for p in live.points if before < p <= end])
            for owner, position in flight.snapshots:
                if owner is live and position <= end and position % self.block == 0:
                    self.model.keep_state(live, position)

    def _ended(self, live: Live) -> None:
        """All that is committed was published, the open block too."""
        covered = self.model.known(live.scope, live.text[: live.committed])[1] >= live.committed
        self.model.publish(live, ended=True)
        if live.shares and live.stepped and live.computed == live.committed:
            # Where somebody has the open block already, ours and what its windows held is not needed.
            if live.computed % self.block == 0 or not covered:
                self.model.keep_windows(live, [p for p in (live.computed - 1, live.computed) if p])
            if live.computed % self.block == 0:
                self.model.keep_state(live, live.computed)
        live.columns, live.stepped, live.delayed, live.pending = 0, False, False, False

    def _claimed(self, live: Live, length: int) -> None:
        """It has taken so many tokens from the cache."""
        live.suspended, live.computed, live.delayed = False, length, True
        live.claimed = length
        live.pending = length > 0 and (self.states or length % self.block != 0)

    def _closed(self, live: Live) -> None:
        assert live.sequence.closed
        if not live.suspended:
            self._ended(live)
        self.lives.remove(live)

    def _landed(self, live: Live) -> None:
        """A step with this sequence is over: what waited for the last of them happens."""
        if self.flying(live):
            return
        if live.lost:
            assert live.closing or live.sequence.suspended, "a sequence without its state has to be resumed"
            live.suspended, live.computed, live.columns = True, 0, 0
            live.stepped = live.delayed = live.lost = live.pending = False
        if live.closing:
            self._closed(live)

    def _compare_lengths(self) -> None:
        for live in self.lives:
            sequence = live.sequence
            assert (sequence.computed, sequence.known) == (live.computed, live.known)
            assert sequence.suspended == live.suspended

    def compare_stats(self) -> None:
        """Numbers are those of the models, and only ever grow where they count."""
        stats, last = self.manager.stats(), self.last
        prompts = (stats.requests, stats.prompt_tokens, stats.reused_tokens)
        assert prompts == (self.requests, self.prompt_tokens, self.reused_tokens), "requests, prompt and reused tokens"
        work = (stats.computed_tokens, stats.steps)
        assert work == (self.computed_tokens, self.steps), "computed tokens, steps"
        again = (stats.resumes, stats.resumed_tokens, stats.forks, stats.forked_tokens)
        assert again == (self.resumes, self.resumed_tokens, self.forks, self.forked_tokens), "resumes and forks"
        assert 0 <= stats.reused_tokens <= stats.prompt_tokens
        assert stats.open_sequences == len(self.lives)
        for now, then in zip(stats.groups, last.groups):
            assert now.evicted >= then.evicted and now.held_peak >= max(now.held, then.held_peak)
            assert min(now.free, now.cached, now.held) >= 0
            if len(stats.groups) == 1:
                assert now.free + now.cached + now.held == now.capacity
        self.last = stats

    def check(self) -> None:
        self._compare_lengths()
        self.compare_stats()
        self.manager.check()
        if self.listener is not None:
            self._compare_events(self.listener)

    def _compare_events(self, listener: Listener) -> None:
        """Events have numbers without gaps, and leave a listener with the index as it is."""
        number = listener.number
        events = listener.take()
        assert [event.number for event in events] == list(range(number + 1, number + 1 + len(events)))
        apply(self.index, events)
        now: set[Entry] = set()
        apply(now, listener.snapshot().stored)
        assert self.index == now, "events do not lead to the index"

    # Comparisons with the models

    def _compare_reuse(self, prompt: bytes, scope: int, reused: int, matched: int | None) -> None:
        """What was found lies between what must be known and what may be."""
        must, may = self.model.known(scope, prompt)
        if matched is not None:
            assert must <= matched <= may, f"{matched} tokens are known, must be {must} to {may}"
        least = self._reusable(must, prompt)
        if self.rings:
            # Inside a block a ring is of use at the very end of what was computed only.
            least -= least % self.block
        most = self._reusable(may, prompt)
        assert reused <= most, f"reuses {reused} tokens of at most {most}"
        if self.sparse:
            least = min(least, self._resumable(prompt, scope, least))
        assert reused >= least, f"reuses {reused} tokens of at least {least}"
        assert reused % self.layout.reuse_unit == 0

    def _compare_points(self, sequence: Sequence, named: list[int]) -> list[int]:
        """Positions inside the prompt that others can resume at, and where chunks end if there are states: the last
        block that the same prompt can resume at, where the prompt leaves what is known, regular intervals, and what the
        caller asked for."""
        block, length = self.block, sequence.prompt_length
        wanted = {(length - 1) // block, sequence.matched // block, *(position // block for position in named)}
        if self.setup.every_blocks is not None:
            wanted.update(number for number in range(length // block) if number % self.setup.every_blocks == 0)
        ends = [number * block for number in sorted(wanted) if sequence.reused < number * block < length]
        assert list(sequence.chunk_ends) == (ends if self.states else []), f"{sequence.chunk_ends}, not {ends}"
        return ends

    def _scarce(self, length: int) -> bool:
        """Would a sequence of this length have no room beside a page of each group to copy from?"""
        return not self.layout.fits(length, spare_pages=1)

    def _reusable(self, known: int, prompt: bytes) -> int:
        """Of ``known`` tokens, if every group could resume anywhere."""
        scarce = self._scarce(len(prompt))
        if scarce and self.states:
            return 0
        length = max(0, min(known, len(prompt) - 1) - self.setup.backoff)
        return length - length % (self.block if scarce else self.layout.reuse_unit)

    def _resumable(self, prompt: bytes, scope: int, limit: int) -> int:
        scarce = self._scarce(len(prompt))
        unit = self.block if scarce else self.layout.reuse_unit
        return self.model.resumable(scope, prompt, limit, unit, windows=self.windows, states=self.states)

    def _resumed(self, live: Live) -> None:
        """What goes on after it was suspended counts as resumed when it has done something before and does again."""
        if live.started:
            live.origin, live.started = "resumed", False

    def _taken_back(self, live: Live, back: int, most: int, *, resumed: bool) -> None:
        assert back == live.sequence.computed <= most
        if not live.shares:
            assert back == 0
        must, may = self.model.known(live.scope, live.text[: live.known])
        assert back <= min(may, most), f"took back {back} tokens of at most {min(may, most)}"
        if not self.sparse:
            scarce = self._scarce(live.known)
            least = max(0, min(must, most) - self.setup.backoff)
            least -= least % (self.block if scarce or self.rings else self.layout.reuse_unit)
            assert back >= least or not live.shares, f"took back {back} tokens of at least {least}"
        self._claimed(live, back)
        if resumed:
            self._resumed(live)
        live.may_length, live.must_length = min(live.may_length, back), 0

    def columns_of(self, run: Run) -> int:
        """Pages of a state while a run is under way."""
        return 1 + (run.query_tokens if run.drafts and self.draft_pages else 0)

    def _compare_fit(self, plan: Plan, runs: list[Run], decode: DecodeBatch | None, stats: ManagerStats) -> None:
        """A plan fits exactly if everything but what is held is enough, where pages serve any group."""
        if self.pages is None:
            return
        blocks = states = 0
        for sequence, count in [(run.sequence, run.query_tokens) for run in runs] + [
            (sequence, 1) for sequence in (decode.sequences if decode is not None else ())
        ]:
            blocks += max(0, -(-(sequence.scheduled + count) // self.block) - sequence.reserved // self.block)
        for run in runs:
            live = self.live_of(run.sequence)
            states += max(0, self.columns_of(run) - live.columns)
        needed = sum(states if group.exact else blocks for group in self.layout.groups)
        room = self.pages - sum(group.held for group in stats.groups)
        assert plan.fits == (needed <= room), f"needs {needed} of {room} pages, fits: {plan.fits}"

    def _compare_evictions(self, before: ManagerStats, needed: list[int]) -> None:
        """Nothing is evicted beyond what the step lacked: arenas here are too small to look ahead."""
        after = self.manager.stats()
        gone = sum(group.evicted for group in after.groups) - sum(group.evicted for group in before.groups)
        if gone:
            self.model.evicted(self.lives)
        if self.pages is not None:
            used = sum(group.held + group.cached for group in before.groups)
            lacking = max(0, sum(needed) - (self.pages - used))
            # A block goes with the pages of all groups, and of sparse groups an extent's idle pages go at once.
            assert lacking <= gone < lacking + len(needed) or (self.sparse and lacking), (
                f"{gone} gone, {lacking} lacked"
            )

    def _compare_evictions_of_fork(self, before: ManagerStats) -> None:
        after = self.manager.stats()
        if sum(group.evicted for group in after.groups) > sum(group.evicted for group in before.groups):
            self.model.evicted(self.lives)
