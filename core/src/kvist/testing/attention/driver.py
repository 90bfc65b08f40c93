"""Plays the engine: a real manager and memory, one backend, and every output compared with the dense reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from kvist.attention.base import BackendContext
from kvist.batch import DecodeBatch
from kvist.layout import Layout, PageLayout, RowMajor
from kvist.manager import PagedCacheManager
from kvist.memory.device import DeviceMemory
from kvist.plan import Run
from kvist.sequence import Sequence
from kvist.spec import CacheSpec, History, Layer, RowFormat, Stream, Window, ceil_div
from kvist.step import Step
from kvist.testing.attention.case import Case
from kvist.testing.attention.inputs import exact, join, over_tensors, over_tokens, strided
from kvist.testing.attention.watch import InputsCopy, StepCopy, Writes, failure

if TYPE_CHECKING:
    from kvist.testing.attention.author import Author

#: What pages hold that nobody wrote: NaN in every float dtype, or large numbers (5e4 in float32 and bfloat16).
NAN, JUNK = 0xFF, 0x47

Change = Callable[[Step], Step]


@attrs.define(eq=False)
class Request:
    """One sequence, and by layer id what all its tokens bring and should get."""

    sequence: Sequence
    total: int
    inputs: dict[int, Any]
    expected: dict[int, torch.Tensor]

    @property
    def left(self) -> int:
        """Tokens not computed yet."""
        return self.total - self.sequence.computed


#: Request and tokens, or request, tokens, drafts and accepted drafts.
Wanted = tuple[Request, int] | tuple[Request, int, int, int]


@attrs.define(eq=False)
class Flight:
    """A committed step. rows: request, position of its first query token, query tokens, and how many of them stay; the
    first ``batched`` ones are of a decode batch."""

    step: Step
    rows: list[tuple[Request, int, int, int]]
    batched: int

    @property
    def singles(self) -> int:
        """Rows of one token; they come first."""
        return sum(count == 1 for _, _, count, _ in self.rows)


class Driver:
    """One cache with one backend.

    poison: byte that unwritten pages are filled with. watch_*: check after each call what it must leave alone.
    strided: hand inputs over as views of larger tensors. foreign: the cache has streams and layers that are another
    backend's.
    """

    def __init__(
        self,
        author: Author,
        case: Case,
        *,
        tokens: int,
        seed: int = 0,
        poison: int = NAN,
        watch_writes: bool = False,
        watch_step: bool = False,
        watch_inputs: bool = False,
        strided: bool = False,
        foreign: bool = False,
    ) -> None:
        self.author, self.case = author, case
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = case.spec.layers
        self.layout = self._layout(tokens, foreign)
        self.memory = DeviceMemory(self.layout, case.device)
        self.poison = poison
        self.memory.bytes.fill_(poison)
        self.manager = PagedCacheManager(self.layout)
        self.manager.shuffle_free_pages(self.random)
        self.backend = author.backend(BackendContext(self.memory, case.spec))
        self.watch_writes, self.watch_step, self.watch_inputs = watch_writes, watch_step, watch_inputs
        self.strided = strided
        #: By layer id, every output of the last step.
        self.outputs: dict[int, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}
        self._shapes: dict[int, list[int]] = {}
        self._requests: dict[int, Request] = {}

    def _layout(self, tokens: int, foreign: bool) -> Layout:
        """Room for ``tokens`` tokens twice, so that nothing is evicted."""
        spec, arrangement = self.case.spec, self.author.backend.page_layout(self.case.spec)
        if foreign:
            spec, arrangement = _with_foreigners(spec), _Shared(arrangement)
        sizes = [group.page_bytes for group in Layout.build(spec, 1 << 30, arrangement).groups]
        pages = 2 * ceil_div(tokens, spec.block_tokens) + 32
        return Layout.build(spec, pages * sum(sizes) + len(sizes) * max(sizes), arrangement)

    # Requests.

    def open(
        self,
        total: int,
        *,
        like: Request | None = None,
        shared: int = 0,
        reuse: bool = True,
        restore_at: SequenceOf[int] = (),
    ) -> Request:
        """A sequence of ``total`` tokens, whose first ``shared`` ones are those of ``like``."""
        tokens = self._token_ids(total)
        if like is not None:
            tokens[:shared] = like.sequence.tokens[:shared]
        sequence = self.manager.open(tokens, reuse=reuse, restore_at=restore_at)
        return self._request(sequence, total, like, shared)

    def fork(self, parent: Request) -> Request:
        """A second sequence that goes on as another one from where ``parent`` is."""
        sequence = self.manager.fork(parent.sequence)
        here = sequence.computed
        self.manager.truncate(sequence, here)
        sequence.extend(self._token_ids(parent.total - here))
        return self._request(sequence, parent.total, parent, here)

    def _request(self, sequence: Sequence, total: int, like: Request | None, shared: int) -> Request:
        request = Request(sequence, total, *self._content(total, like, shared))
        self._requests[sequence.slot] = request
        return request

    def _token_ids(self, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self.random.integers(0, self.case.spec.vocab_size or 1 << 30, count).astype(np.int32)

    def _content(self, total: int, like: Request | None, shared: int) -> tuple[dict[int, Any], dict[int, torch.Tensor]]:
        if like is not None and shared == total == like.total:
            return like.inputs, like.expected
        inputs, expected = {}, {}
        for layer in self.layers:
            own = self._anything(layer, total)
            names = self._names[layer.id] = self.author.names(own, total)
            if like is not None:
                old = over_tokens(like.inputs[layer.id], names, lambda tensor: tensor[:shared])
                own = join([old, over_tokens(own, names, lambda tensor: tensor[shared:])], names)
            inputs[layer.id] = own
            expected[layer.id] = exact(self.author.reference(self.case, layer, over_tensors(own, exact)))
            self._shapes[layer.id] = list(expected[layer.id].shape[1:])
        return inputs, expected

    # Steps.

    def step(
        self,
        runs: Iterable[Wanted],
        *,
        decode: DecodeBatch | None = None,
        change: Change | None = None,
        between: Callable[[], None] | None = None,
    ) -> Flight:
        """One whole step. runs: ``(request, tokens)`` or ``(request, tokens, drafts, accepted drafts)``.

        decode: its rows come first. change: applied to the step that the backend gets. between: called after ``begin``,
        and after each ``forward`` before its output is looked at.
        """
        flight = self.commit(runs, decode)
        self.execute(flight, change=change, between=between)
        self.complete(flight)
        return flight

    def commit(self, runs: Iterable[Wanted], decode: DecodeBatch | None = None) -> Flight:
        """Plan and commit; nothing has run yet."""
        wanted = [(run[0].sequence, run[1], *(run[2:] or (0, 0))) for run in runs]
        plan = self.manager.plan([Run(sequence, tokens, drafts) for sequence, tokens, drafts, _ in wanted], decode)
        step = plan.commit()
        stays = {sequence.slot: tokens + accepted for sequence, tokens, _, accepted in wanted}
        rows = []
        for slot, count, length in zip(step.slots.tolist(), step.query_lengths.tolist(), step.lengths.tolist()):
            rows.append((self._requests[slot], length - count, count, stays.get(slot, count)))
        return Flight(step, rows, len(rows) - len(wanted))

    def execute(
        self, flight: Flight, *, change: Change | None = None, between: Callable[[], None] | None = None
    ) -> None:
        """Run the step's layers and compare what comes out."""
        step = flight.step if change is None else change(flight.step)
        self.memory.apply(step)
        self._poison()
        writes = Writes(self.memory, self.case, step) if self.watch_writes else None
        copy = StepCopy(self.case, step) if self.watch_step else None
        self.backend.begin(step)
        if writes:
            writes.check(None)
        if between:
            between()
        for layer in self.layers:
            inputs = self._inputs(layer, flight, step)
            before = InputsCopy(self.case, inputs) if self.watch_inputs else None
            output = self.backend.forward(layer.id, inputs)
            if writes:
                writes.check(layer.id)
            if before:
                before.check(layer.id)
                # The caller reuses them.
                over_tokens(inputs, self._names[layer.id], lambda tensor: tensor.fill_(77))
            if between:
                between()
            self._compare(layer.id, output, flight, step)
        if copy:
            copy.check()
        self.memory.save(step)

    def complete(self, flight: Flight) -> None:
        """Tell the manager what stays."""
        self.manager.complete(flight.step, [kept for *_, kept in flight.rows[flight.batched :]])

    def play(self, requests: SequenceOf[Request], sizes: SequenceOf[int] = (1, 1, 2, 5, 11)) -> None:
        """Random ragged steps until every request is computed: singles, chunks, and what fills a block exactly."""
        block = self.layout.block_tokens
        while waiting := [request for request in requests if request.left]:
            chosen = self.random.permutation(len(waiting))[: self.random.integers(1, len(waiting) + 1)]
            runs = []
            for request in (waiting[index] for index in chosen):
                to_border = block - request.sequence.computed % block
                wish = int(self.random.choice([*sizes, to_border, to_border + 1]))
                end = request.sequence.next_end(min(request.total, request.sequence.computed + wish))
                runs.append((request, end - request.sequence.computed))
            self.manager.shuffle_free_pages(self.random)
            self.step(runs)

    def prefill(self, request: Request, length: int) -> None:
        """Compute up to ``length``, stopping where a snapshot is to be kept."""
        while request.sequence.computed < length:
            self.step([(request, request.sequence.next_end(length) - request.sequence.computed)])

    def _poison(self) -> None:
        """Overwrite every page that nobody holds or can find, and the reserved ones. The copies of steps in flight have
        to be done by then: what they copy from may be free."""
        for group in range(len(self.layout.groups)):
            pages = self.memory.pages(group)
            free = torch.from_numpy(self.manager.free_pages(group).astype(np.int64)).to(pages.device)
            pages[free] = self.poison
            pages[0] = self.poison

    def _inputs(self, layer: Layer, flight: Flight, step: Step) -> Any:
        names = self._names[layer.id]
        parts = [self._row(layer, names, *row) for row in flight.rows]
        if padded := step.row_count - len(parts):
            # One token of anything for each padding row, which stand where the other single tokens end.
            parts[flight.singles : flight.singles] = [self._anything(layer, padded)]
        if not parts:
            parts = [over_tokens(self._anything(layer, 1), names, lambda tensor: tensor[:0])]
        joined = join(parts, names)
        return over_tokens(joined, names, strided if self.strided else torch.clone)

    def _row(self, layer: Layer, names: list[str], request: Request, first: int, count: int, kept: int) -> Any:
        real = over_tokens(request.inputs[layer.id], names, lambda tensor: tensor[first : first + kept])
        if kept == count:
            return real
        junk = over_tokens(self._anything(layer, first + count), names, lambda tensor: tensor[first + kept :])
        return join([real, junk], names)

    def _anything(self, layer: Layer, token_count: int) -> Any:
        return self.author.dense(self.case, layer, token_count, self.generator)

    def _compare(self, layer_id: int, output: torch.Tensor, flight: Flight, step: Step) -> None:
        where = f"layer {layer_id}: the output"
        shape = [step.token_count, *self._shapes[layer_id]]
        if list(output.shape) != shape:
            raise failure(self.case, f"{where} has shape {list(output.shape)}, expected {shape}")
        if output.dtype != getattr(torch, self.case.dtype):
            raise failure(self.case, f"{where} is {output.dtype}, the inputs are torch.{self.case.dtype}")
        self.outputs[layer_id] = output.clone()
        got = exact(output)
        tolerance = self.case.tolerance
        padded = step.row_count - len(flight.rows)
        start = 0
        for row, (request, first, count, kept) in enumerate(flight.rows):
            if row == flight.singles:
                start += padded
            expected = request.expected[layer_id][first : first + kept]
            off = (got[start : start + kept] - expected).abs()
            # Not "larger than": NaN compares with nothing.
            bad = ~(off <= tolerance * (1 + expected.abs()))
            if bad.any():
                token = int(torch.nonzero(bad.reshape(kept, -1).any(1))[0, 0])
                worst = float(off[token].nan_to_num(float("inf")).max())
                amount = "is not finite" if worst == float("inf") else f"is off by {worst:.3g}"
                raise failure(
                    self.case,
                    f"{where} at position {first + token} {amount}, allowed is {tolerance:g}; step {flight.step.id} "
                    f"computed {first}..{first + count - 1} of this sequence, in row {row} of {len(flight.rows)}",
                )
            start += count


#: What another backend of the same cache keeps, in a group of its own and beside what is tested.
_FOREIGN = "another-backends-rows"


def _with_foreigners(spec: CacheSpec) -> CacheSpec:
    """``spec`` with a layer that is another backend's in front, and a stream of it in every layer."""
    others = [Stream(_FOREIGN, RowFormat((3,), "float32"), retention) for retention in (Window(5), History())]
    layers = [Layer(max(layer.id for layer in spec.layers) + 1, (others[0],))]
    layers += [Layer(layer.id, (others[1], *layer.streams)) for layer in spec.layers]
    return attrs.evolve(spec, layers=layers)


@attrs.frozen
class _Shared:
    """Pages of two backends side by side."""

    own: PageLayout
    tag: str = "shared"

    def part_bytes(self, stream: Stream, row_count: int) -> int:
        return (RowMajor() if stream.name == _FOREIGN else self.own).part_bytes(stream, row_count)
