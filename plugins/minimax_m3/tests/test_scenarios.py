"""Faults that others had with block-sparse attention, one test each; S1 to S11, see the README's table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvist.errors import RequestError
from kvist.spec import Replicated
from kvist.transfer.local import LocalTransport
from kvist.transfer.network import LocalNetwork
from kvist.transfer.pagetable import describe
from kvist.transfer.transceiver import Transceiver
from kvist.transfer.transfers import Transfers
from kvist.transfer.transport import TransportContext
from kvist_minimax_m3.reference import ReferenceBackend
from kvist_minimax_m3.selection import Selection


def test_s1_a_page_that_is_moved_has_its_index_keys(paged, case):
    """Index keys were left behind by a transfer, and blocks ranked by zeros; short prompts did not show it."""
    sizes = case(index_dtype="bfloat16")
    sender, receiver = paged(ReferenceBackend, sizes, [70], seed=1), paged(ReferenceBackend, sizes, [70], seed=1)
    receiver.table[:] = receiver.table[:, ::-1]
    [group] = sender.memory.layout.groups
    # What moves is a range of bytes, and every stream of every layer is in it.
    parts = [(part.layer_id, part.stream.name) for part in group.parts]
    assert sorted(parts) == [(1, "k"), (1, "v"), *((layer, name) for layer in (4, 7) for name in ("index_k", "k", "v"))]
    assert sum(part.byte_count for part in group.parts) == group.content_bytes
    assert {part.stream.sharding for part in group.parts if part.stream.name == "index_k"} == {Replicated()}
    sender.step([(0, 60)])
    source, target = (torch.from_numpy(each.table[each.slots[0], :15]).long() for each in (sender, receiver))
    receiver.memory.pages(0)[target] = sender.memory.pages(0)[source]
    receiver.computed[0] = 60
    for count in (1, 9):
        assert all(map(torch.equal, sender.step([(0, count)]), receiver.step([(0, count)])))


def test_s1_a_request_goes_on_where_it_was_sent(tiny, expecting, tokens, machine):
    """The prompt, five times as long as what a query reads, is computed on one side, all other tokens on the other."""
    model, text = tiny(), tokens(75)
    expected = expecting(model, text, text[:60])
    network = LocalNetwork()

    def transfers(name, cache):
        transport = LocalTransport(TransportContext(name), network)
        region = transport.register(cache.memory.bytes.data_ptr(), cache.layout.arena_bytes)
        transceiver = Transceiver(transport, region, describe(cache.layout))
        return transceiver, Transfers(cache.manager, transceiver)

    with machine(model, seed=1) as prefill:
        sequence = prefill.manager.open(text[:60])
        prefill.finish(sequence, expected)
    with machine(model, seed=2) as decode:
        (context, outgoing), (generation, incoming) = transfers("context", prefill), transfers("generation", decode)
        outgoing.send("request", sequence)
        receiving = incoming.receive("request", text, [context.hello()], length=60)
        for _ in range(1000):
            for transceiver, both in ((context, outgoing), (generation, incoming)):
                transceiver.poll()
                both.poll()
            if receiving.sequence is not None and not outgoing.open + incoming.open:
                break
        assert receiving.sequence.computed == 60
        decode.compute([(receiving.sequence, 6)], expected)
        decode.finish(receiving.sequence, expected, chunk=1)
        for transceiver in (context, generation):
            transceiver.close()


def test_s2_a_block_comes_back_whole_or_not_at_all(tmp_path, tiny, expecting, tokens, tiers):
    """Keys and values came back without their index keys. One block's file is gone: nothing behind it is used."""
    model, prompt = tiny(), tokens(60)
    expected = expecting(model, prompt)
    with tiers(model, folder=tmp_path) as tiered:
        sequence = tiered.cache.manager.open(prompt)
        tiered.cache.finish(sequence, expected)
        tiered.cache.manager.close(sequence)
    files = sorted(tmp_path.rglob("*.block"))
    assert len(files) == 15
    lengths = set()
    for index in range(0, 15, 5):
        kept = files[index].read_bytes()
        files[index].unlink()
        with tiers(model, folder=tmp_path, seed=index) as tiered:
            sequence = tiered.cache.manager.open(prompt)
            tiered.load(sequence)
            assert sequence.computed % 4 == 0 and sequence.computed < 60
            lengths.add(sequence.computed)
            tiered.cache.finish(sequence, expected)
            tiered.cache.manager.close(
                sequence,
            )
        files[index].parent.mkdir(exist_ok=True)
        files[index].write_bytes(kept)
    assert len(lengths) == 3


def test_s3_a_selection_is_by_token_then_by_head(paged, case):
    """A selection by token was read as one by head. As many tokens as heads, so that no shape gives it away."""
    cache = paged(ReferenceBackend, case(kv_heads=4, index_heads=4), [64], seed=3)
    cache.step([(0, 60)])
    cache.backend.begin(cache.make_step([(0, 4)]))
    inputs = cache.inputs(4, [(0, 4)])
    cache.backend.forward(4, inputs)
    ids = cache.backend.select(4, inputs).tolist()
    want = [[cache.selected(4, 0, 60 + token)[2 * head] for head in range(4)] for token in range(4)]
    assert ids == want
    assert [list(each) for each in zip(*want)] != want


def test_s4_reuse_of_300_of_512_tokens(tiny, expecting, tokens, machine):
    """A hit that ended inside a block of 128 lost index keys: loops of repeated text."""
    model = tiny("one block, none forced", block=128)
    base = tokens(512)
    branch = np.concatenate([base[:300], tokens(240, seed=1)])
    expected = expecting(model, base, branch)
    with machine(model, page=128, pages=16) as cache:
        first = cache.manager.open(base)
        cache.finish(first, expected, chunk=200)
        cache.manager.close(first)
        sequence = cache.manager.open(branch)
        assert sequence.reused == 300
        cache.compute([(sequence, 230)], expected)
        cache.finish(sequence, expected, chunk=1)


@pytest.mark.parametrize("cuts", [(10, 8), (10, 1, 7), (1,) * 18])
def test_any_cut_of_a_prompt_selects_the_same(cuts, paged, case):
    """Queries 10 to 17 see index keys of both parts; block 2 is half old, half new."""
    selected = []
    for counts in ((18,), cuts):
        cache, ids = paged(ReferenceBackend, case(), [18], seed=4), []
        for count in counts:
            cache.step([(0, count)])
            cache.computed[0] -= count
            cache.backend.begin(cache.make_step([(0, count)]))
            ids.append(cache.backend.select(4, cache.inputs(4, [(0, count)])))
            cache.computed[0] += count
        selected.append(torch.cat(ids))
    assert torch.equal(*selected) and selected[0].amax() == 4


@pytest.mark.parametrize("total", [300, 257, 128])
def test_s5_what_lies_behind_the_end_is_never_read(total, paged, case):
    """The tail of a partial block was read. Here it is NaN."""
    sizes = case(kv_heads=1, index_heads=1, query_heads=2, page=64, selection=Selection(128, 1, 0))
    cache = paged(ReferenceBackend, sizes, [total], seed=total)
    cache.step([(0, total - 3)])
    for _ in range(3):
        cache.step([(0, 1)])
    if total % 64:
        last = int(cache.table[cache.slots[0]].max(where=np.arange(-(-total // 64)) == total // 64, initial=0))
        view = cache.memory.view(4, "index_k", (64, 16), torch.float32)
        assert bool(view[last, total % 64 :].isnan().all()) and not bool(view[last, : total % 64].isnan().any())


@pytest.mark.parametrize("page", [1, 2, 4])
def test_s6_pages_are_no_sparse_blocks(page, paged, case):
    """With pages of one token, the best 16 tokens were taken instead of the best 16 blocks."""
    whole, cut = (paged(ReferenceBackend, case(page=each), [50], seed=6) for each in (4, page))
    for count in (45, 1, 4):
        for one, other in zip(whole.step([(0, count)]), cut.step([(0, count)])):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduce", ["per_index_head", "union", "max"])
def test_s7_ids_are_ascending_and_distinct(reduce, paged, case):
    """An unsorted list masked another block than the partial last one."""
    cache = paged(ReferenceBackend, case(kv_heads=1, selection=Selection(4, 3, 1, 0, reduce)), [62], seed=7)
    cache.step([(0, 62)])
    cache.computed[0] = 0
    cache.backend.begin(cache.make_step([(0, 62)]))
    ids = cache.backend.select(4, cache.inputs(4, [(0, 62)]))
    assert ids.dtype == torch.int32
    assert ids.shape == (62, *{"per_index_head": (2, 3), "union": (1, 6), "max": (1, 3)}[reduce])
    for listed in ids.flatten(0, 1).tolist():
        kept = [block for block in listed if block >= 0]
        assert listed == sorted(set(kept)) + [-1] * (len(listed) - len(kept))
    # The own block is forced, and comes last.
    own = torch.arange(62) // 4
    assert torch.equal(ids.amax(-1), own[:, None].expand(-1, ids.shape[1]).int())


def test_s8_any_spelling_gives_the_same_bytes(paged, case, tiny, machine):
    """8-bit keys under another name took the branch of 16 bits, or were read as integers."""
    views = []
    for name in ("fp8", "fp8_e4m3", "float8_e4m3fn"):
        with machine(tiny(), index_dtype=name) as cache:
            views.append(cache.backend._rows[2].index_key)
            assert cache.adapter.needs["minimax_m3"].features == {"fp8_index"}
    assert {(view.dtype, view.shape, view.stride()) for view in views} == {
        (torch.float8_e4m3fn, views[0].shape, views[0].stride())
    }


def test_s9_a_range_in_the_middle_cannot_be_removed(tiny, expecting, tokens, machine):
    """Without the middle, index keys stood at other positions than their blocks. A sequence loses its end only, and a
    prompt without the middle reuses what is before it."""
    model, base = tiny(), tokens(60)
    without = np.concatenate([base[:20], base[40:], tokens(25, seed=2)])
    expected = expecting(model, base, without)
    with machine(model) as cache:
        sequence = cache.manager.open(base)
        cache.finish(sequence, expected)
        for length in (0, 61):
            with pytest.raises(RequestError):
                cache.manager.truncate(sequence, length)
        assert sequence.computed == 60
        cache.manager.close(sequence)
        shorter = cache.manager.open(without)
        assert shorter.reused < 24
        cache.finish(shorter, expected)
        cache.manager.close(shorter)


def test_s10_rows_are_written_into_the_arena_and_tables_keep_their_addresses(paged, case):
    """A reshape copied, and writes were lost; tables at new addresses broke the replay of captured graphs."""
    cache = paged(ReferenceBackend, case(), [40, 30, 9], seed=10)
    arena = cache.memory.bytes
    for layer in (4, 7):
        rows = cache.backend._rows[layer]
        for view in (rows.key, rows.value, rows.index_key):
            assert view.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()
    batch = cache.backend._batch
    cache.step([(0, 30), (1, 25), (2, 5)])
    captured = {name: getattr(batch, name) for name in ("pages", "rows", "positions", "write_pages", "write_slots")}
    addresses = {name: (each.data_ptr(), each.stride()) for name, each in captured.items()}
    before = {name: each.clone() for name, each in captured.items()}
    cache.step([(2, 1), (1, 1)])
    cache.step([(1, 3), (0, 2)])
    for name, old in captured.items():
        now = getattr(batch, name)
        assert (now.data_ptr(), now.stride()) == addresses[name]
        # Who kept the old tensors sees the new step's tables.
        same = tuple(slice(size) for size in now.shape)
        assert torch.equal(old[same], now) and not torch.equal(before[name][same], now)


def test_s11_host_memory_has_what_the_device_had(tiny, expecting, tokens, tiers):
    """Keys went to the host within a step and index keys did not. Pages move between steps, whole."""
    model, prompt = tiny(), tokens(40)
    expected = expecting(model, prompt)
    with tiers(model) as tiered:
        cache = tiered.cache
        sequence = cache.manager.open(prompt)
        cache.finish(sequence, expected)
        cache.manager.close(sequence)
        tiered.settle()
        size = cache.layout.groups[0].content_bytes
        pages = [memory.pages(0)[:, :size] for memory in (cache.memory, tiered.host)]
        device, host = ({bytes(page.numpy()) for page in each} for each in pages)
        copied = host - {bytes(size)}
        assert len(copied) == 10 and copied <= device
        layers = {part.layer_id: part for part in cache.layout.groups[0].parts if part.stream.name == "index_k"}
        assert sorted(layers) == [2, 3, 4]
        for part in layers.values():
            for page in copied:
                rows = np.frombuffer(page[part.offset : part.offset + part.byte_count], np.float32)
                assert np.isfinite(rows).all() and rows.any()
