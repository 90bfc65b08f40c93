"""Right values, however the tokens of a sequence come in."""

from __future__ import annotations

import pytest
import torch

from kvist.testing.attention.author import Author
from kvist.testing.attention.case import Case, boundaries, total_tokens
from kvist.testing.attention.driver import Request
from kvist.testing.attention.watch import failure


class ValueTests(Author):
    """Outputs against the dense reference."""

    @pytest.mark.clause("AB-04")
    def test_a_prompt_in_one_step(self, case: Case) -> None:
        """One row, from position 0, longer than everything."""
        drive = self.driver(case)
        request = drive.open(total_tokens(case.spec))
        drive.step([(request, request.total)])

    @pytest.mark.clause("AB-05")
    def test_a_prompt_cut_at_every_boundary(self, case: Case) -> None:
        """One token before, at and after each block end, window end, ring end and row of several tokens; then one
        token, then the rest."""
        total = total_tokens(case.spec)
        cuts = {end + offset for end in boundaries(case.spec) for offset in (-1, 0, 1)}
        drive = self.driver(case, requests=len(cuts) + 1)
        requests: dict[int, Request] = {}
        for cut in sorted(cuts & set(range(1, total - 1))):
            like = next(iter(requests.values()), None)
            requests[cut] = drive.open(total, like=like, shared=total if like else 0, reuse=False)
        drive.step([(request, cut) for cut, request in requests.items()])
        drive.step([(request, 1) for request in requests.values()])
        drive.step([(request, request.left) for request in requests.values()])

    @pytest.mark.clause("AB-05")
    def test_token_by_token(self, case: Case) -> None:
        """Every step is a decode step."""
        drive = self.driver(case)
        request = drive.open(total_tokens(case.spec))
        while request.left:
            drive.step([(request, 1)])

    @pytest.mark.clause("AB-06")
    def test_ragged_batches(self, case: Case) -> None:
        """Decode rows and prefill chunks of all sizes in one step, in any company."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=5)
        requests = [drive.open(length) for length in (total, 1, total - 3, total // 2, 2)]
        drive.step([(requests[0], 3), (requests[2], 7)])
        drive.step([(requests[0], 1), (requests[1], 1), (requests[2], requests[2].left - 1), (requests[3], 5)])
        drive.play(requests)

    @pytest.mark.clause("AB-07")
    def test_pages_come_from_the_slots_row_of_the_groups_table(self, case: Case) -> None:
        """Rows in another order than slots, slots that are not in the step, pages in any order."""
        total = total_tokens(case.spec)
        drive = self.driver(case, requests=4)
        requests = [drive.open(total) for _ in range(4)]
        for chosen in ([3, 1], [2], [0, 3, 2], [1]):
            drive.manager.shuffle_free_pages(drive.random)
            drive.step([(requests[index], 1 + requests[index].left // 3) for index in chosen])
        drive.manager.close(requests[2].sequence)
        drive.step([(requests[index], requests[index].left) for index in (3, 1, 0)])

    @pytest.mark.clause("AB-17")
    def test_rejected_drafts_never_happened(self, case: Case) -> None:
        """Every number of drafts, every number of them accepted; then steps with and without drafts."""
        total = total_tokens(case.spec)
        pairs = [(drafts, accepted) for drafts in (1, 2, 3) for accepted in range(drafts + 1)]
        drive = self.driver(case, requests=len(pairs) + 1)
        most = drive.layout.most_drafts
        pairs = [(drafts, accepted) for drafts, accepted in pairs if most is None or drafts <= most]
        requests = [drive.open(total) for _ in pairs]
        drive.step([(request, 1 + 5 * index % (total - 12)) for index, request in enumerate(requests)])
        # The drafts of some rows with the next tokens of others; then the other way round.
        for turn in (0, 1, 0, 1):
            drive.step(
                [
                    (request, 1, *pair) if index % 2 == turn and request.left > pair[0] else (request, 1)
                    for index, (request, pair) in enumerate(zip(requests, pairs))
                    if request.left
                ]
            )
        # A chunk of a prompt and drafts after it, nothing accepted, and what is left.
        runs = [(request, 3, *pair) for request, pair in zip(requests, pairs) if request.left > 3 + pair[0]]
        if runs:
            drive.step([(request, tokens, drafts, 0) for request, tokens, drafts, _ in runs])
        drive.step([(request, request.left) for request in requests if request.left])

    @pytest.mark.clause("AB-20")
    def test_layers_do_not_meet(self, case: Case) -> None:
        """Every layer has rows and outputs of its own, also in later steps."""
        kinds = [[layer.streams for layer in each.spec.layers] for each in self.cases]
        if not any(streams.count(one) > 1 for streams in kinds for one in streams):
            raise failure(case, "no case has two layers with equal streams: nothing would tell them apart")
        drive = self.driver(case)
        request = drive.open(total_tokens(case.spec))
        drive.play([request])

    @pytest.mark.clause("AB-21")
    def test_the_same_again_gives_the_same_bits(self, case: Case) -> None:
        """Equal steps on equal memory: bit by bit, or nobody can reproduce an answer."""
        total, results = total_tokens(case.spec), []
        for _ in range(2):
            drive = self.driver(case, seed=3)
            request = drive.open(total)
            outputs = []
            for tokens in (total // 2, 1, 2):
                drive.step([(request, tokens)])
                outputs += list(drive.outputs.values())
            results.append(outputs)
        if not all(torch.equal(one, other) for one, other in zip(*results)):
            raise failure(case, "the same steps gave other bits the second time")
