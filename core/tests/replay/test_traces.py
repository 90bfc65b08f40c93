"""Both trace formats, and every way in which a line can be wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from toy_traces import line

from kvist.replay.traces import TraceError, read_trace, splitmix64

FIELDS = "each line needs timestamp, input_length, output_length, and hash_ids or hash_runs"


def read(path, **options):
    return list(read_trace(path, **options))


def test_equal_ids_give_equal_tokens_and_others_do_not(write_trace):
    first, second = read(write_trace([line(1500, 3, [7, 8, 9], timestamp=1500), line(1100, 4, [7, 8, 10])]))
    assert (first.arrival_s, first.number, second.number) == (1.5, 0, 1)
    a, b = first.prompt(), second.prompt()
    assert a.dtype == np.int32
    assert (len(a), len(b), len(first.output())) == (1500, 1100, 3)
    assert np.array_equal(a[:1024], b[:1024])
    assert np.count_nonzero(a[1024:1100] == b[1024:]) <= 1
    assert len(np.unique(a)) > 1400, "tokens of a block are not all alike"
    assert np.array_equal(a, first.prompt())


def test_runs_mean_the_same_as_the_ids_one_by_one(write_trace):
    runs = {"timestamp": 0, "input_length": 40, "output_length": 1, "block_tokens": 8, "hash_runs": [[5, 3], [20, 2]]}
    ids = line(40, 1, [5, 6, 7, 20, 21], block_tokens=8)
    first, second = read(write_trace([runs, ids]))
    assert np.array_equal(first.prompt(), second.prompt())


def test_a_last_partial_block_without_an_id_has_tokens_of_its_own(write_trace):
    two = [line(20, 1, [1, 2], block_tokens=8), line(20, 1, [1, 2], block_tokens=8)]
    first, second = (request.prompt() for request in read(write_trace(two)))
    assert len(first) == len(second) == 20
    assert np.array_equal(first[:16], second[:16])
    assert not np.array_equal(first[16:], second[16:])


def test_outputs_and_vocabulary(write_trace):
    first, second = read(write_trace([line(9, 50, [1], block_tokens=9)] * 2), vocab_size=30)
    assert not np.array_equal(first.output(), second.output())
    assert max(first.output().max(), first.prompt().max()) < 30
    assert min(first.output().min(), first.prompt().min()) >= 0


def test_the_mixing_function_is_splitmix64():
    # The first outputs of the generator with seed 0: the state grows by a constant, and is mixed.
    seeds = (np.arange(3, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(seeds).tolist() == expected


def test_limit_and_blank_lines(write_trace):
    path = write_trace([line(1, 1, [0]), "", line(2, 1, [0]), "not JSON, but after the limit"])
    assert [request.input_length for request in read(path, limit=2)] == [1, 2]
    assert read(path, limit=0) == []


def test_ids_of_64_bits(write_trace):
    first, second = read(write_trace([line(8, 1, [2**64 - 1], block_tokens=8), line(8, 1, [2**63], block_tokens=8)]))
    assert not np.array_equal(first.prompt(), second.prompt())


WRONG = {
    '{"timestamp": 0,': (
        "not JSON: Expecting property name enclosed in double quotes at column 17",
        "a trace has one JSON object per line",
    ),
    "[1, 2]": ("a list where an object should be", "a trace has one JSON object per line"),
    json.dumps({"timestamp": 0, "output_length": 1, "hash_ids": []}): ("field 'input_length' is missing", FIELDS),
    json.dumps({"input_length": 1, "output_length": 1, "hash_ids": [1]}): ("field 'timestamp' is missing", FIELDS),
    json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1}): (
        "neither 'hash_ids' nor 'hash_runs' is there",
        FIELDS,
    ),
    json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_runs": [[0, 1]]}): (
        "field 'block_tokens' is missing",
        FIELDS,
    ),
    json.dumps(line(1, 1, [1], timestamp="now")): (
        "timestamp is 'now', not a number",
        "timestamp is the arrival in milliseconds",
    ),
    json.dumps(line(0, 1, [])): ("input_length=0 is outside 1..2147483647", "input_length counts tokens"),
    json.dumps(line(1, -1, [1])): ("output_length=-1 is outside 0..2147483647", "output_length counts tokens"),
    json.dumps(line(1, 1.5, [1])): ("output_length is 1.5, not an integer", "output_length counts tokens"),
    json.dumps(line(1, 1, [-1])): (
        "hash_ids is not a list of ids in 0..2**64 - 1",
        "each id names one block of tokens",
    ),
    json.dumps({"timestamp": 0, "input_length": 8, "output_length": 1, "block_tokens": 8, "hash_runs": [[1]]}): (
        "hash_runs is not a list of [first id, count] with ids in 0..2**64 - 1",
        "[[5, 3]] names the blocks 5, 6 and 7",
    ),
    json.dumps(line(1025, 1, [1])): (
        "1 block ids do not fit input_length=1025 and block_tokens=512",
        "1025 tokens have 2 whole blocks; the last partial one may have an id too",
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_line_is_named_with_the_reason(write_trace, text):
    path = write_trace([line(1, 1, [1]), text])
    what, hint = WRONG[text]
    with pytest.raises(TraceError) as raised:
        read(path)
    assert str(raised.value) == f"{path}, line 2: {what}\nhint: {hint}"


def test_ids_that_are_no_prefix_ids(write_trace):
    lines = [line(16, 1, [1, 2], block_tokens=8), line(16, 1, [3, 2], block_tokens=8)]
    path = write_trace(lines)
    with pytest.raises(TraceError) as raised:
        read(path)
    assert str(raised.value) == (
        f"{path}, line 2: block id 2 follows block id 3 here and block id 1 in an earlier place, so the ids do not "
        "stand for prefixes\n"
        "hint: read the trace as content ids (--content-ids), where an id stands for its own block alone"
    )
    with pytest.raises(TraceError, match="block id 1 follows block id 2 here and nothing in an earlier place"):
        read(write_trace([line(24, 1, [1, 2, 1], block_tokens=8)]))
    assert len(read(write_trace(lines), prefix_ids=False)) == 2


def test_files_that_are_no_traces(write_trace, tmp_path):
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(TraceError) as raised:
        read(missing)
    assert str(raised.value) == (
        f"cannot read trace {missing}: No such file or directory\nhint: give the path of a JSON Lines file"
    )
    empty = write_trace([""])
    with pytest.raises(TraceError) as raised:
        read(empty)
    assert str(raised.value) == f"trace {empty} has no requests\nhint: give a file with one JSON object per line"
    packed = tmp_path / "trace.gz"
    packed.write_bytes(b"\x1f\x8b\x08\xff\xff")
    with pytest.raises(TraceError) as raised:
        read(packed)
    assert str(raised.value) == (
        f"trace {packed} is not UTF-8 text: invalid start byte at byte 1\n"
        "hint: give the path of a JSON Lines file; compressed traces must be unpacked first"
    )
