"""Clauses about which bytes go where: requests between ranks of every kind, every byte of the receivers looked at."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvist.spec import (
    CacheSpec,
    Heads,
    History,
    Layer,
    Replicated,
    Retention,
    RowFormat,
    Sections,
    State,
    Stream,
    Window,
)
from kvist.testing.transfer.author import TransportAuthor
from kvist.testing.transfer.values import Model
from kvist.testing.transfer.world import LENGTH, Process, World
from kvist.transfer.outcome import DONE
from kvist.transfer.pagetable import Placement
from kvist.transfer.switchboard import Session


def attention(layer: int, heads: int, size: int = 6, retention: Retention | None = None) -> Layer:
    """Keys and values."""
    row = RowFormat((heads, size), "int16")
    return Layer(layer, [Stream(name, row, retention or History(), sharding=Heads(heads)) for name in ("k", "v")])


def hybrid(heads: int, block_tokens: int = 8) -> CacheSpec:
    """Attention, a window, an index with a row for four tokens, and a state of sections."""
    return CacheSpec(
        [
            attention(0, heads),
            attention(1, heads, size=4, retention=Window(12)),
            Layer(2, [Stream("index_k", RowFormat((10,), "int16"), History(), tokens_per_row=4)]),
            Layer(
                3,
                [
                    Stream(
                        "conv",
                        RowFormat((2 * heads + 8, 3), "int16"),
                        State(),
                        sharding=Sections((heads, heads, 8)),
                    ),
                    Stream("ssm", RowFormat((heads, 5), "int16"), State(), sharding=Heads(heads)),
                ],
            ),
        ],
        block_tokens,
        "model",
    )


WINDOW = 1


class LayoutTests(TransportAuthor):
    """Part of :class:`kvist.testing.transfer.TransceiverTests`."""

    def _move(
        self,
        world: World,
        model: Model,
        senders: Sequence[dict[str, Any]],
        receivers: Sequence[dict[str, Any]],
        request: str = "r",
    ) -> tuple[list[Process], list[Process], list[int]]:
        """Everything from all to all. Returns both sides, and bytes by receiver."""
        sending = [world.process(f"{request} s{i}", model=model, **each) for i, each in enumerate(senders)]
        receiving = [world.process(f"{request} r{i}", model=model, **each) for i, each in enumerate(receivers)]
        return sending, receiving, self._run(world, sending, receiving, request)

    def _run(self, world: World, sending: list[Process], receiving: list[Process], request: str = "r") -> list[int]:
        outgoing = []
        for process in sending:
            process.rank.fill()
            outgoing.append(process.offer(request, receivers=len(receiving)))
        incoming = [process.ask(*sending, request=request) for process in receiving]
        sessions: list[Session] = [*outgoing, *incoming]
        world.run(lambda: all(each.outcome is not None for each in sessions))
        assert {each.outcome for each in sessions} == {DONE}
        for process in receiving:
            process.verify()
        assert sum(each.byte_count for each in outgoing) == sum(each.byte_count for each in incoming)
        return [each.byte_count for each in incoming]

    def _tensor(self, heads: int, send: int, receive: int) -> None:
        model = Model(hybrid(heads), length=LENGTH)
        with self.world() as world:
            self._move(world, model, ranks(send), ranks(receive))

    @pytest.mark.clause("TR-26")
    @pytest.mark.parametrize(("heads", "send", "receive"), [(2, 1, 4), (2, 4, 1), (3, 2, 1), (8, 2, 4), (1, 1, 2)])
    def test_some_tensor_parallel_sizes(self, heads: int, send: int, receive: int) -> None:
        self._tensor(heads, send, receive)

    @pytest.mark.clause("TR-26")
    @pytest.mark.slow
    @pytest.mark.parametrize("heads", [1, 2, 3, 8])
    def test_every_pair_of_tensor_parallel_sizes(self, heads: int) -> None:
        for send, receive in itertools.product((1, 2, 4), (1, 2, 4)):
            self._tensor(heads, send, receive)

    @pytest.mark.clause("TR-27")
    def test_uneven_pipeline_stages(self) -> None:
        model = Model(hybrid(2), length=LENGTH)
        with self.world() as world:
            # Ranks in no order: stages and tensor parallel ranks are told by what they keep.
            senders = [{**each, "layers": layers} for layers in ([3, 0], [1, 2]) for each in reversed(ranks(2))]
            receivers = [{"layers": layers} for layers in ([0, 1, 2], [3])]
            self._move(world, model, senders, receivers)

    @pytest.mark.clause("TR-28")
    def test_replicas_take_turns(self) -> None:
        latent = Layer(0, [Stream("kv", RowFormat((16,), "int16"), History(), sharding=Replicated())])
        model = Model(CacheSpec([latent], 8, "model"), length=LENGTH)
        chosen = set()
        for number in range(6):
            with self.world() as world:
                sending, _, received = self._move(world, model, ranks(4), ranks(2), f"r{number}")
                writers = [process.name[-2:] for process in sending if process.stats.sent_bytes]
                assert 1 <= len(writers) <= 2, "somebody wrote what another one had written"
                assert received[0] == received[1] == 6 * 8 * 32
                chosen.update(writers)
        assert len(chosen) > 2, "always the same rank writes"

    @pytest.mark.clause("TR-29")
    @pytest.mark.parametrize("length", [7, 12, 13, 43])
    def test_windows(self, length: int) -> None:
        model = Model(hybrid(2), length=length)
        with self.world() as world:
            sender, receiver = world.process("s", model=model), world.process("r", model=model)
            gone = (length - 12) // 8 if length > 12 else 0
            sender.rank.drop(WINDOW, range(max(0, gone - 1)))
            receiver.rank.drop(WINDOW, range(gone))
            self._run(world, [sender], [receiver])

    @pytest.mark.clause("TR-29")
    def test_chunks_go_ahead_and_windows_come_last(self) -> None:
        with self.world() as world:
            sender, receiver = world.pair()
            outgoing, incoming = sender.transceiver.send("r"), receiver.ask(sender)
            history, window = sender.rank.pages
            for begin, end in ((0, 16), (16, 24), (24, LENGTH)):
                sender.transceiver.add(outgoing, [history, None], begin, end, last=False)
                world.run(lambda: incoming.byte_count >= min(end, 40) * 96)  # noqa: B023
                assert incoming.outcome is None
            sender.transceiver.add(outgoing, [None, window], 0, LENGTH, last=True, payload=b"x")
            world.run(lambda: incoming.outcome is not None and outgoing.outcome is not None)
            assert incoming.outcome == DONE and incoming.payload == b"x"
            receiver.verify()

    @pytest.mark.clause("TR-30")
    def test_states_of_sections(self) -> None:
        model = Model(hybrid(4), length=LENGTH)
        for send, receive in ((1, 2), (4, 2)):
            with self.world() as world:
                # A stage without a state, too.
                receivers = [*({**each, "layers": [2, 3]} for each in ranks(receive)), {"layers": [0, 1]}]
                self._move(world, model, ranks(send), receivers)

    @pytest.mark.clause("TR-31")
    def test_layers_that_only_some_have(self) -> None:
        model = Model(hybrid(2), length=LENGTH)
        with self.world() as world:
            _, _, received = self._move(world, model, ranks(2), [{"layers": [2]}])
            # 6 blocks of 2 rows of 10 elements.
            assert received == [6 * 2 * 20]

    @pytest.mark.clause("TR-32")
    @pytest.mark.parametrize("cached", [[], [0], [0, 1, 2], range(6)], ids=["nothing", "one", "half", "all"])
    def test_what_the_receiver_has_is_not_sent(self, cached: Sequence[int]) -> None:
        model = Model(hybrid(2), length=LENGTH)
        with self.world() as world:
            sender, receiver = world.process("s", model=model), world.process("r", model=model)
            # Of what is cached the sender may have nothing any more.
            for process in (sender, receiver):
                for group, retention in enumerate(process.rank.table.groups):
                    if "History" in retention.retention:
                        process.rank.drop(group, cached)
            self._run(world, [sender], [receiver])

    @pytest.mark.clause("TR-33")
    @pytest.mark.parametrize("length", [39, 40, 41])
    def test_lengths_around_a_block(self, length: int) -> None:
        model = Model(hybrid(2), length=length)
        with self.world() as world:
            sender, receiver = world.process("s", model=model), world.process("r", model=model)
            # The receiver has room for its next tokens; what lies there is not the sender's.
            spare = receiver.rank.pages[0].max() + 1
            pages = [np.append(receiver.rank.pages[0], np.int32(spare)), *receiver.rank.pages[1:]]
            sender.rank.fill(), sender.offer()
            incoming = receiver.transceiver.receive("r", pages, length, [sender.hello()])
            world.run(lambda: incoming.outcome is not None)
            assert incoming.outcome == DONE
            receiver.verify()

    @pytest.mark.clause("TR-33")
    def test_blocks_of_other_sizes(self) -> None:
        model = Model(hybrid(4), length=48)
        for send, receive in ((4, 16), (16, 4)):
            with self.world() as world:
                self._move(
                    world, model, [{"block_tokens": send}], [{**each, "block_tokens": receive} for each in ranks(2)]
                )

    @pytest.mark.clause("TR-34")
    def test_a_draft_model_on_one_side_only(self) -> None:
        draft = CacheSpec([attention(0, 1)], 8, "draft", domain="draft")
        model = Model(hybrid(2), draft, length=LENGTH)
        for send, receive in ((True, True), (True, False), (False, True)):
            with self.world() as world:
                sender = world.process("s", model=model, drafts=send)
                receiver = world.process("r", model=model, drafts=receive)
                if receive and not send:
                    receiver.rank.pages[-1][:] = -1
                self._run(world, [sender], [receiver])

    @pytest.mark.clause("TR-36")
    @pytest.mark.parametrize(("send", "receive"), [(1, 4), (4, 1), (2, 3)])
    def test_interleaved_blocks_of_context_parallel_ranks(self, send: int, receive: int) -> None:
        model = Model(hybrid(2), length=LENGTH)
        with self.world() as world:
            senders = [{"placement": Placement(0, 1, rank, send)} for rank in range(send)]
            receivers = [{"placement": Placement(0, 1, rank, receive)} for rank in range(receive)]
            _, _, received = self._move(world, model, senders, receivers)
            if (send, receive) == (1, 4):
                # 43 tokens are 6 blocks, and 4 ranks have 2, 2, 1 and 1 of them; each has the state.
                block, state = 8 * (2 * 2 * 12) + 2 * 20 + 8 * (2 * 2 * 8), (2 + 2 + 8) * 6 + 2 * 10
                assert received == [count * block + state for count in (2, 2, 1, 1)]


def ranks(count: int) -> list[dict[str, Any]]:
    """Tensor-parallel ranks."""
    return [{"placement": Placement(rank, count)} for rank in range(count)]
