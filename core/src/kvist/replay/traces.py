"""Request traces: lengths and which blocks of tokens are equal, but no text.

One JSON object per line. Common fields: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in
tokens. The prompt is named by blocks of equal content, in one of two forms:

* ``hash_ids``: one id per block; ``block_tokens`` tokens each, 512 when the field is missing;
* ``hash_runs``: ``[first id, count]`` pairs of consecutive ids; ``block_tokens`` tokens each.

The last partial block either has an id of its own, which is cut to ``input_length``, or has none; then its tokens
are the request's alone. Ids are expanded to token ids by a fixed mixing function: equal ids give equal tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvist.errors import KvistError
from kvist.step import IntArray

#: Tokens per block of a line with ``hash_ids`` that does not say.
DEFAULT_BLOCK_TOKENS = 512
#: Token ids are below this unless the reader is told otherwise.
DEFAULT_VOCAB_SIZE = 128_256

_Ids = npt.NDArray[np.uint64]
#: Keep the tokens that belong to one request alone away from those of block ids, and its output from its prompt.
_OWN_TAIL = 0x6B76697374000000
_OWN_OUTPUT = 0x6B76697374800000
_ID_LIMIT = 1 << 64
_LENGTH_LIMIT = 1 << 31
_FIELDS_HINT = "each line needs timestamp, input_length, output_length, and hash_ids or hash_runs"


class TraceError(KvistError):
    """A request trace that cannot be read, or that says something impossible."""


def splitmix64(counters: _Ids) -> _Ids:
    """A fixed 64-bit mixing of each counter: the output function of the SplitMix64 generator, vectorised."""
    mixed = counters + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@attrs.frozen(eq=False)
class TraceRequest:
    """One line of a trace.

    number: position in the trace, from 0.
    arrival_s: seconds since the trace's time origin.
    input_length: prompt tokens, at least 1.
    output_length: tokens to generate, at least 0.
    block_ids: uint64, the prompt's blocks of ``block_tokens`` tokens; the last partial one may be missing.
    vocab_size: token ids are below this.
    """

    number: int
    arrival_s: float
    input_length: int
    output_length: int
    block_ids: _Ids
    block_tokens: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def prompt(self) -> IntArray:
        """int32 ``[input_length]``: the prompt's token ids. Made anew at each call."""
        offsets = np.arange(self.block_tokens, dtype=np.uint64)
        # Ids are mixed first: neighbouring ids must not have overlapping counters.
        counters = (splitmix64(self.block_ids)[:, None] + offsets).ravel()[: self.input_length]
        if missing := self.input_length - len(counters):
            counters = np.concatenate([counters, self._own(_OWN_TAIL, missing)])
        return self._tokens(counters)

    def output(self) -> IntArray:
        """int32 ``[output_length]``: the generated token ids, which belong to this request alone."""
        return self._tokens(self._own(_OWN_OUTPUT, self.output_length))

    def _own(self, kind: int, count: int) -> _Ids:
        counters: _Ids = np.arange(count, dtype=np.uint64)
        counters += splitmix64(np.array([kind + self.number], np.uint64))
        return counters

    def _tokens(self, counters: _Ids) -> IntArray:
        return (splitmix64(counters) % np.uint64(self.vocab_size)).astype(np.int32)


def read_trace(
    path: str | Path, *, limit: int | None = None, vocab_size: int = DEFAULT_VOCAB_SIZE, prefix_ids: bool = True
) -> Iterator[TraceRequest]:
    """The requests of a trace file in their order, at most ``limit`` of them.

    prefix_ids: the trace's ids stand for a block *and all before it*, so an id has one parent; this is checked,
        because ids of the other kind, read by such rules, would promise more reuse than there is. Give ``False`` for
        ids that stand for the content of their block alone.

    Raises TraceError, naming file and line, as soon as a line is reached that cannot be right.
    """
    name = str(path)
    try:
        with open(path, encoding="utf-8") as lines:
            yield from _read(name, lines, limit, vocab_size, _Parents(name) if prefix_ids else None)
    except OSError as error:
        raise TraceError(
            f"cannot read trace {name}: {error.strerror or error}", hint="give the path of a JSON Lines file"
        ) from error
    except UnicodeDecodeError as error:
        raise TraceError(
            f"trace {name} is not UTF-8 text: {error.reason} at byte {error.start}",
            hint="give the path of a JSON Lines file; compressed traces must be unpacked first",
        ) from error


def _read(
    name: str, lines: Iterable[str], limit: int | None, vocab_size: int, parents: _Parents | None
) -> Iterator[TraceRequest]:
    number = 0
    for line_number, line in enumerate(lines, 1):
        if limit is not None and number >= limit:
            return
        if not line.strip():
            continue
        request = _Line(name, line_number, line).request(number, vocab_size)
        if parents is not None:
            parents.check(line_number, request.block_ids)
        yield request
        number += 1
    if not number and limit != 0:
        raise TraceError(f"trace {name} has no requests", hint="give a file with one JSON object per line")


class _Line:
    """One line while it is being taken apart."""

    def __init__(self, name: str, number: int, text: str) -> None:
        self.where = f"{name}, line {number}"
        try:
            content: Any = json.loads(text.rstrip())
        except ValueError as error:
            at = getattr(error, "colno", 1)
            reason = getattr(error, "msg", str(error))
            raise TraceError(
                f"{self.where}: not JSON: {reason} at column {at}", hint="a trace has one JSON object per line"
            ) from error
        if not isinstance(content, dict):
            raise self.error(f"a {type(content).__name__} where an object should be")
        self.content: dict[str, Any] = content

    def error(self, what: str, hint: str = "a trace has one JSON object per line") -> TraceError:
        return TraceError(f"{self.where}: {what}", hint=hint)

    def field(self, field: str) -> Any:
        if field not in self.content:
            raise self.error(f"field {field!r} is missing", _FIELDS_HINT)
        return self.content[field]

    def integer(self, field: str, least: int, default: int | None = None) -> int:
        value = default if default is not None and field not in self.content else self.field(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(f"{field} is {value!r}, not an integer", f"{field} counts tokens")
        if not least <= value < _LENGTH_LIMIT:
            raise self.error(f"{field}={value} is outside {least}..{_LENGTH_LIMIT - 1}", f"{field} counts tokens")
        return value

    def arrival_s(self) -> float:
        value = self.field("timestamp")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"timestamp is {value!r}, not a number", "timestamp is the arrival in milliseconds")
        return float(value) / 1000

    def request(self, number: int, vocab_size: int) -> TraceRequest:
        arrival_s = self.arrival_s()
        input_length = self.integer("input_length", 1)
        output_length = self.integer("output_length", 0)
        if "hash_ids" in self.content:
            block_tokens = self.integer("block_tokens", 1, DEFAULT_BLOCK_TOKENS)
            ids = self.ids()
        elif "hash_runs" in self.content:
            block_tokens = self.integer("block_tokens", 1)
            ids = self.runs()
        else:
            raise self.error("neither 'hash_ids' nor 'hash_runs' is there", _FIELDS_HINT)
        whole, given = input_length // block_tokens, len(ids)
        if given != whole and given != -(-input_length // block_tokens):
            raise self.error(
                f"{given} block ids do not fit input_length={input_length} and block_tokens={block_tokens}",
                f"{input_length} tokens have {whole} whole blocks; the last partial one may have an id too",
            )
        return TraceRequest(number, arrival_s, input_length, output_length, ids, block_tokens, vocab_size)

    def ids(self) -> _Ids:
        value = self.content["hash_ids"]
        if not isinstance(value, list) or not all(_is_id(each) for each in value):
            raise self.error("hash_ids is not a list of ids in 0..2**64 - 1", "each id names one block of tokens")
        return np.array(value, np.uint64)

    def runs(self) -> _Ids:
        value = self.content["hash_runs"]
        if not isinstance(value, list) or not all(_is_run(each) for each in value):
            raise self.error(
                "hash_runs is not a list of [first id, count] with ids in 0..2**64 - 1",
                "[[5, 3]] names the blocks 5, 6 and 7",
            )
        pieces = [np.arange(first, first + count, dtype=np.uint64) for first, count in value]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint64)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _ID_LIMIT


def _is_run(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(_is_id(each) for each in value):
        return False
    first, count = value
    return bool(1 <= count < _LENGTH_LIMIT and first + count <= _ID_LIMIT)


class _Parents:
    """Checks that a block id always follows the same id."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._parents: dict[int, int] = {}

    def check(self, line_number: int, ids: _Ids) -> None:
        parents, before = self._parents, -1
        for block_id in ids.tolist():
            known = parents.setdefault(block_id, before)
            if known != before:
                raise TraceError(
                    f"{self.name}, line {line_number}: block id {block_id} follows {_named(before)} here and "
                    f"{_named(known)} in an earlier place, so the ids do not stand for prefixes",
                    hint="read the trace as content ids (--content-ids), where an id stands for its own block alone",
                )
            before = block_id


def _named(block_id: int) -> str:
    return "nothing" if block_id < 0 else f"block id {block_id}"
