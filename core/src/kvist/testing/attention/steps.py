"""Steps, inputs and results: who owns them, and for how long."""

from __future__ import annotations

import pytest

from kvist.testing.attention.author import Author
from kvist.testing.attention.case import Case, total_tokens


class StepTests(Author):
    """A step belongs to the planner, inputs to the model, a result to the caller until the next call."""

    @pytest.mark.clause("AB-12")
    def test_steps_and_tables_are_left_as_they_are(self, case: Case) -> None:
        """Every array of every step, the tables that later steps share included."""
        drive = self.driver(case, requests=3, watch_step=True)
        requests = [drive.open(length) for length in (total_tokens(case.spec), 5)]
        drive.step([(requests[0], 3), (requests[1], 1)])
        drive.play(requests)

    @pytest.mark.clause("AB-13")
    def test_inputs_are_read_during_the_call_only(self, case: Case) -> None:
        """They are as before after it, and hold something else when the next call comes."""
        drive = self.driver(case, watch_inputs=True)
        total = total_tokens(case.spec)
        drive.play([drive.open(length) for length in (total, total // 2)])

    @pytest.mark.clause("AB-13")
    def test_inputs_may_be_views(self, case: Case) -> None:
        """Slices of a fused projection: contiguous in the last axis, not in the others."""
        drive = self.driver(case, strided=True)
        total = total_tokens(case.spec)
        drive.play([drive.open(length) for length in (total, total // 2)])

    @pytest.mark.clause("AB-14")
    def test_a_result_stays_until_the_next_call(self, case: Case) -> None:
        """Shape and dtype; and a second cache of the same class, at work in between, changes nothing."""
        drive, other = (self.driver(case, seed=seed) for seed in (0, 1))
        total = total_tokens(case.spec)
        request, stranger = drive.open(total), other.open(total)

        def between() -> None:
            if stranger.left:
                other.step([(stranger, 1)])

        while request.left:
            drive.step([(request, min(request.left, 7))], between=between)

    @pytest.mark.clause("AB-15")
    def test_metadata_belongs_to_one_step(self, case: Case) -> None:
        """Steps of equal shape with other sequences and lengths; two steps planned before the first one runs."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=8)
        one, two = drive.open(total), drive.open(total)
        drive.step([(one, total // 2)])
        drive.step([(two, total // 2)])
        for _ in range(2):
            flights = [drive.commit([(one, 1), (two, 1)]), drive.commit([(two, 1), (one, 1)])]
            for flight in flights:
                drive.execute(flight)
            for flight in flights:
                drive.complete(flight)
        drive.step([(one, 2)])
        # Slot and lengths of the closed one, other pages.
        length = one.sequence.computed
        drive.manager.close(one.sequence)
        later = drive.open(total)
        drive.manager.shuffle_free_pages(drive.random)
        drive.step([(later, length)])
        drive.step([(two, 1)])
        drive.step([(later, 1)])

    @pytest.mark.clause("AB-15")
    def test_decode_batches_share_arrays_between_steps(self, case: Case) -> None:
        """Steps of one batch have the same slots, the same object even, while lengths and tables go on."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=6)
        requests = [drive.open(total) for _ in range(4)]
        drive.step([(request, 3 + 2 * index) for index, request in enumerate(requests)])
        batch = drive.manager.decode_batch()
        for request in requests[:3]:
            batch.join(request.sequence)
        for _ in range(case.spec.block_tokens + 1):
            flights = [drive.commit([], batch), drive.commit([], batch)]
            for flight in flights:
                drive.execute(flight)
            for flight in flights:
                drive.complete(flight)
            if requests[2].left < 5:
                break
        batch.leave(requests[1].sequence)
        batch.join(requests[3].sequence)
        drive.step([(requests[1], 2)], decode=batch)
        drive.step([], decode=batch)

    @pytest.mark.clause("AB-15")
    def test_long_and_short_steps_in_turns(self, case: Case) -> None:
        """Scratch that grew for a long step holds its leftovers in a short one; tables grow and are replaced."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=24)
        first = drive.open(total)
        drive.step([(first, total - 1)])
        for length in (2, total, 1, total - 1, 5):
            drive.step([(drive.open(total, reuse=False), length)])
        # More sequences than the tables have rows.
        many = [drive.open(4) for _ in range(17)]
        drive.step([(request, 3) for request in many])
        drive.step([(first, 1), (many[16], 1), (many[0], 1)])

    @pytest.mark.clause("AB-16")
    def test_a_step_without_rows(self, case: Case) -> None:
        """No tokens in, no tokens out, nothing touched; the steps around it are as usual."""
        drive = self.driver(case, watch_writes=True)
        request = drive.open(total_tokens(case.spec))
        drive.step([])
        drive.step([(request, 3)])
        drive.step([])
        drive.step([(request, request.left)])
