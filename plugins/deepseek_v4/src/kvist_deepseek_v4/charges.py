"""What other engines count for a DeepSeek-V4 sequence, by the rules that they publish, beside Kvist's. No torch.

All figures are for packed rows of 584 bytes with index rows of 132, but where a rule says otherwise. The rules are read
from the engines' sources; see ``docs/memory.md`` for which. Nothing here was measured on these engines.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from kvist.layout import Layout
from kvist.spec import ceil_div
from kvist_deepseek_v4.config import Config, LayerKind, read_config
from kvist_deepseek_v4.formats import INDEX_FP8, PAGE_UNIT, index_row, packed_row, pages_of
from kvist_deepseek_v4.sizes import admission_bytes
from kvist_deepseek_v4.spec import cache_spec


@attrs.frozen
class Charge:
    """What one engine counts for a sequence, in bytes.

    token: for each token of a long sequence that is running. running: beside it, whatever its length. prompt: for all
    of a prompt of so many tokens when it is admitted, or while a chunk of it is computed.
    """

    engine: str
    token: float
    running: int
    prompt: int


@attrs.frozen
class _Model:
    """Bytes of the rows of a model, and how many layers have each."""

    sliding: int
    sparse: int
    heavy: int
    row: int
    plain_row: int
    index_row: int
    sparse_state: int
    index_state: int
    heavy_state: int
    window: int
    sparse_ratio: int
    heavy_ratio: int

    @property
    def layers(self) -> int:
        return self.sliding + self.sparse + self.heavy


def charges(config: Config, prompt: int, chunk: int, block_tokens: int = 256) -> list[Charge]:
    """Kvist's first, then the others'. prompt: tokens of the prompt. chunk: tokens of a step, at most.

    Raises SpecError for a config that cannot be served or has not both kinds of compressed layers.
    """
    model = _model(config)
    return [kvist_charge(config, prompt, chunk, block_tokens), *_others(model, prompt, chunk)]


def kvist_charge(config: Config, prompt: int, chunk: int, block_tokens: int) -> Charge:
    """Pages, padding included: :func:`~kvist_deepseek_v4.sizes.admission_bytes` in the chunk that needs most."""
    spec = cache_spec(config, block_tokens=block_tokens, dtype="fp8")
    layout = Layout.build(spec, 1 << 42, pages_of(spec))
    history = sum(group.page_bytes for group in layout.groups if not group.sparse)
    most = max(
        sum(admission_bytes(layout, begin, min(chunk, prompt - begin)).values()) for begin in range(0, prompt, chunk)
    )
    return Charge("Kvist", history / block_tokens, layout.sequence_bytes, most)


def _others(model: _Model, prompt: int, chunk: int) -> Iterator[Charge]:
    yield _tensorrt_llm(model, prompt)
    yield _vllm(model, prompt, chunk)
    yield _sglang(model, prompt, chunk)


def _tensorrt_llm(model: _Model, prompt: int) -> Charge:
    """Rows of one byte per element. A prompt is charged a row of every kind for every token, windows and states too,
    and rows of several tokens are divided with the remainder dropped; a running sequence its windows and history."""
    row, index = model.plain_row // 2, model.index_row
    history = model.sparse * (row // model.sparse_ratio + index // model.sparse_ratio)
    history += model.heavy * (row // model.heavy_ratio)
    states = model.sparse * (model.sparse_state + model.index_state) + model.heavy * model.heavy_state
    every = model.layers * row + history + states
    windows = model.window * (model.layers * row + model.heavy * model.heavy_state)
    windows += 2 * model.sparse_ratio * model.sparse * (model.sparse_state + model.index_state)
    return Charge("TensorRT-LLM", history, windows, prompt * every)


def _vllm(model: _Model, prompt: int, chunk: int) -> Charge:
    """Pages of 256 tokens of compressed rows, of 64 of the window's rows, of 4 and 8 of states, which take the size of
    the next larger one. A window of w tokens is charged for ``ceil((w - 1 + chunk) / page) + 1`` pages."""
    large, middle, small = _filled(64 * model.row), _filled(64 * model.index_row), _filled(2 * model.row)
    page = model.sparse * (large + middle) + model.heavy * small

    def windows(step: int) -> int:
        pages = model.layers * large * _window_pages(model.window, 64, step)
        pages += model.sparse * (large + middle) * _window_pages(2 * model.sparse_ratio, 4, step)
        return pages + model.heavy * large * _window_pages(model.heavy_ratio, 8, step)

    return Charge("vLLM", page / 256, windows(1), ceil_div(prompt, 256) * page + windows(min(chunk, prompt)))


def _sglang(model: _Model, prompt: int, chunk: int) -> Charge:
    """Pages of 256 tokens of every kind but the states: of those of 4 tokens a ring of 8 rows for each page of the
    window, of those of 128 tokens a ring of 128 rows for each request."""
    page = model.sparse * (_filled(64 * model.row) + 64 * model.index_row) + model.heavy * _filled(2 * model.row)
    window_page = model.layers * _filled(256 * model.row)
    window_page += model.sparse * 2 * model.sparse_ratio * (model.sparse_state + model.index_state)
    request = model.heavy * model.heavy_ratio * model.heavy_state

    def windows(step: int) -> int:
        return window_page * _window_pages(model.window, 256, step) + request

    return Charge("SGLang", page / 256, windows(1), ceil_div(prompt, 256) * page + windows(min(chunk, prompt)))


def _window_pages(window: int, page_tokens: int, step: int) -> int:
    """Pages that a window may touch in a step, for it need not begin where a page does."""
    return ceil_div(window - 1 + step, page_tokens) + 1


def _filled(size: int) -> int:
    return ceil_div(size, PAGE_UNIT) * PAGE_UNIT


def _model(config: Config) -> _Model:
    shape = read_config(config)
    sparse = [layer for layer in shape.layers if layer.indexed]
    heavy = [layer for layer in shape.layers if layer.ratio and not layer.indexed]
    size, index_size = shape.head_dim, shape.index_head_dim
    return _Model(
        sliding=sum(1 for layer in shape.layers if not layer.ratio),
        sparse=len(sparse),
        heavy=len(heavy),
        row=packed_row(size, shape.rope).row_bytes,
        plain_row=2 * size,
        index_row=index_row(index_size, INDEX_FP8).row_bytes,
        sparse_state=2 * 2 * size * 4,
        index_state=2 * 2 * index_size * 4,
        heavy_state=2 * size * 4,
        window=shape.window,
        sparse_ratio=_ratio(sparse),
        heavy_ratio=_ratio(heavy),
    )


def _ratio(layers: list[LayerKind]) -> int:
    return layers[0].ratio if layers else 1
