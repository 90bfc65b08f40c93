"""The cache machine's operations on steps: planned, committed, executed some time later, completed or cancelled."""

from __future__ import annotations

from kvist.errors import CapacityError, RequestError, StateError
from kvist.manager import Plan, Run
from kvist.testing.bookkeeping import MOST_FLIGHTS, MOST_TOKENS, CacheBase, refused
from kvist.testing.memory import Flight
from kvist.testing.mixes import Draw


class Stepping(CacheBase):
    """Up to three steps in flight, two decode batches, runs of any length with and without drafts."""

    def runs(self, draw: Draw) -> list[Run]:
        runs = []
        for live in self.lives:
            sequence = live.sequence
            if (
                live.suspended
                or live.closing
                or live.lost
                or sequence.batch is not None
                or sequence.undecided
                or sequence.loading
                or not draw(4)
            ):
                continue
            if live.pending and draw(2):
                # What it took from the cache, and what it is to copy, waits with it: others evict and move meanwhile.
                continue
            # The engine may not know the last token's id yet: it was sampled on the device.
            left = max(sequence.known - sequence.scheduled, 1)
            if sequence.scheduled >= min(self.setup.max_tokens or MOST_TOKENS, MOST_TOKENS) - 4:
                continue
            new = 1 + draw(left)
            if draw(4):
                new = max(1, sequence.next_end(sequence.scheduled + new) - sequence.scheduled)
            most = self.layout.most_drafts
            drafts = draw(4 if most is None else min(4, most + 1)) if draw(3) == 0 else 0
            runs.append(Run(sequence, new, drafts))
        return runs

    def _kept(self, run: Run, draw: Draw) -> int:
        """How many tokens of a run will stay: with drafts any number of them, as far as rings and states allow."""
        if not run.drafts:
            return run.new_tokens
        most = self.layout.most_drafts
        least = 0 if most is None else max(0, run.query_tokens - most)
        return least + draw(run.query_tokens + 1 - least)

    def _plan(self, draw: Draw) -> Plan | None:
        """A plan that may be committed, compared with what the models say it needs; ``None`` for an empty one."""
        runs = self.runs(draw)
        batch = self.batches[draw(2)]
        decode = batch if len(batch) and draw(5) else None
        limit = self.setup.max_tokens or MOST_TOKENS
        if decode is not None and any(s.scheduled >= limit for s in decode.sequences):
            if self.setup.max_tokens is not None:
                refused(RequestError, lambda: self.manager.plan(runs, decode))
            decode = None
        if not runs and decode is None:
            return None
        before = self.manager.stats()
        plan = self.manager.plan(runs, decode)
        assert self.manager.stats() == before, "plan() changed something"
        self._compare_fit(plan, runs, decode, before)
        return plan

    def step(self, draw: Draw) -> None:
        if len(self.flights) == MOST_FLIGHTS:
            return self.complete(draw)
        plan = self._plan(draw)
        if plan is None:
            return None
        before = self.manager.stats()
        if not plan.fits:
            refused(CapacityError, plan.commit, "the plan does not fit")
            assert self.manager.stats() == before, "a refused plan changed something"
            return None
        rows = [self.live_of(sequence) for sequence in plan.sequences]
        starts = [live.sequence.scheduled for live in rows]
        singles = {id(run.sequence): run for run in plan.runs}
        for live, start in zip(rows, starts):
            self.need(live, start + 1 + (run.query_tokens if (run := singles.get(id(live.sequence))) else 0))
        needed = plan.needed
        step = plan.commit()
        self._compare_evictions(before, needed)
        kept = [1] * (len(rows) - len(plan.runs))
        kept += [self._kept(run, draw) for run in plan.runs]
        counts = [1] * (len(rows) - len(plan.runs)) + [run.query_tokens for run in plan.runs]
        assert step.query_lengths.tolist() == counts
        assert step.lengths.tolist() == [start + count for start, count in zip(starts, counts)]
        assert step.decode_rows == counts.count(1) and counts[: step.decode_rows] == [1] * step.decode_rows
        assert step.slots.tolist() == [live.sequence.slot for live in rows]
        drafts = [0] * (len(rows) - len(plan.runs)) + [run.drafts for run in plan.runs]
        assert (step.drafts.tolist() or [0] * len(rows)) == drafts
        for run in plan.runs:
            live = self.live_of(run.sequence)
            live.pending = False
            live.columns = max(live.columns, self.columns_of(run)) if self.states else 0
        snapshots = [(self.live_of(sequence), position) for sequence, position in plan.snapshots]
        self.flights.append(Flight(step, plan, rows, kept, self.memory.free(), snapshots))
        self.memory.remember(self.flights[-1])
        if draw(2):
            self._execute_through(self.flights[-1])
        return None

    def _execute_through(self, flight: Flight) -> None:
        for each in self.flights[: self.flights.index(flight) + 1]:
            if not each.executed:
                self.memory.execute(each)

    def _independent(self, flight: Flight, others: list[Flight]) -> bool:
        """Does a step share no sequence and no batch with others?"""
        decode = flight.plan.decode
        rows = {id(live) for live in flight.rows}
        return all(
            rows.isdisjoint(map(id, each.rows)) and (decode is None or each.plan.decode is not decode)
            for each in others
        )

    def complete(self, draw: Draw) -> None:
        ready = [f for n, f in enumerate(self.flights) if self._independent(f, self.flights[:n])]
        if not ready:
            return
        flight = ready[0 if draw(3) else draw(len(ready))]
        self._execute_through(flight)
        self.memory.compare_tables(flight)
        self.flights.remove(flight)
        plan = flight.plan
        singles = flight.kept[len(flight.rows) - len(plan.runs) :]
        plain = all(not run.drafts for run in plan.runs)
        self.manager.complete(flight.step, None if plain and draw(2) else singles)
        self.steps += 1
        self.newest_run = max(self.newest_run, flight.step.id)
        for row, (live, kept) in enumerate(zip(flight.rows, flight.kept)):
            before = live.committed
            live.computed += kept
            self._began(live)
            self.computed_tokens += kept
            if row >= len(flight.rows) - len(plan.runs):
                self._published(live, before, flight)
            elif self.sparse:
                live.delayed = True
                self.model.publish(live, ended=False, surely=False)
        if self.sparse and plan.decode is not None:
            # Whoever joined the batch since may have tokens that became known since, and is published on the way.
            for live in self.lives:
                if live.sequence.batch is plan.decode and live not in flight.rows:
                    live.delayed = True
                    self.model.publish(live, ended=False, surely=False)
        for live in flight.rows:
            self._landed(live)
        self._compare_lengths()
        self.memory.compare_dropped(flight)
        for live in flight.rows:
            if live in self.lives and live.computed >= live.prompt_length and draw(4):
                self._extend(live, live.computed + 1)

    def cancel(self, draw: Draw) -> None:
        ready = [f for n, f in enumerate(self.flights) if self._independent(f, self.flights[n + 1 :])]
        if not ready:
            return
        flight = ready[-1 if draw(3) else draw(len(ready))]
        ran = flight.executed or bool(draw(2))
        if ran:
            self._begin(flight, draw)
        elif flight.step.begins and (flight is not self.flights[-1] or self.newest_run > flight.step.id):
            # Whoever comes later relies on its copies.
            refused(StateError, lambda: self.manager.cancel(flight.step, ran=False))
            return
        self.flights.remove(flight)
        self.manager.cancel(flight.step, ran=ran)
        for live in flight.rows:
            live.lost = live.lost or (ran and self.overwrites)
            self._landed(live)
        self._compare_lengths()

    def _begin(self, flight: Flight, draw: Draw) -> None:
        """It was under way when it failed: what comes before its rows is done, perhaps all of it."""
        self.newest_run = max(self.newest_run, flight.step.id)
        at = self.flights.index(flight)
        if flight.executed:
            return
        if at:
            self._execute_through(self.flights[at - 1])
        if draw(2):
            self.memory.begin(flight)
        else:
            self.memory.execute(flight)

    def join(self, draw: Draw) -> None:
        live = self.pick(draw, [live for live in self.idle() if not live.closing])
        if live is None:
            return
        try:
            self.batches[draw(2)].join(live.sequence)
        except StateError:
            sequence = live.sequence
            ready = live.stepped and (sequence.computed % self.block == 0 or sequence.reserved > sequence.computed)
            ready = ready and not sequence.loading
            assert not ready, "join() refused a sequence that has its page"

    def leave(self, draw: Draw) -> None:
        live = self.pick(draw, [live for live in self.lives if any(live.sequence in b.sequences for b in self.batches)])
        if live is not None and live.sequence.batch is not None:
            live.sequence.batch.leave(live.sequence)

    def plan_only(self, draw: Draw) -> None:
        """A scheduler that changes its mind: planning is no use and no harm."""
        for _ in range(1 + draw(2)):
            self._plan(draw)
