"""The contract's tests for backends of the family ``"minimax_m3"``: an author names the backend and its features only.

Needs ``pip install 'kvist-minimax-m3[testing,torch]'``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch

from kvist.attention.gqa import GQAInputs
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream
from kvist.testing.attention import AttentionBackendTests, Case
from kvist_minimax_m3.dtypes import FP8
from kvist_minimax_m3.inputs import SparseInputs
from kvist_minimax_m3.plugin import FP8_INDEX, SEVERAL_INDEX_HEADS
from kvist_minimax_m3.selection import GroupReduce, Selection

_QUERY_HEADS, _KEY_HEADS, _SIZE = 8, 2, 16
#: How the index heads of a key head agree, by the name of the case.
_AGREE: dict[str, GroupReduce] = {"union": "union", "max": "max"}


def sparse_spec(page_tokens: int, dtype: str = "float32", index_dtype: str | None = None) -> CacheSpec:
    """A dense layer and two sparse ones that are alike."""
    row = RowFormat((_KEY_HEADS, _SIZE), dtype)
    plain = [Stream(name, row, History(), sharding=Heads(_KEY_HEADS)) for name in ("k", "v")]
    index = Stream("index_k", RowFormat((_SIZE,), index_dtype or dtype), History())
    return CacheSpec([Layer(0, plain), Layer(2, [*plain, index]), Layer(5, [*plain, index])], page_tokens, "kit")


#: With sparse blocks of 4 tokens.
CASES = (
    Case(name="pages-of-two", spec=sparse_spec(2)),
    Case(name="bfloat16", spec=sparse_spec(4, "bfloat16"), dtype="bfloat16"),
    Case(name="fp8-index", spec=sparse_spec(4, index_dtype=FP8), features=(FP8_INDEX,)),
    Case(name="each-index-head", spec=sparse_spec(4), features=(SEVERAL_INDEX_HEADS,)),
    Case(name="union", spec=sparse_spec(4), features=(SEVERAL_INDEX_HEADS,)),
    Case(name="max", spec=sparse_spec(1), features=(SEVERAL_INDEX_HEADS,)),
)


class SparseBackendTests(AttentionBackendTests):
    """Give ``backend`` and ``features``; ``cases`` and ``rule`` for one that cannot serve blocks of 4 tokens.

    rule: which blocks a query reads; prompts of 32 tokens and more have to be longer than that.
    """

    cases: ClassVar[Sequence[Case]] = CASES
    rule: ClassVar[Selection] = Selection(4, 3, 1)

    def inputs(self, case: Case, layer: Layer, token_count: int, generator: torch.Generator) -> Any:
        dtype = getattr(torch, case.dtype)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(token_count, *shape, generator=generator).to(dtype)

        rows = draw(_QUERY_HEADS, _SIZE), draw(_KEY_HEADS, _SIZE), draw(_KEY_HEADS, _SIZE)
        if len(layer.streams) == 2:
            return GQAInputs(*rows, 0.3)
        index_heads = _KEY_HEADS * (2 if SEVERAL_INDEX_HEADS in case.features else 1)
        rule = attrs.evolve(self.rule, group_reduce=_AGREE.get(case.name, "per_index_head"))
        return SparseInputs(*rows, draw(index_heads, _SIZE), draw(_SIZE), 0.3, rule)

    def reference(self, case: Case, layer: Layer, inputs: Any) -> torch.Tensor:
        count = len(inputs.query)
        position = torch.arange(count)
        visible = (position[:, None] >= position[None, :]).expand(_QUERY_HEADS, -1, -1)
        if len(layer.streams) == 3:
            stored = getattr(torch, layer.streams[2].row.dtype)
            visible = visible & _selected(inputs, inputs.index_key.to(stored).double())
        dtype = getattr(torch, layer.streams[0].row.dtype)
        key, value = (
            rows.to(dtype).double().transpose(0, 1).repeat_interleave(_QUERY_HEADS // _KEY_HEADS, dim=0)
            for rows in (inputs.key, inputs.value)
        )
        scores = inputs.query.transpose(0, 1) @ key.transpose(1, 2) * inputs.scale
        outputs: torch.Tensor = (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value).transpose(0, 1)
        return outputs


def _selected(inputs: Any, index_key: torch.Tensor) -> torch.Tensor:
    """Which tokens each query head may read by its blocks: bool ``[query heads, Q, K]``. One local block."""
    rule, (count, heads, _) = inputs.selection, inputs.index_query.shape
    chosen = torch.zeros(heads, count, count, dtype=torch.bool)
    scores = torch.einsum("qhe,ke->hqk", inputs.index_query, index_key)
    per_head = heads // _KEY_HEADS
    if rule.group_reduce == "max":
        scores = scores.unflatten(0, (_KEY_HEADS, per_head)).amax(1).repeat_interleave(per_head, 0)
    for head in range(heads):
        for query in range(count):
            own = query // rule.block_tokens
            best = {
                block: float(scores[head, query, : query + 1][block * rule.block_tokens :][: rule.block_tokens].max())
                for block in range(own)
            }
            ranked = sorted(best, key=lambda block: (-best[block], block))
            for block in [own, *ranked[: rule.topk - 1]]:
                chosen[head, query, block * rule.block_tokens : (block + 1) * rule.block_tokens] = True
    if rule.group_reduce == "union":
        chosen = chosen.unflatten(0, (_KEY_HEADS, per_head)).any(1).repeat_interleave(per_head, 0)
    return chosen.repeat_interleave(_QUERY_HEADS // heads, 0)
