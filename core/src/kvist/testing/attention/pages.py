"""What a backend reads and writes: its own rows of the pages that the step names, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
import pytest

from kvist.step import IntArray, Step
from kvist.testing.attention.author import Author
from kvist.testing.attention.case import Case, total_tokens
from kvist.testing.attention.driver import JUNK, NAN
from kvist.testing.outcomes import not_applicable


class PageTests(Author):
    """Memory around the step is full of NaN, and of other sequences' rows."""

    @pytest.mark.clause("AB-08")
    def test_unused_entries_of_a_table_mean_nothing(self, case: Case) -> None:
        """-1 behind a row's blocks, anything in the rows of slots that are not in the step; compact tables."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=3)
        requests = [drive.open(total) for _ in range(3)]

        def strange(step: Step) -> Step:
            tables = []
            for table in step.tables:
                other = table.copy()
                absent = np.setdiff1d(np.arange(len(table)), step.slots)
                other[absent] = 1 << 30
                other.flags.writeable = False
                tables.append(other)
            return attrs.evolve(step, tables=tuple(tables))

        drive.step([(requests[1], total // 2), (requests[2], 3)], change=strange)
        drive.step([(requests[1], 1), (requests[0], 5)], change=Step.compact)
        drive.step([(requests[0], requests[0].left), (requests[1], requests[1].left)], change=strange)
        drive.step([(requests[2], 1)], change=Step.compact)

    @pytest.mark.clause("AB-09")
    @pytest.mark.parametrize("poison", [NAN, JUNK], ids=["nan", "junk"])
    def test_reads_nothing_that_was_not_written(self, case: Case, poison: int) -> None:
        """Pages of nobody, rows beyond the length, and pages left by windows hold NaN, or large numbers."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=4, poison=poison)
        first = [drive.open(total, reuse=False) for _ in range(2)]
        drive.play(first)
        for request in first:
            drive.manager.close(request.sequence)
        # They get the pages of the closed ones.
        drive.play([drive.open(length, reuse=False) for length in (total, total - 1)])

    @pytest.mark.clause("AB-10")
    def test_writes_its_layers_parts_of_the_pages_with_new_tokens(self, case: Case) -> None:
        """No other byte of the memory changes: not page 0, not other layers, not shared pages, not in ``begin``."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=4, watch_writes=True)
        parent = drive.open(total)
        drive.prefill(parent, total - 2)
        sharer = drive.open(total, like=parent, shared=total // 2)
        drive.step([(parent, 1), (sharer, 1)])
        most = drive.layout.most_drafts
        if sharer.left > 3 and most != 0:
            drive.step([(sharer, 1, 1, 0), (parent, 1)])
        drive.play([parent, sharer])

    @pytest.mark.clause("AB-11")
    def test_padding_rows_disturb_nobody(self, case: Case) -> None:
        """Rows of a fixed-size batch that are nobody's: one token, a table full of page 0. Page 0 holds NaN."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=3)
        requests = [drive.open(total) for _ in range(2)]

        def padded(step: Step) -> Step:
            count, at = 2, step.decode_rows
            tables = []
            for table in step.tables:
                wide = np.concatenate([table, np.zeros((count, table.shape[1]), np.int32)])
                wide.flags.writeable = False
                tables.append(wide)
            slots = np.arange(len(step.tables[0]), len(step.tables[0]) + count)

            def insert(array: IntArray, values: Iterable[int]) -> IntArray:
                return np.concatenate([array[:at], np.array([*values], np.int32), array[at:]])

            return attrs.evolve(
                step,
                slots=insert(step.slots, slots),
                query_lengths=insert(step.query_lengths, [1] * count),
                lengths=insert(step.lengths, [1, 3]),
                drafts=insert(step.drafts, [0] * count) if len(step.drafts) else step.drafts,
                decode_rows=at + count,
                tables=tuple(tables),
            )

        drive.step([(requests[0], total // 2), (requests[1], 1)], change=padded)
        drive.step([(requests[0], 1), (requests[1], 1)], change=padded)
        drive.step([(requests[0], 1), (requests[1], 5)], change=padded)
        drive.step([(requests[0], requests[0].left), (requests[1], 1)])

    @pytest.mark.clause("AB-18")
    def test_shared_prefixes_and_forks(self, case: Case) -> None:
        """Sequences go on differently from where they are equal, and never see each other's later tokens."""
        total = total_tokens(case.spec)
        block = case.spec.block_tokens
        drive = self.driver(case, requests=6)
        parent = drive.open(total, restore_at=(block, 2 * block))
        drive.prefill(parent, total - 3)
        sharers = [drive.open(total, like=parent, shared=shared) for shared in (2 * block, 2 * block + 3, block + 1)]
        forks = [drive.fork(parent) for _ in range(2)]
        drive.step([(forks[0], 1), (parent, 2), (sharers[0], 1), (sharers[1], 2)])
        drive.step([(forks[1], 1), (sharers[2], 4)])
        drive.play([*sharers, *forks, parent])

    @pytest.mark.clause("AB-19")
    def test_suspended_and_returning_sequences(self, case: Case) -> None:
        """A sequence gives its pages up and goes on later in others; the same prompt comes again."""
        total = total_tokens(case.spec)
        block = case.spec.block_tokens
        drive = self.driver(case, requests=6)
        first = drive.open(total, restore_at=(block, 2 * block))
        drive.prefill(first, 2 * block + 1)
        drive.manager.suspend(first.sequence)
        other = drive.open(total)
        drive.play([other])
        drive.manager.resume(first.sequence)
        drive.prefill(first, total - 1)
        # The next one to come gets the slot of the last one to go.
        drive.manager.close(first.sequence)
        drive.manager.close(other.sequence)
        again = drive.open(total, like=first, shared=total)
        drive.play([again])

    @pytest.mark.clause("AB-23")
    def test_states_start_from_zero_and_stay_in_their_columns(self, case: Case) -> None:
        """New sequences in pages that others used; with drafts, column 0 is read and columns 1.. are written."""
        if not any(stream.retention.exact for layer in case.spec.layers for stream in layer.streams):
            not_applicable("the spec keeps no states")
        drive = self.driver(case, requests=4, watch_writes=True)
        total = total_tokens(case.spec)
        for _ in range(2):
            requests = [drive.open(total, reuse=False) for _ in range(2)]
            drive.step([(requests[0], 5), (requests[1], 1)])
            drive.step([(requests[0], 1, 2, 1), (requests[1], 2)])
            drive.step([(requests[0], 1), (requests[1], 2, 2, 0)])
            drive.step([(requests[0], 2, 1, 1), (requests[1], 1, 1, 1)])
            drive.step([(request, 1) for request in requests])
            for request in requests:
                drive.manager.close(request.sequence)
