"""Two backends in one cache: each serves its own streams, and neither sees the other's."""

import pytest
import torch

from kvist.attention.base import AttentionBackend, BackendContext
from kvist.attention.families import Backends, Need, page_layout
from kvist.attention.gather import TorchCpuBackend
from kvist.attention.gqa import GQAInputs
from kvist.attention.reference import ReferenceBackend
from kvist.errors import SpecError
from kvist.layout import Layout, RowMajor
from kvist.manager import PagedCacheManager, Run
from kvist.memory.device import DeviceMemory
from kvist.spec import CacheSpec, History, Layer, RowFormat, State, Stream


class Adder(AttentionBackend):
    """The smallest recurrent family: every token's output is the sum of all values so far, its own included."""

    @classmethod
    def page_layout(cls, spec):
        return RowMajor("adder-1")

    def __init__(self, context: BackendContext):
        self.layers = [layer.id for layer in context.spec.layers]
        self.sums = {id_: context.memory.view(id_, "sum", (4,), torch.float32) for id_ in self.layers}
        self.group = {id_: context.memory.layout.part(id_, "sum")[0].index for id_ in self.layers}

    def begin(self, step):
        self.step = step

    def forward(self, layer_id, inputs):
        step, sums = self.step, self.sums[layer_id]
        output, starts = torch.empty_like(inputs), step.query_starts
        for row, slot in enumerate(step.slots.tolist()):
            page = int(step.tables[self.group[layer_id]][slot, 0])
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            output[tokens] = sums[page] + inputs[tokens].cumsum(0)
            sums[page] = output[tokens][-1]
        return output


ROW = RowFormat((2, 8), "float32")
ROWS = [Stream(name, ROW, History()) for name in "kv"]
SUM = Stream("sum", RowFormat((4,), "float32"), State())
#: Layer 0 keeps rows and a state, layer 1 rows, layer 2 a state.
SPEC = CacheSpec([Layer(0, [*ROWS, SUM]), Layer(1, ROWS), Layer(2, [SUM])], 4, "hybrid")
NEEDS = {"gqa": Need(SPEC.only(("k", "v"))), "adder": Need(SPEC.only(("sum",)))}


def test_only_keeps_the_named_streams():
    assert [(layer.id, len(layer.streams)) for layer in NEEDS["gqa"].spec.layers] == [(0, 2), (1, 2)]
    assert [(layer.id, len(layer.streams)) for layer in NEEDS["adder"].spec.layers] == [(0, 1), (2, 1)]
    with pytest.raises(SpecError):
        SPEC.only(("index_k",))


@pytest.mark.parametrize("gqa", [ReferenceBackend, TorchCpuBackend])
def test_each_family_serves_its_part(gqa):
    torch.manual_seed(0)
    classes = {"gqa": gqa, "adder": Adder}
    arrangement = page_layout(NEEDS, classes)
    layout = Layout.build(SPEC, 64 << 10, arrangement)
    assert layout.tag == arrangement.tag == f"adder=adder-1,gqa={gqa.page_layout(NEEDS['gqa'].spec).tag}"
    memory = DeviceMemory(layout)
    memory.bytes.view(torch.float32).fill_(float("nan"))
    backends, manager = Backends(memory, NEEDS, classes), PagedCacheManager(layout)
    lengths = [11, 7]
    values = [torch.randn(length, 3, 2, 8) for length in lengths]
    adds = [torch.randn(length, 4) for length in lengths]
    sequences = [manager.open(list(range(1 + 20 * i, 1 + 20 * i + length))) for i, length in enumerate(lengths)]
    got = [{0: [], 1: [], 2: [], 3: []} for _ in lengths]
    while any(each.computed < length for each, length in zip(sequences, lengths)):
        counts = [min(3, length - each.computed) for each, length in zip(sequences, lengths)]
        # The order of rows is that of the runs, since none has one token.
        runs = [i for i, count in sorted(enumerate(counts), key=lambda pair: pair[1] != 1) if count]
        spans = [(i, slice(sequences[i].computed, sequences[i].computed + counts[i])) for i in runs]
        step = manager.plan([Run(sequences[i], counts[i]) for i in runs]).commit()
        memory.apply(step)
        backends.begin(step)
        rows = torch.cat([values[i][span] for i, span in spans])
        add = torch.cat([adds[i][span] for i, span in spans])
        outputs = {id_: backends["gqa"].forward(id_, GQAInputs(*rows.unbind(1), 0.5)).clone() for id_ in (0, 1)}
        outputs[2], outputs[3] = backends["adder"].forward(0, add), backends["adder"].forward(2, 2 * add)
        for id_, output in outputs.items():
            for (i, _), part in zip(spans, output.split([counts[i] for i in runs])):
                got[i][id_].append(part)
        memory.save(step)
        manager.complete(step)
        manager.check()
    for i, length in enumerate(lengths):
        query, key, value = values[i].double().unbind(1)
        scores = torch.einsum("qhe,khe->hqk", query, key) * 0.5
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), float("-inf"))
        attended = torch.einsum("hqk,khe->qhe", scores.softmax(-1), value).float()
        for id_, expected in ((0, attended), (1, attended), (2, adds[i].cumsum(0)), (3, 2 * adds[i].cumsum(0))):
            torch.testing.assert_close(torch.cat(got[i][id_]), expected, rtol=1e-5, atol=1e-5)


def test_families_that_arrange_one_stream_differently_are_refused():
    class Other(Adder):
        @classmethod
        def page_layout(cls, spec):
            return RowMajor("other-1")

    needs = {"adder": NEEDS["adder"], "other": NEEDS["adder"]}
    with pytest.raises(SpecError) as caught:
        page_layout(needs, {"adder": Adder, "other": Other})
    assert str(caught.value) == (
        "stream 'sum': family 'adder' arranges its pages as 'adder-1', family 'other' as 'other-1'\n"
        "hint: give the streams of the two families different names"
    )
