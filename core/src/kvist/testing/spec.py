"""Tests of a spec factory: what it makes of model configs.

A plugin's own tests subclass them and count by hand::

    class TestSpec(CacheSpecTests):
        factory = "kvist_acme.spec:cache_spec"

        def configs(self):
            return [{"model_type": "acme", "hidden_size": 64}]

        def bytes_per_token(self, config):
            return 0

        def state_bytes(self, config):
            return 2 * (64 * 4 + 8 * 16 * 4)

        def variants(self, config):
            return [{**config, "num_hidden_layers": 3}]

Configs that cannot work belong to :class:`kvist.testing.packaging.PluginTests`. The clauses are in
``docs/reference/contract/managers.md``.
"""

from __future__ import annotations

import base64
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from kvist.errors import SpecError
from kvist.registry import resolve
from kvist.spec import CacheSpec, Retention, Spans, Stream
from kvist.testing.outcomes import not_run_here
from kvist.testing.reads import reads

Config = Mapping[str, Any]

#: Block sizes that a factory is asked for.
_BLOCKS = (1, 2, 3, 8, 16, 24, 64, 128)
#: The same specs in a process of its own, whose hashes of strings are others.
_ELSEWHERE = """
import base64, pickle, sys
from kvist.registry import resolve
factory, configs, options = pickle.loads(base64.b64decode(sys.stdin.read()))
specs = [resolve(factory)(config, **options) for config in configs]
sys.stdout.write("\\n" + base64.b64encode(pickle.dumps(specs)).decode())
"""


class CacheSpecTests:
    """What every spec factory fulfils. An author fills in what is above the first test."""

    #: ``"package.module:Name"`` of the factory, as in the plugin's record.
    factory: ClassVar[str]
    #: What the factory is called with beside a config.
    block_tokens: ClassVar[int] = 16
    dtype: ClassVar[str] = "float32"

    def configs(self) -> Sequence[Config]:
        """Model configs that the factory serves: small ones, among them every kind of layer."""
        raise NotImplementedError

    def bytes_per_token(self, config: Config) -> int | Fraction:
        """Bytes that one token adds while nothing is dropped, over all layers, with rows in :attr:`dtype`. Counted by
        hand from the model, a row that stands for ``n`` tokens as the ``n``-th part."""
        raise NotImplementedError

    def state_bytes(self, config: Config) -> int:
        """Bytes that one sequence keeps whatever its length, counted by hand."""
        return 0

    def variants(self, config: Config) -> Sequence[Config] | None:
        """Configs of models whose rows are others than those of ``config``. ``None``: not told, and not run."""
        return None

    @pytest.mark.clause("CM-01")
    def test_a_config_gives_the_same_spec_again(self) -> None:
        for config in self.configs():
            first = self._make(config)
            assert isinstance(first, CacheSpec), f"{config!r} gives {first!r}, which is no CacheSpec"
            assert self._make(config) == first, f"{config!r} gives another spec the second time"
            assert self._make(copy.deepcopy(dict(config))) == first, f"an equal copy of {config!r} gives another spec"

    @pytest.mark.clause("CM-01")
    def test_a_config_stays_as_it_is(self) -> None:
        for config in self.configs():
            mine = copy.deepcopy(dict(config))
            self._make(mine)
            assert mine == dict(config), f"the factory has changed its config {config!r} to {mine!r}"
            try:
                self._make(MappingProxyType(mine))
            except (TypeError, AttributeError) as error:
                raise AssertionError(f"the factory cannot do with a config that is read-only: {error}") from error

    @pytest.mark.clause("CM-02")
    def test_a_spec_has_the_block_size_that_was_asked_for(self) -> None:
        for config in self.configs():
            served = 0
            for block_tokens in _BLOCKS:
                try:
                    spec = self._make(config, block_tokens=block_tokens)
                except SpecError:
                    continue
                served += 1
                assert spec.block_tokens == block_tokens, (
                    f"{config!r} with block_tokens={block_tokens} gives blocks of {spec.block_tokens}; make them as "
                    "asked, or raise SpecError"
                )
            assert served, f"{config!r} can be had with none of the block sizes {_BLOCKS}"

    @pytest.mark.clause("CM-03")
    def test_bytes_are_those_counted_by_hand(self) -> None:
        for config in self.configs():
            streams = list(_streams(self._make(config)))
            rows = sum(Fraction(s.row.row_bytes, s.tokens_per_row) for s in streams if not s.retention.exact)
            states = sum(s.row.row_bytes for s in streams if s.retention.exact)
            wanted = (self.bytes_per_token(config), self.state_bytes(config))
            assert (rows, states) == wanted, (
                f"{config!r}: the spec keeps {rows} bytes per token and {states} per sequence, the model "
                f"{wanted[0]} and {wanted[1]}"
            )

    @pytest.mark.clause("CM-04")
    def test_retentions_against_what_queries_read(self) -> None:
        kept = {s.retention for config in self.configs() for s in _streams(self._make(config))}
        for retention in kept:
            for block in {3, 4, self.block_tokens}:
                for length in _lengths(retention, block):
                    _compare(retention, length, block)

    @pytest.mark.clause("CM-04")
    def test_retentions_are_values(self) -> None:
        for config in self.configs():
            for stream in _streams(self._make(config)):
                retention = stream.retention
                assert isinstance(retention, Retention), f"stream {stream.name!r}: {retention!r} is no Retention"
                again = pickle.loads(pickle.dumps(retention))
                assert again == retention and hash(again) == hash(retention), (
                    f"stream {stream.name!r}: a copy of {retention!r} is not equal to it, so streams that could share "
                    "a group do not"
                )

    @pytest.mark.clause("CM-05")
    def test_other_rows_have_another_fingerprint(self) -> None:
        for config in self.configs():
            own = self._make(config).fingerprint
            assert own, f"{config!r} gives a spec without a fingerprint"
            other = next(dtype for dtype in ("bfloat16", "float32") if dtype != self.dtype)
            assert self._make(config, dtype=other).fingerprint != own, (
                f"{config!r}: rows in {self.dtype} and in {other} have one fingerprint"
            )
            for variant in self.variants(config) or ():
                assert self._make(variant).fingerprint != own, f"{config!r} and {variant!r} have one fingerprint"

    @pytest.mark.clause("CM-05")
    def test_variants_are_told(self) -> None:
        if any(self.variants(config) is None for config in self.configs()):
            not_run_here("the author's class has no variants()")

    @pytest.mark.clause("CM-06")
    def test_another_process_has_the_same_spec(self) -> None:
        configs = [dict(config) for config in self.configs()]
        specs = [self._make(config) for config in configs]
        options = {"block_tokens": self.block_tokens, "dtype": self.dtype}
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # Whoever hashes strings with hash() shall be noticed whatever this process was started with.
        for seed in ("1", "2"):
            ran = subprocess.run(
                [sys.executable, "-c", _ELSEWHERE],
                input=base64.b64encode(pickle.dumps((self.factory, configs, options))).decode(),
                env=environ | {"PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 0, f"another process cannot make the specs:\n{ran.stderr}"
            found = pickle.loads(base64.b64decode(ran.stdout.rpartition("\n")[2]))
            for config, here, there in zip(configs, specs, found, strict=True):
                assert there == here, f"{config!r} gives another spec in another process: {there!r}, here {here!r}"

    def _make(self, config: Config, **options: Any) -> CacheSpec:
        asked = {"block_tokens": self.block_tokens, "dtype": self.dtype, **options}
        spec: CacheSpec = resolve(self.factory)(config, **asked)
        return spec


def _streams(spec: CacheSpec) -> Iterator[Stream]:
    return (stream for layer in spec.layers for stream in layer.streams)


def _blocks(spans: Spans) -> set[int]:
    return {block for low, high in spans for block in range(low, high)}


def _read(retention: Retention, queries: Iterable[int], length: int, block: int) -> set[int]:
    """Blocks with positions below ``length`` that these queries read."""
    touched: set[int] = set()
    for query in queries:
        for low, high in reads(retention, query):
            touched.update(range(low // block, -(-min(high, length) // block)))
    return touched


def _lengths(retention: Retention, block: int) -> list[int]:
    """Short ones, and those around the first one at which something is not read any more."""
    found = set(range(4 * block + 2))
    if not retention.exact:
        low, high = 0, 1 << 20
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if reads(retention, middle) == ((0, middle + 1),) else (low, middle)
        if low < 1 << 20:
            found.update(range(max(0, low - 2), low + 3 * block + 2))
    return sorted(found)


def _compare(retention: Retention, length: int, block: int) -> None:
    """The answers of a retention at a length, against what queries from there on read."""
    live, required = retention.live(length, block), retention.required(length, block)
    every = set(range(-(-length // block)))
    where = f"{retention!r}, {length} tokens in blocks of {block}"
    for name, spans in (
        ("live", live),
        ("required", required),
        *((f"droppable, rollback {back},", retention.droppable(length, back, block)) for back in (0, 1, block + 1)),
    ):
        ends = [end for span in spans for end in span]
        assert ends == sorted(ends) and all(low < high for low, high in spans) and len(set(ends[::2])) == len(spans), (
            f"{where}: {name} gives {spans}, which are no ascending, disjoint ranges"
        )
        assert _blocks(spans) <= every, f"{where}: {name} names blocks behind the end: {spans}"
    if retention.exact:
        assert _blocks(live) == set() == _blocks(retention.droppable(length, 0, block)), (
            f"{where}: an exact retention has no live or droppable blocks"
        )
        assert required == (((len(every) - 1, len(every)),) if length else ()), f"{where}: required is {required}"
        return
    later = range(length, length + 2 * block + 2)
    read, filling = _read(retention, later, length, block), {length // block}
    assert read <= _blocks(live), f"{where}: blocks {sorted(read - _blocks(live))} are read, and not live"
    assert _blocks(live) - read <= filling, f"{where}: blocks {sorted(_blocks(live) - read)} are live, and never read"
    assert read <= _blocks(required), f"{where}: blocks {sorted(read - _blocks(required))} are read, and not required"
    for back in (0, 1, block + 1):
        dropped = _blocks(retention.droppable(length, back, block))
        shorter = max(0, length - back)
        still = _read(retention, range(shorter, length + 2 * block + 2), length, block)
        assert not dropped & still, (
            f"{where}: blocks {sorted(dropped & still)} are droppable after a rollback of {back}, and read again"
        )
    kept = every - _blocks(retention.droppable(length, 0, block))
    assert kept - read <= filling, f"{where}: blocks {sorted(kept - read - filling)} are never read, nor droppable"
    for shorter in (length - 1, length - block, length // 2):
        if 0 < shorter < length:
            both = {number for number in _blocks(required) if number * block < shorter}
            assert both <= _blocks(retention.required(shorter, block)), (
                f"{where}: of its required blocks some are not required at {shorter} tokens"
            )
