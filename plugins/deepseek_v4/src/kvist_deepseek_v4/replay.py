"""Windows and states computed again where only the history is left, exactly.

When pages of windows and states are evicted and compressed rows stay, a hit ends at an earlier restore point, or is
none. :class:`Replay` can rebuild them, at a cost that it tells beforehand: it runs the model over the last tokens of
what is known, with nothing before them but the surviving rows, which it reads and never writes. The first of these
tokens come out wrong, as their windows are empty; the error is gone after as many tokens as the windows of all layers
reach, and only what comes after that is kept. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.errors import SpecError
from kvist.handover import Landing
from kvist.layout import KEPT_ROLLBACK, Layout
from kvist.manager import CacheManager
from kvist.memory.device import DeviceMemory
from kvist.sequence import Sequence
from kvist.spec import Scope
from kvist.step import NO_PAGE, IntArray, Step
from kvist_deepseek_v4.codecs import Stored
from kvist_deepseek_v4.geometry import LayerGeometry, layers_of
from kvist_deepseek_v4.reference import ReferenceBackend, Series, StepRow
from kvist_deepseek_v4.rows import StreamRows

#: Computes the model's layers with a backend that has begun the step: ``(backend, token ids, positions)``, int64
#: tensors ``[T]``. What comes out is of no interest.
Run = Callable[[AttentionBackend, torch.Tensor, torch.Tensor], Any]

_SCOPE = Scope()


@attrs.frozen
class Offer:
    """What replay would bring a prompt.

    length: where the sequence would go on. tokens: to be computed again for that. resumable: where it goes on without.
    """

    length: int
    tokens: int
    resumable: int

    @property
    def saved(self) -> int:
        """Tokens that need not be computed, other than by going on from ``resumable``. Not always positive."""
        return self.length - self.resumable - self.tokens


class Replay:
    """Opens sequences whose windows and states it computes again.

    manager, memory: of one cache of a DeepSeek-V4 model, without draft models beside it: raises SpecError otherwise.
    run: see :data:`Run`. chunk_tokens: of a step. Uses the reference backend's arithmetic, on any device.
    """

    def __init__(self, manager: CacheManager, memory: DeviceMemory, run: Run, *, chunk_tokens: int = 2048) -> None:
        if memory.layout.drafts:
            raise SpecError(
                "replay computes the target model's layers only, and the cache has others: "
                + ", ".join(spec.domain for spec in memory.layout.drafts),
                hint="open the sequence without replay",
            )
        self._manager, self._memory, self._run, self._chunk = manager, memory, run, chunk_tokens

    def offer(self, tokens: npt.ArrayLike, scope: Scope = _SCOPE) -> Offer | None:
        """What :meth:`open` would do for this prompt; ``None`` where no more is known than can be resumed at. Takes
        room for the windows for a moment, for which the cache may evict what nobody uses."""
        landing = self._land(tokens, scope)
        if landing is None:
            return None
        resumable = self._manager.probe(tokens, scope)
        offer = Offer(landing.length, replay_tokens(self._memory.layout, landing.length), resumable)
        self._manager.give_up(landing).release()
        return offer

    def open(self, tokens: npt.ArrayLike, scope: Scope = _SCOPE) -> Sequence:
        """A sequence of this prompt that has computed all that the history knows of it, in whole blocks.

        Where nothing is to be rebuilt it is the manager's ``open``. Raises CapacityError where there is no room for the
        windows, and whatever ``run`` raises; then nothing has changed.
        """
        landing = self._land(tokens, scope)
        if landing is None:
            return self._manager.open(tokens, scope)
        try:
            with torch.inference_mode():
                self._rebuild(landing)
        except BaseException:
            self._manager.give_up(landing).release()
            raise
        return self._manager.landed(landing)

    def _land(self, tokens: npt.ArrayLike, scope: Scope) -> Landing | None:
        """A landing that lacks windows and states only; ``None`` where there is none, or nothing is lacking."""
        layout = self._memory.layout
        length = (np.size(np.asarray(tokens)) - 1) // layout.block_tokens * layout.block_tokens
        while length > 0:
            landing = self._manager.land(tokens, scope, length=length)
            missing = [
                np.flatnonzero(landing.pages[group.index] != NO_PAGE) for group in layout.groups if not group.sparse
            ]
            known = min((int(blocks[0]) for blocks in missing if len(blocks)), default=length // layout.block_tokens)
            if not landing.complete and known * layout.block_tokens == length:
                return landing
            self._manager.give_up(landing).release()
            if landing.complete:
                return None
            length = known * layout.block_tokens
        return None

    def _rebuild(self, landing: Landing) -> None:
        length = landing.length
        first = first_kept(self._memory.layout, length)
        backend = _Rebuilding(BackendContext(self._memory), first)
        ids, begin = landing.sequence.tokens, length - replay_tokens(self._memory.layout, length)
        tables = tuple(table[None] for table in landing.tables)
        copies = (np.zeros((0, 2), np.int32),) * len(tables)
        for start in range(begin, length, self._chunk):
            end = min(start + self._chunk, length)
            rows = (np.array([value], np.int32) for value in (0, end - start, end))
            backend.begin(Step(0, *rows, int(end - start == 1), tables, copies))
            device = self._memory.device
            numbers = torch.arange(start, end, device=device)
            self._run(backend, torch.from_numpy(ids[start:end].astype(np.int64)).to(device), numbers)
        backend.store(landing.pages)


def replay_tokens(layout: Layout, length: int) -> int:
    """How many tokens before ``length``, which ends a block, :meth:`Replay.open` computes: so many that every row in
    the pages of windows and states that a sequence keeps there is exact. At least
    :func:`~kvist_deepseek_v4.restore.replay_bound`."""
    shapes = layers_of(layout.spec, "replay")
    window = max(shape.window for shape in shapes.values())
    return min(length, length - first_kept(layout, length) + (len(shapes) - 1) * (window - 1))


def first_kept(layout: Layout, length: int) -> int:
    """The first position that a page of a window has which a sequence of ``length`` tokens keeps."""
    block, first = layout.block_tokens, length
    for group in layout.groups:
        if group.sparse:
            kept = max((end for _, end in group.retention.droppable(length, KEPT_ROLLBACK, block)), default=0) * block
            ring = group.retention.ring
            first = min(first, max(kept, min(kept + block, length) - ring) if ring else kept)
    return first


class _Rebuilding(ReferenceBackend):
    """Reads history from pages, windows and states from what it has kept of the steps before; writes no page."""

    def __init__(self, context: BackendContext, first: int) -> None:
        super().__init__(context)
        self._first = first
        #: What is stored of the last rows of each window, and where they begin.
        self._kept: dict[tuple[int, str], tuple[int, Stored]] = {}

    def _write_window(self, layer: LayerGeometry, kv: StreamRows, row: StepRow, own: torch.Tensor) -> torch.Tensor:
        begin, stored = self._keep(kv, row, kv.codec.encode(own), layer.window)
        return kv.codec.decode(tuple(part[max(0, row.begin - layer.window + 1 - begin) :] for part in stored))

    def _compress(self, layer: LayerGeometry, row: StepRow, series: Series) -> None:
        states = self._streams[layer.id][series.names[0]]
        self._keep(states, row, states.codec.encode(self._own_states(layer, row, series)), 0)

    def _keep(self, rows: StreamRows, row: StepRow, own: Stored, window: int) -> tuple[int, Stored]:
        """Put the step's rows behind those that are kept. Returns them all, and where they begin."""
        key = rows.layer_id, rows.name
        begin, before = self._kept.get(key, (row.begin, tuple(part[:0] for part in own)))
        stored = tuple(torch.cat(parts) for parts in zip(before, own, strict=True))
        first = min(max(begin, min(self._first, row.end - window)), row.end)
        self._kept[key] = first, tuple(part[first - begin :].clone() for part in stored)
        return begin, stored

    def store(self, pages: tuple[IntArray, ...]) -> None:
        """Write what is kept where there are pages for it."""
        for (layer_id, name), (begin, stored) in self._kept.items():
            rows = self._streams[layer_id][name]
            skipped = max(0, self._first - begin)
            rows.store(pages[rows.group], begin + skipped, tuple(part[skipped:] for part in stored))
