"""The calls of a manager that concern other processes: what leaves for one, and what comes from one."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import CapacityError, RequestError, StateError
from kvist.handover import Hold, Landing
from kvist.layout import KEPT_ROLLBACK
from kvist.plan import room_hint
from kvist.prefix.match import Match
from kvist.residents import Residents
from kvist.sequence import Sequence, as_prompt, frozen_tokens
from kvist.spec import Scope
from kvist.step import NO_PAGE, IntArray

_DEFAULT_SCOPE = Scope()


class Exchange(Residents):
    """What sequences leave behind for others to read, and take in that others write."""

    def hand_over(self, sequence: Sequence) -> Hold:
        self._require_idle(sequence, "hand_over()")
        computed = sequence.computed
        if sequence.suspended or sequence.loading or not computed or sequence.sources is not None:
            raise StateError(
                "hand_over() of a sequence that has computed nothing, is suspended or loading",
                hint="complete a step of it first",
            )
        self._refuse_copied(sequence, "hand_over()")
        states = self._handovers.lease_states(sequence)
        self._tally.catch_up((sequence,))
        self._publish_all(sequence)
        self._tally.handed_tokens += computed
        hold = self._handovers.keep(sequence, computed, states)
        self._end(sequence)
        return hold

    def lend(self, sequence: Sequence) -> Hold:
        self._require_idle(sequence, "lend()")
        self._refuse_copied(sequence, "lend()")
        self._epoch += 1
        return self._handovers.lend(sequence)

    def land(self, tokens: npt.ArrayLike, scope: Scope = _DEFAULT_SCOPE, *, length: int | None = None) -> Landing:
        prompt = frozen_tokens(as_prompt(tokens, self.layout.spec))
        length = len(prompt) if length is None else length
        if not 1 <= length <= len(prompt):
            raise RequestError(f"land() of {length} of {len(prompt)} tokens")
        self.layout.require_fit(len(prompt))
        match = self._match(prompt, scope, length)
        sequence = Sequence(self.layout, scope, self._tables.acquire(), prompt)
        sequence.matched = match.known
        pages: tuple[IntArray, ...] = tuple(np.empty(0, np.int32) for _ in self._group_range)
        if match.length == length:
            self._claims.claim(sequence, match)
        else:
            self._claims.claim(sequence, self._whole_blocks(match, length))
            self._claims.drop_sources(sequence, used=False)
            new = self._new_pages(self._landing_needs(sequence, length))
            if new is None:
                self._claims.vacate(sequence)
                self._tables.release(sequence.slot)
                self._epoch += 1
                raise CapacityError(
                    f"no room now for {length} tokens from another process",
                    hint=room_hint(self._copies, "land", "close a sequence first"),
                )
            pages = self._take(sequence, length, new)
        sequence.reused = sequence.claimed = sequence.computed
        sequence.arriving = True
        self._sequences[sequence.slot] = sequence
        self._epoch += 1
        blocks = -(-length // self._block)
        tables = tuple(
            self._tables.arrays[group.index][sequence.slot, : 1 if group.exact else blocks].copy()
            for group in self.layout.groups
        )
        return Landing(sequence, length, pages, tables)

    def landed(self, landing: Landing) -> Sequence:
        sequence = landing.sequence
        self._require_landing(sequence, "landed()")
        self._epoch += 1
        sequence.arriving = False
        sequence.received = landing.length - sequence.computed
        sequence.advance(sequence.received)
        sequence.claimed = landing.length
        if self._sparse:
            length = sequence.prompt_length
            points = self._policy.prompt_points(length, sequence.reused, landing.length, self._block)
            sequence.chunk_ends = points if self._has_states else ()
            # What came is kept also where its history was known before.
            ends = {landing.length, *self._policy.end_points(length, self._block)}
            sequence.points = sorted({*points, *ends}) if self._windows else []
        self._publisher.publish(sequence, ended=False)
        if self._sparse:
            self._drop(sequence)
        return sequence

    def give_up(self, landing: Landing) -> Hold:
        sequence = landing.sequence
        self._require_landing(sequence, "give_up()")
        sequence.arriving = sequence.shares = False
        hold = self._handovers.keep(sequence, 0, self._handovers.lease_states(sequence))
        self._end(sequence)
        return hold

    def _refuse_copied(self, sequence: Sequence, call: str) -> None:
        for group, in_use in zip(self.layout.groups, self._pages_in_use()):
            count = sequence.state_columns if group.exact else sequence.block_count
            row = self._tables.arrays[group.index][sequence.slot, :count]
            if in_use and np.isin(row, in_use).any():
                raise StateError(
                    f"{call} of a sequence whose pages a step that is still to run copies",
                    hint="complete that step first",
                )

    def _require_landing(self, sequence: Sequence, call: str) -> None:
        self._require_own(sequence, call)
        if not sequence.arriving:
            raise StateError(f"{call} of a landing that is over", hint="each landing ends once")

    def _whole_blocks(self, match: Match, length: int) -> Match:
        """All whole blocks below ``length`` of which something is known, whether or not a sequence could resume there:
        what one group lacks will come."""
        block = self._block
        blocks = min(match.known, length) // block
        pieces = [extent.pages[:, : -(-matched // block)] for extent, matched in match.path]
        pages = np.concatenate(pieces, axis=1)[:, :blocks] if pieces else match.pages
        return attrs.evolve(match, length=blocks * block, pages=pages)

    def _landing_needs(self, sequence: Sequence, length: int) -> list[int]:
        """New pages per group."""
        needs = []
        for group in self.layout.groups:
            if group.exact:
                needs.append(1)
            elif group.sparse:
                needs.append(int(np.count_nonzero(self._lacking(sequence, group.index, length))))
            else:
                needs.append(-(-length // self._block) - sequence.block_count)
        return needs

    def _lacking(self, sequence: Sequence, group: int, length: int) -> npt.NDArray[np.bool_]:
        """Per block of a window, would a sequence that has computed ``length`` tokens keep it, and is it not here?"""
        blocks = -(-length // self._block)
        self._tables.ensure_blocks(blocks)
        live = np.ones(blocks, np.bool_)
        for low, high in self.layout.groups[group].retention.droppable(length, KEPT_ROLLBACK, self._block):
            live[low:high] = False
        live &= self._tables.arrays[group][sequence.slot, :blocks] == NO_PAGE
        return live

    def _take(self, sequence: Sequence, length: int, new: list[IntArray]) -> tuple[IntArray, ...]:
        """Put new pages, as many as :meth:`_landing_needs` says, into the sequence's tables. Returns them by place."""
        blocks, first = -(-length // self._block), sequence.block_count
        self._tables.ensure_blocks(blocks)
        listed: list[IntArray] = []
        for group, pages in zip(self.layout.groups, new):
            row = self._tables.arrays[group.index][sequence.slot]
            if group.exact:
                row[0] = pages[0]
                listed.append(pages)
                continue
            places = np.full(blocks, NO_PAGE, np.int32)
            if group.sparse:
                places[self._lacking(sequence, group.index, length)] = pages
            else:
                places[first:] = pages
            row[:blocks][places != NO_PAGE] = places[places != NO_PAGE]
            listed.append(places)
        sequence.block_count = blocks
        sequence.state_columns = 1 if self._has_states else 0
        return tuple(listed)
