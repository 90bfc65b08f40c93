"""The contract's tests for backends of the family ``"deepseek_v4"``: an author names the backend only.

Needs ``pip install 'kvist-deepseek-v4[testing]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvist.spec import CacheSpec, Layer, RowFormat
from kvist.testing.attention import AttentionBackendTests, Case
from kvist_deepseek_v4.formats import INDEX_FP8, PACKED, EncodedRow
from kvist_deepseek_v4.inputs import DeepseekV4Inputs
from kvist_deepseek_v4.plugin import ENCODED_ROWS
from kvist_deepseek_v4.spec import cache_spec

_HEADS, _SIZE, _INDEX_HEADS, _INDEX_SIZE = 3, 16, 16, 8
_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def tiny_spec(block_tokens: int, dtype: str = "float32", layers: str = "-4848") -> CacheSpec:
    """Layers of these kinds: sliding, sparse with rows of 4 tokens, heavy with rows of 8. Windows of 5 tokens."""
    kinds = {"-": _SLIDING, "4": _SPARSE, "8": _HEAVY}
    config = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": len(layers),
        "head_dim": _SIZE,
        "index_head_dim": _INDEX_SIZE,
        "partial_rotary_factor": 0.25,
        "sliding_window": 5,
        "layer_types": [kinds[layer] for layer in layers],
        "compress_rates": {_SPARSE: 4, _HEAVY: 8},
    }
    return cache_spec(config, block_tokens=block_tokens, dtype=dtype, drafts=8, fingerprint="kit")


#: Blocks of 8 tokens keep whole windows, of 32 tokens rings.
CASES = (
    Case(name="windows", spec=tiny_spec(8)),
    Case(name="rings", spec=tiny_spec(32)),
    Case(name="bfloat16", spec=tiny_spec(8, "bfloat16", "-48"), dtype="bfloat16"),
    Case(name="stored-as-bfloat16", spec=tiny_spec(8, "bfloat16", "-48")),
    Case(name="fp8", spec=tiny_spec(8, "fp8", "-48"), features={ENCODED_ROWS}),
    Case(name="fp8-mxfp4", spec=tiny_spec(32, "fp8-mxfp4", "-48"), features={ENCODED_ROWS}),
)

_CONSTANTS = ("sinks", "position_bias", "norm", "frequencies", "index_position_bias", "index_norm")


class DeepseekV4BackendTests(AttentionBackendTests):
    """Give ``backend``; ``cases`` for one that cannot serve these sizes."""

    cases: ClassVar[Sequence[Case]] = CASES
    constants: ClassVar[frozenset[str]] = frozenset(_CONSTANTS)

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> DeepseekV4Inputs:
        dtype = getattr(torch, case.dtype)
        learned = torch.Generator().manual_seed(layer.id)

        def draw(*shape: int, by: torch.Generator = generator, to: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=by).to(to)

        def constant(*shape: int) -> torch.Tensor:
            return draw(*shape, by=learned, to=torch.float32)

        rows = draw(token_count, _HEADS, _SIZE), draw(token_count, _SIZE), 0.4, constant(_HEADS)
        streams = {stream.name: stream for stream in layer.streams}
        if "compressed" not in streams:
            return DeepseekV4Inputs(*rows)
        ratio = streams["compressed"].tokens_per_row
        index: dict[str, Any] = {}
        if "index_k" in streams:
            index = {
                "index_query": draw(token_count, _INDEX_HEADS, _INDEX_SIZE),
                "index_weights": draw(token_count, _INDEX_HEADS),
                "index_state": draw(token_count, *streams["index_state"].row.shape),
                "index_position_bias": constant(ratio, streams["index_state"].row.shape[1]),
                "index_norm": 1 + 0.1 * constant(_INDEX_SIZE),
                # Rounding to fewer bits may change an order, so there everything is selected.
                "topk": 3 if all(stream.row.dtype == "float32" for stream in layer.streams) else 1 << 10,
            }
        return DeepseekV4Inputs(
            *rows,
            state=draw(token_count, *streams["state"].row.shape),
            position_bias=constant(ratio, streams["state"].row.shape[1]),
            norm=1 + 0.1 * constant(_SIZE),
            frequencies=torch.tensor([1.0, 0.1]),
            **index,
        )

    def reference(self, case: Case, layer: Layer, inputs: Any) -> torch.Tensor:
        """One query after the other, one compressed row after the other."""
        count = len(inputs.query)
        streams = {stream.name: stream for stream in layer.streams}
        kv = stored(inputs.kv, streams["kv"].row)
        ratio = streams["compressed"].tokens_per_row if "compressed" in streams else 0
        compressed, index = kv[:0], None
        if ratio:
            rows = _rows(inputs.state, inputs.position_bias, inputs.norm, inputs, ratio)
            compressed = stored(rows, streams["compressed"].row)
        if "index_k" in streams:
            learned = inputs.index_position_bias, inputs.index_norm
            row = streams["index_k"].row
            index = stored(_rows(inputs.index_state, *learned, inputs, ratio), row)
            turned = inputs.index_query @ hadamard(row.elements) if isinstance(row, EncodedRow) else inputs.index_query
        output = torch.empty_like(inputs.query)
        for query in range(count):
            read = [kv[max(0, query - 4) : query + 1]]
            closed = (query + 1) // ratio if ratio else 0
            chosen = list(range(closed))
            if index is not None:
                products = (turned[query] @ index[:closed].T).clamp(min=0)
                scores = (inputs.index_weights[query] @ products).tolist()
                chosen = sorted(chosen, key=lambda row: -scores[row])[: inputs.topk]
            keys = torch.cat([*read, compressed[chosen]])
            weights = torch.exp(inputs.query[query] @ keys.T * inputs.scale)
            weights = weights / (weights.sum(-1, keepdim=True) + torch.exp(inputs.sinks)[:, None])
            output[query] = weights @ keys
        return output


def stored(rows: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """What is read back of float64 rows ``[n, elements]``; of encoded index rows the turned ones. Slow and plain."""
    if not isinstance(row, EncodedRow):
        return rows.to(getattr(torch, row.dtype)).double()
    if row.encoding == PACKED:
        plain = row.elements - row.rope
        blocks = [_scaled(part, E4M3) for part in rows[:, :plain].split(64, dim=1)]
        return torch.cat([*blocks, rows[:, plain:].to(torch.bfloat16).double()], dim=1)
    turned = rows @ hadamard(row.elements)
    if row.encoding == INDEX_FP8:
        return _scaled(turned, E4M3)
    return torch.cat([_scaled(part, E2M1) for part in turned.split(32, dim=1)], dim=1)


def _small_floats(mantissa_bits: int, bias: int, count: int) -> tuple[float, ...]:
    """The values of the first ``count`` codes of a small float, which ascend."""
    values = []
    for code in range(count):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits)
        values.append(2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)
    return tuple(values)


#: Positive values by code: of e4m3, whose last code is no number, and of e2m1.
E4M3, E2M1 = _small_floats(3, 7, 127), _small_floats(1, 1, 8)


def _scaled(block: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Each row of a block as multiples of one power of two, the nearest that ``values`` has, of two the even code."""
    grid = torch.tensor(values, dtype=torch.float64)
    largest = block.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / values[-1])))
    off = ((block / scale).abs()[..., None] - grid).abs()
    # Odd codes lose against even ones at the same distance, and against no nearer ones.
    code = (off + torch.where(torch.arange(len(values)) % 2 == 1, 1e-12, 0.0)).argmin(-1)
    return grid[code] * block.sign() * scale


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix over the root of its size: the sign says whether the ones that two numbers share are odd."""
    signs = [[(-1) ** (one & other).bit_count() for other in range(size)] for one in range(size)]
    return torch.tensor(signs, dtype=torch.float64) * size**-0.5


def _rows(
    state: torch.Tensor, position_bias: torch.Tensor, norm: torch.Tensor, inputs: Any, ratio: int
) -> torch.Tensor:
    """All compressed rows, ``[rows, elements]``, from exact states."""
    size = len(norm)
    made = []
    for row in range(len(state) // ratio):
        content, gate = [], []
        for position in range(max(0, (row - 1) * ratio), (row + 1) * ratio):
            # The second series, where there are two, belongs to the token's own window.
            series = slice(-size, None) if position >= row * ratio else slice(0, size)
            if position >= row * ratio or state.shape[-1] > size:
                content.append(state[position, 0, series])
                gate.append((state[position, 1] + position_bias[position % ratio])[series])
        weights = torch.exp(torch.stack(gate))
        pooled = (weights * torch.stack(content)).sum(0) / weights.sum(0)
        pooled = pooled / torch.sqrt((pooled**2).mean() + inputs.eps) * norm
        turned = torch.view_as_complex(pooled[-4:].reshape(2, 2).contiguous())
        angles = row * ratio * inputs.frequencies
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        made.append(torch.cat((pooled[:-4], torch.view_as_real(turned).flatten())))
    return torch.stack(made) if made else state.new_empty(0, size)
