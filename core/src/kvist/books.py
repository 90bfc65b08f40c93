"""What a cache manager keeps books of, what it can tell from them, and how room is made."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from kvist.audit import faults_of, tier_faults
from kvist.capacity import Capacity, capacity_of
from kvist.claim import Claims
from kvist.commit import Committer
from kvist.defrag import Defragmenter
from kvist.errors import StateError
from kvist.events import Events, Listener
from kvist.eviction import Eviction, choose, evict
from kvist.handover import Handovers
from kvist.keeper import Keeper
from kvist.layout import KEPT_ROLLBACK, Layout
from kvist.ledger import Ledger
from kvist.owed import Owed
from kvist.plan import Plan, Shortage
from kvist.policies import EvictionPolicy
from kvist.prefix.branches import Branch, largest_branches
from kvist.prefix.match import Match, find
from kvist.prefix.tree import PrefixTree
from kvist.publish import Publisher
from kvist.restore import RestorePolicy
from kvist.sequence import Sequence, Tables
from kvist.spec import Scope
from kvist.states import States
from kvist.stats import ManagerStats, Tally, group_stats
from kvist.step import NO_PAGE, IntArray
from kvist.tiers.lower import LowerTiers
from kvist.watches import TreeWatch


class Books:
    """The parts of a manager, and what all its calls need of them.

    The arguments are those of :class:`kvist.manager.PagedCacheManager`.
    """

    def __init__(
        self,
        layout: Layout,
        restore: RestorePolicy | None = None,
        backoff_tokens: int = 0,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        policy = restore or RestorePolicy()
        self.layout = layout
        self._block = layout.block_tokens
        self._policy = policy
        self._backoff = backoff_tokens
        self._group_range = range(len(layout.groups))
        self._sparse = [group for group in layout.groups if group.sparse]
        self._windows = [group for group in self._sparse if not group.exact]
        self._ledger = Ledger(layout)
        self._tree = PrefixTree(self._block, len(layout.groups))
        self._tables = Tables(len(layout.groups))
        self._keeper = Keeper(self._tree, eviction)
        self._claims = Claims(layout, self._keeper, self._ledger, self._tables)
        self._publisher = Publisher(layout, self._keeper, self._ledger, self._tables, policy)
        self._states = States(layout, self._ledger, self._tables, policy)
        self._has_states = layout.has_states
        #: Does a step overwrite what the one before has left?
        self._overwrites = layout.has_states or layout.has_rings
        self._owed = Owed(layout)
        self._nothing_needed = [0 for _ in layout.groups]
        self._committer = Committer(
            layout, self._ledger, self._tables, self._claims, self._states, self._owed, self._nothing_needed
        )
        self._sequences: dict[int, Sequence] = {}
        self._defragmenter = Defragmenter(layout, self._keeper, self._ledger, self._tables, self._owed, self._sequences)
        self._handovers = Handovers(layout, self._ledger, self._tree, self._tables, self._claims.released)
        self._defragmenter.copying.append(self._handovers)
        self._in_flight: dict[int, Plan] = {}
        #: The latest step that was completed, or cancelled after it had begun.
        self._newest_run = 0
        self._closing: list[Sequence] = []
        self._events: Events | None = None
        #: Sequences whose states a cancelled step may have overwritten, and that are in older steps still.
        self._spoiled: list[Sequence] = []
        #: Longest sequence that is known to fit the whole arena, with a page per group to start from.
        self._fits_up_to = 0
        self._epoch = 0
        self._step_count = 0
        self._tally = Tally(len(layout.groups))
        self._lower: LowerTiers | None = None

    def free_pages(self, group: int) -> IntArray:
        """Ids of all pages of a group that nobody holds or can find, e.g. to poison them in a test."""
        return self._ledger.free_pages(group)

    def shuffle_free_pages(self, rng: np.random.Generator) -> None:
        """Hand out free pages in random order from now on, so that tests meet page tables of every kind."""
        self._ledger.arena.shuffle(rng)
        self._epoch += 1

    def check(self) -> None:
        lower = self._lower
        pins = [*self._handovers.pins, *(() if lower is None else lower.device.pins.values())]
        faults = faults_of(self._ledger, self._tree, self._tables, list(self._sequences.values()), pins)
        if lower is not None:
            faults += tier_faults(lower)
        if faults:
            raise AssertionError("; ".join(faults))

    def listen(self, max_blocks: int = 1 << 16) -> Listener:
        if self._events is None:
            events = Events()
            events.add(TreeWatch(events, self.layout, self._tree))
            if self._lower is not None:
                self._lower.watch(events)
            self._events = events
        return self._events.attach(max_blocks)

    def capacity(self, chunk_tokens: int | None = None) -> Capacity:
        epoch = self._epoch
        return capacity_of(
            self.layout, self._tree, self._ledger, self._defragmenter, chunk_tokens, lambda: self._epoch == epoch
        )

    def stats(self) -> ManagerStats:
        self._ledger.note_peaks(self._tree.idle_blocks)
        tally = self._tally
        tally.catch_up(self._sequences.values())
        copying = self._handovers.copying
        if self._lower is not None:
            copying = [here + below for here, below in zip(copying, self._lower.device.copying)]
        return ManagerStats(
            tally.requests,
            tally.prompt_tokens,
            tally.reused_tokens,
            tally.resumes,
            tally.resumed_tokens,
            tally.forks,
            tally.forked_tokens,
            tally.computed_tokens,
            tally.steps,
            len(self._sequences),
            self._tree.extent_count,
            group_stats(self.layout, self._ledger, self._tree.idle_blocks, tally, self._defragmenter.moved, copying),
            () if self._lower is None else self._lower.stats(tally),
            tally.received_tokens,
            tally.handed_tokens,
            tally.partial_reuses,
            tally.suspends,
            tally.recomputed_tokens,
        )

    def branches(self, limit: int = 40) -> list[Branch]:
        return largest_branches(self._tree, limit)

    def _changed(self) -> None:
        self._epoch += 1

    def _limits(self, length: int, limit: int) -> tuple[int, bool]:
        """For a run of ``length`` tokens: the limit of its reuse, and must it end at a block boundary?"""
        # While a part of a block is copied, source and copy exist: a prompt that fits only just goes without.
        if length > self._fits_up_to and self.layout.fits(length, spare_pages=1):
            self._fits_up_to = length
        whole_blocks = length > self._fits_up_to
        if whole_blocks and self._has_states:
            # The same holds for a state and the snapshot that it starts from.
            limit = 0
        return limit, whole_blocks

    def _match(self, prompt: IntArray, scope: Scope, limit: int) -> Match:
        limit, whole_blocks = self._limits(len(prompt), limit)
        return find(
            self._tree,
            self.layout,
            self._sparse,
            scope,
            prompt,
            limit,
            backoff=self._backoff,
            whole_blocks=whole_blocks,
        )

    def _make_room(self, needed: list[int]) -> tuple[Eviction, tuple[Shortage, ...]]:
        """What must be evicted for ``needed`` pages per group, and what would be lacking all the same."""
        eviction, short = self._defragmenter.make_room(needed)
        if not any(short):
            return eviction, ()
        return eviction, tuple(
            Shortage(group.name, needed[group.index], needed[group.index] - short[group.index], self._copies)
            for group in self.layout.groups
            if short[group.index]
        )

    @property
    def _copies(self) -> int:
        """Copies between tiers in progress that keep pages of the device."""
        return 0 if self._lower is None else len(self._lower.device.pins)

    def _evict(self, eviction: Eviction) -> None:
        for group, count in enumerate(evict(self._keeper, self._ledger, eviction)):
            self._tally.evicted[group] += count
        if eviction.moves is not None:
            self._defragmenter.carry_out(eviction.moves)

    def _take_room(self, needed: list[int]) -> bool:
        # Without moving pages: a load would overwrite those that the next step is still to move.
        eviction, short = choose(self._keeper, self._ledger, needed)
        if any(short):
            return False
        self._epoch += 1
        self._evict(eviction)
        return True

    def _new_pages(self, needed: list[int]) -> list[IntArray] | None:
        """Pages that no step in other hands touches any more, with one lease each. None, and nothing changes, without
        room."""
        in_use = self._pages_in_use()
        wanted = [count + len(pages) for count, pages in zip(needed, in_use)]
        if not self._take_room(wanted):
            return None
        if len(wanted) > 1:
            self._ledger.arena.gather(wanted)
        new = []
        for group, count in enumerate(wanted):
            pages = self._ledger.allocate(group, count)
            if in_use[group]:
                pages = pages[np.argsort(np.isin(pages, in_use[group]), kind="stable")]
            chosen, rest = np.split(pages, [needed[group]])
            if len(rest):
                self._ledger.release(group, rest)
            new.append(chosen)
        return new

    def _pages_in_use(self) -> list[SequenceOf[int]]:
        """Per group the pages whose bytes steps in flight and the next one copy from or to: they are executed after
        their commit, and copies between tiers would not wait for that."""
        pages = self._owed.pages()
        for plan in self._in_flight.values():
            assert plan.step is not None
            for pairs in (plan.step.copies, plan.step.saves, plan.step.fresh):
                for group, each in enumerate(pairs):
                    pages[group].extend(each.ravel().tolist())
        sizes = [group.page_bytes for group in self.layout.groups]
        ranges = [(page * size, (page + 1) * size) for each, size in zip(pages, sizes) for page in set(each)]
        # A page that was given up may belong to another group by now.
        return [
            sorted({page for low, high in ranges for page in range(low // size, -(-high // size))}) for size in sizes
        ]

    def _drop(self, sequence: Sequence) -> None:
        """Release blocks that the groups do not read any more."""
        length = sequence.computed
        for group in self._windows:
            table = self._tables.arrays[group.index][sequence.slot]
            for low, high in group.retention.droppable(length, KEPT_ROLLBACK, self._block):
                row = table[low:high]
                pages = row[row != NO_PAGE]
                if len(pages):
                    self._ledger.release(group.index, pages)
                    row[:] = NO_PAGE

    def _require_own(self, sequence: Sequence, call: str) -> None:
        if self._sequences.get(sequence.slot) is not sequence:
            raise StateError(f"{call} of another manager's sequence")

    def _require_idle(self, sequence: Sequence, call: str) -> None:
        if sequence.closed or sequence.closing:
            raise StateError(f"{call} of a closed sequence", hint="open a new one")
        self._require_own(sequence, call)
        if sequence.arriving:
            raise StateError(
                f"{call} of a sequence whose rows are on their way from another process",
                hint="wait for its transfer to end, then call landed() or give_up()",
            )
        sequence.settle()
        if sequence.in_flight or sequence.batch is not None:
            raise StateError(
                f"{call} of a sequence that is in a step or in a decode batch",
                hint="complete the step first, and leave the batch",
            )
