"""Records of steps and requests: every number once, against counts kept by hand."""

from __future__ import annotations

import json
import threading
from collections import Counter

import numpy as np
import pytest
from cache_requests import cached, compute, manager_of
from cache_traffic import MIXES, traffic_of

from kvist.errors import SpecError, StateError
from kvist.iterations.recorder import Iterations
from kvist.iterations.records import RecordError, StepRecord, decoded, read_run
from kvist.manager import PagedCacheManager
from kvist.restore import RestorePolicy
from kvist.spec import History, Scope, State
from kvist.step import NO_PAGE
from kvist.testing.values import make_layout, make_spec, tokens


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Written(list):
    """A file that keeps its lines."""

    def write(self, line: bytes) -> None:
        self.append(line)


def lines_of(written: Written, kind: str) -> list[dict]:
    """Lines of one kind, read by nothing of Kvist's."""
    return [line for line in map(json.loads, written) if line["kind"] == kind]


class Count:
    """Counts by hand what steps do: looks at the manager's calls and at tables, not at its numbers."""

    def __init__(self, manager: PagedCacheManager) -> None:
        self.manager = manager
        self.pages = [0 for _ in manager.layout.groups]
        self.tokens = self.rows = self.steps = 0
        self._commit = manager._commit

    def watch(self, monkeypatch: pytest.MonkeyPatch, iterations: Iterations) -> None:
        monkeypatch.setattr(self.manager, "_commit", self.commit)
        complete = self.manager.complete

        def counted(step, accepted=None):
            complete(step, accepted)
            self.steps += 1
            self.rows += len(step.slots)
            self.tokens += int(step.query_lengths.sum())
            iterations.step(step)

        monkeypatch.setattr(self.manager, "complete", counted)

    def commit(self, plan):
        before = [array.copy() for array in self.manager._tables.arrays]
        step = self._commit(plan)
        for group, (old, new) in enumerate(zip(before, self.manager._tables.arrays)):
            wide = np.full(new.shape, NO_PAGE, np.int32)
            wide[: old.shape[0], : old.shape[1]] = old
            self.pages[group] += int(np.count_nonzero((wide == NO_PAGE) & (new != NO_PAGE))) + len(step.saves[group])
        return step


@pytest.mark.parametrize("mix", ["history", "history+window", "history+state", "history+ring"])
@pytest.mark.parametrize("seed", range(2))
def test_sums_over_all_records_are_what_was_done(mix: str, seed: int, monkeypatch) -> None:
    rng = np.random.default_rng([11, seed, len(mix)])
    layout = make_layout(make_spec(3, *MIXES[mix], vocab_size=4), 24 * len(MIXES[mix]))
    manager = PagedCacheManager(layout, RestorePolicy(every_blocks=2) if seed else None)
    traffic = traffic_of(manager, rng)
    for _ in range(20):
        traffic.operate()
    warm, written = manager.stats(), Written()
    iterations = Iterations(manager, file=written, clock=Clock())
    count = Count(manager)
    count.watch(monkeypatch, iterations)
    for _ in range(500):
        traffic.operate()
    iterations.close()
    steps, total = lines_of(written, "step"), manager.stats().since(warm)
    assert [line["number"] for line in map(json.loads, written[1:])] == list(range(len(written) - 1))
    assert total.steps == count.steps > 30

    def summed(name: str) -> int:
        return sum(step.get(name, 0) for step in steps)

    for name in ("requests", "prompt_tokens", "reused_tokens", "partial_reuses", "computed_tokens", "steps"):
        assert summed(name) == getattr(total, name), name
    for name in ("suspends", "resumes", "resumed_tokens", "recomputed_tokens", "forks", "forked_tokens"):
        assert summed(name) == getattr(total, name), name
    assert (summed("rows"), summed("tokens"), summed("steps")) == (count.rows, count.tokens, count.steps)
    for group, stats in enumerate(total.groups):
        sums = Counter()
        for step in steps:
            sums.update(step["groups"][group])
        assert sums["new"] == count.pages[group]
        assert (sums["evicted"], sums["moved"], sums["lost_tokens"]) == (stats.evicted, stats.moved, stats.lost_tokens)
        last = steps[-1]["groups"][group]
        # What is there now, recounted.
        assert last.get("free", 0) == len(manager.free_pages(group))
    manager.check()


def test_a_record_says_what_the_step_did() -> None:
    manager = manager_of(10)
    cached(manager, range(1, 9))
    clock, written = Clock(), Written()
    iterations = Iterations(manager, source="by hand", clock=clock, file=written)
    clock.now += 2.5
    # Eight tokens of two blocks known; of the second prompt's 11 one and a half block are.
    first, second = manager.open(tokens(range(1, 13))), manager.open(tokens(range(1, 7), range(50, 55)))
    assert (first.reused, second.reused) == (8, 6)
    iterations.step(compute(manager, first), running=2, waiting=3)
    iterations.step(compute(manager, second))
    begin, one, two = map(json.loads, written)
    (tier,) = begin["tiers"]
    assert (begin["source"], begin["time_unit"], begin["block_tokens"]) == ("by hand", "s", 4)
    assert (tier["name"], tier["groups"][0]["capacity"], tier["groups"][0]["name"]) == (
        "device",
        10,
        "target/History()",
    )
    assert one == {
        "kind": "step",
        "number": 0,
        "time": 2.5,
        "rows": 1,
        "tokens": 4,
        "running": 2,
        "waiting": 3,
        "open_sequences": 2,
        "extents": 3,
        "steps": 1,
        "requests": 1,
        "prompt_tokens": 12,
        "reused_tokens": 8,
        "computed_tokens": 4,
        "groups": [{"free": 7, "held": 3, "new": 1}],
    }
    assert (two["prompt_tokens"], two["reused_tokens"], two["partial_reuses"], two["computed_tokens"]) == (11, 6, 1, 5)
    # A copy of the shared half block, and one more block.
    assert two["groups"] == [{"free": 5, "held": 5, "new": 2}]


def test_what_comes_after_the_last_step_is_recorded_once() -> None:
    manager = manager_of(10)
    written = Written()
    iterations = Iterations(manager, file=written)
    iterations.step(compute(manager, manager.open(tokens(range(5)))))
    iterations.step()
    assert len(written) == 2
    manager.close(next(iter(manager._sequences.values())))
    iterations.close()
    late, branches = map(json.loads, written[2:])
    assert "steps" not in late and "open_sequences" not in late
    assert late["groups"] == [{"free": 8, "cached": 2}]
    assert [branch["tokens"] for branch in branches["branches"]] == [5]


@pytest.mark.parametrize("retentions", [(History(),), (History(), State())])
def test_what_is_lost_while_suspended_is_recomputed(retentions) -> None:
    manager = manager_of(12, *retentions)
    sequence = manager.open(tokens(range(1, 14)))
    manager.suspend(sequence)
    manager.resume(sequence)
    # Before its first step that is nothing.
    compute(manager, sequence)
    assert (manager.stats().suspends, manager.stats().resumes) == (0, 0)
    manager.suspend(sequence)
    manager.suspend(sequence)
    manager.clear()
    sequence.extend([14])
    assert manager.resume(sequence) == 0
    manager.suspend(sequence)
    manager.resume(sequence)
    assert (manager.stats().suspends, manager.stats().recomputed_tokens) == (1, 0)
    compute(manager, sequence, 5)
    stats = manager.stats()
    assert (stats.suspends, stats.resumes, stats.resumed_tokens, stats.recomputed_tokens) == (1, 1, 0, 13)


def test_of_a_truncated_sequence_only_what_it_still_knows_is_recomputed() -> None:
    manager = manager_of(12)
    sequence = manager.open(tokens(range(1, 14)))
    compute(manager, sequence)
    manager.suspend(sequence)
    manager.clear()
    assert manager.truncate(sequence, 6) == 0
    compute(manager, sequence)
    assert (manager.stats().resumes, manager.stats().recomputed_tokens) == (1, 6)


def test_what_is_still_there_is_not_recomputed() -> None:
    manager = manager_of(6)
    sequence = manager.open(tokens(range(1, 14)))
    compute(manager, sequence)
    manager.suspend(sequence)
    cached(manager, range(50, 70))
    assert manager.resume(sequence) == 4
    compute(manager, sequence)
    stats = manager.stats()
    assert (stats.resumed_tokens, stats.recomputed_tokens) == (4, 9)


def test_of_what_was_resumed_and_then_truncated_only_the_rest_is_recomputed() -> None:
    manager = manager_of(12)
    sequence = manager.open(tokens(range(1, 14)))
    compute(manager, sequence)
    manager.suspend(sequence)
    manager.clear()
    assert manager.resume(sequence) == 0
    assert manager.truncate(sequence, 6) == 0
    compute(manager, sequence)
    assert (manager.stats().resumes, manager.stats().recomputed_tokens) == (1, 6)


def test_states_spoilt_by_a_failed_step_count_as_a_suspension() -> None:
    manager = manager_of(30, History(), State())
    sequence = manager.open(tokens(range(1, 10)))
    compute(manager, sequence)
    sequence.extend([10])
    from kvist.manager import Run

    manager.cancel(manager.plan([Run(sequence, 1)]).commit(), ran=True)
    assert sequence.suspended and manager.stats().suspends == 1
    had = manager.resume(sequence)
    compute(manager, sequence)
    assert (manager.stats().resumes, manager.stats().recomputed_tokens) == (1, 9 - had)


def test_pages_kept_for_another_process_are_copying() -> None:
    manager = manager_of(10)
    sequence = manager.open(tokens(range(9)))
    compute(manager, sequence)
    hold = manager.hand_over(sequence)
    stats = manager.stats()
    assert (stats.groups[0].copying, stats.groups[0].held, stats.handed_tokens) == (3, 3, 9)
    hold.release()
    assert manager.stats().groups[0].copying == 0


# What a reader gets.


def numbers_of(answer: bytes) -> tuple[int, list[int]]:
    begin, *records = map(json.loads, answer.splitlines())
    assert begin["kind"] == "begin"
    return begin.get("dropped", 0), [record["number"] for record in records]


def test_a_reader_gets_what_is_new_and_hears_what_is_gone() -> None:
    manager = manager_of(10)
    iterations = Iterations(manager, keep=3)
    assert numbers_of(iterations.since()) == (0, [])
    sequence = manager.open(tokens(range(8)))
    for _ in range(5):
        iterations.step(compute(manager, sequence, 1))
    assert iterations.dropped == 2
    assert numbers_of(iterations.since()) == (2, [2, 3, 4])
    assert numbers_of(iterations.since(0)) == (1, [2, 3, 4])
    assert numbers_of(iterations.since(1)) == (0, [2, 3, 4])
    assert numbers_of(iterations.since(3)) == (0, [4])
    assert numbers_of(iterations.since(4)) == numbers_of(iterations.since(99)) == (0, [])
    with pytest.raises(SpecError) as caught:
        Iterations(manager, keep=0)
    assert str(caught.value) == "keep=0 must be at least 1 record"


def test_another_thread_reads_whole_records_while_they_are_made() -> None:
    manager = manager_of(2)
    iterations = Iterations(manager, keep=20)
    timer_ended, gaps = threading.Event(), []

    def read() -> None:
        number = -1
        while not timer_ended.is_set() or number < iterations.number - 1:
            dropped, numbers = numbers_of(iterations.since(number))
            if numbers and numbers != list(range(number + 1 + dropped, numbers[-1] + 1)):
                gaps.append((number, dropped, numbers))
            number = numbers[-1] if numbers else number

    reader = threading.Thread(target=read)
    reader.start()
    for name in range(3000):
        iterations.request(str(name)).finish("stop", prompt_tokens=1, reused_tokens=0, generated_tokens=1)
    timer_ended.set()
    reader.join(30)
    assert not reader.is_alive() and gaps == []


def test_a_file_that_cannot_be_written_harms_nobody() -> None:
    class Full:
        left = 2

        def write(self, line: bytes) -> None:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")

    manager = manager_of(10)
    iterations = Iterations(manager, file=Full())
    sequence = manager.open(tokens(range(8)))
    iterations.step(compute(manager, sequence, 1))
    with pytest.warns(UserWarning, match="iteration records") as caught:
        iterations.step(compute(manager, sequence, 1))
    assert [str(warning.message) for warning in caught] == [
        "iteration records are not written to their file any more: [Errno 28] No space left on device"
    ]
    iterations.step(compute(manager, sequence, 1))
    assert numbers_of(iterations.since()) == (0, [0, 1, 2])


# Requests.


def test_the_time_of_a_request_by_phase() -> None:
    clock, written = Clock(), Written()
    iterations = Iterations(manager_of(2), clock=clock, file=written)
    timer = iterations.request("7")
    for phase, seconds in (
        ("queue", 1),
        ("transfer", 2),
        ("prefill", 4),
        ("prefill", 8),
        ("decode", 16),
        ("queue", 32),
        ("queue", 64),
        ("prefill", 128),
        ("decode", 256),
    ):
        timer.enter(phase)
        clock.now += seconds
    timer.finish("length", prompt_tokens=30, reused_tokens=20, generated_tokens=9)
    (record,) = lines_of(written, "request")
    assert record == {
        "kind": "request",
        "number": 0,
        "time": 511.0,
        "request": "7",
        "outcome": "length",
        "queue": 97.0,
        "transfer": 2.0,
        "prefill": 140.0,
        "decode": 272.0,
        "prompt_tokens": 30,
        "reused_tokens": 20,
        "generated_tokens": 9,
        "pauses": 1,
    }
    with pytest.raises(StateError) as caught:
        timer.finish("length", prompt_tokens=1, reused_tokens=0, generated_tokens=0)
    assert str(caught.value) == "request '7' has ended\nhint: a request ends once"


# Reading.


def test_the_last_run_of_a_file(tmp_path) -> None:
    path = tmp_path / "records.jsonl"
    with path.open("wb") as file:
        for count in (3, 2):
            manager = manager_of(10)
            iterations = Iterations(manager, source=f"run of {count}", file=file)
            sequence = manager.open(tokens(range(count)))
            for _ in range(count):
                iterations.step(compute(manager, sequence, 1))
    begin, records = read_run(path)
    assert begin.source == "run of 2"
    assert [(type(record), record.number) for record in records] == [(StepRecord, 0), (StepRecord, 1)]
    assert sum(record.missed_tokens for record in records) == 2


def test_files_that_are_no_records(tmp_path) -> None:
    path = tmp_path / "wrong.jsonl"
    with pytest.raises(RecordError) as caught:
        read_run(path)
    assert str(caught.value) == (
        f"cannot read records {path}: No such file or directory\n"
        "hint: give a file that `kvist replay --record` or a server has written"
    )
    path.write_text("\n")
    with pytest.raises(RecordError) as caught:
        read_run(path)
    assert str(caught.value) == (
        f"{path} has no line with kind 'begin'\nhint: give the whole file; its first line says what the rest means"
    )
    for line in ('{"kind": "step"', '{"kind": "other"}', '{"kind": "step", "number": "one"}', "\udcff"):
        path.write_bytes(b"\n" + line.encode(errors="surrogateescape") + b"\n")
        with pytest.raises(RecordError) as caught:
            list(decoded(path.read_bytes().splitlines(), str(path)))
        assert str(caught.value).startswith(f"{path}, line 2: not a record: ")
        assert str(caught.value).endswith(
            "hint: give what `kvist replay --record` or a server's /v1/iteration_stats has written"
        )


# Branches.


def test_the_largest_branches() -> None:
    manager = manager_of(60)
    assert manager.branches() == []
    cached(manager, range(1, 41))
    cached(manager, range(1, 41), range(100, 108))
    for start in (200, 300):
        cached(manager, range(1, 9), range(start, start + 8))
    cached(manager, range(1, 9), scope=Scope(salt="secret"))
    holder = manager.open(tokens(range(1, 9), range(200, 205)))
    compute(manager, holder)
    main, first, *others = manager.branches()
    # One way on after 8 tokens has 40 of 56 tokens there, less than nine tenths: the line ends.
    assert (main.parent, main.start, main.own_tokens, main.tokens, main.children) == (-1, 0, 8, 64, 3)
    assert (first.parent, first.start, first.own_tokens, first.tokens, first.children) == (0, 8, 40, 40, 0)
    (salted,) = [branch for branch in others if branch.parent < 0]
    assert [(branch.start, branch.tokens) for branch in others if branch.parent == 0] == [(8, 8), (8, 8)]
    assert salted.scope != main.scope and "secret" not in salted.scope and salted.name == main.name
    assert main.held and not first.held and not salted.held
    # Four prompts went on from what was known: 40, twice 8, and 12 tokens of the one that is held.
    assert (main.hits, main.hit_tokens) == (4, 40 + 8 + 8 + 12)
    assert (first.hits, first.hit_tokens) == (1, 40)
    assert (salted.hits, salted.hit_tokens) == (0, 0)
    assert len(manager.branches(2)) == 2


def test_hits_of_what_was_evicted_stay_with_what_is_above() -> None:
    manager = manager_of(8)
    cached(manager, range(1, 9), range(100, 108))
    cached(manager, range(1, 9), range(200, 208))
    cached(manager, range(1, 9), range(100, 109))
    assert [branch.hits for branch in manager.branches()] == [2, 1, 0]
    holder = manager.open(tokens(range(1, 10)))
    assert holder.reused == 8
    cached(manager, range(50, 74))
    # Of the first conversation only what the holder keeps is left.
    (known,) = [branch for branch in manager.branches() if branch.held]
    assert (known.tokens, known.children, known.hits, known.hit_tokens) == (8, 0, 2, 8 + 16)


def test_a_line_goes_on_past_small_forks() -> None:
    manager = manager_of(100)
    cached(manager, range(1, 201))
    cached(manager, range(1, 51), range(300, 304))
    line, leaf = manager.branches()
    # The block that both begin is copied, so 6 tokens leave the line at 48.
    assert (line.own_tokens, line.tokens, line.children) == (200, 206, 1)
    assert (leaf.parent, leaf.start, leaf.own_tokens) == (0, 48, 6)
