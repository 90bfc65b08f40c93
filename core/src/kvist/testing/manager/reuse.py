"""What is computed once is found again, by those who may have it, where it is; and nothing is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.layout import KEPT_ROLLBACK, Layout
from kvist.manager import Run
from kvist.spec import Scope
from kvist.step import NO_PAGE
from kvist.testing.engine import Engine
from kvist.testing.manager.author import ManagerAuthor, drops
from kvist.testing.values import tokens


class ReuseTests(ManagerAuthor):
    """Prompts that share prefixes, one after the other and side by side."""

    @pytest.mark.clause("CM-07")
    def test_rows_of_chunks_of_any_size(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            for number, chunk in enumerate((1, max(1, block - 1), block + 1, 1 << 30)):
                prompt = range(1000 * number, 1000 * number + 5 * block + 3)
                engine.turn(prompt, chunk=chunk, polite=number % 2 == 0)
                engine.turn(prompt, chunk=chunk, polite=number % 2 == 0)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-07")
    def test_rows_while_sequences_generate_side_by_side(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            everyone = [engine.open(range(100 * n, 100 * n + 1 + n * block)) for n in range(3)]
            engine.prefill(*everyone, chunk=block + 1)
            for _ in range(2 * block + 1):
                for sequence in everyone:
                    engine.learn(sequence)
                engine.run(*(Run(sequence, 1) for sequence in everyone))
            engine.close(*everyone)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-07")
    def test_prompts_that_part_inside_a_block(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            whole = range(3 * block)
            engine.turn(whole)
            for cut in range(1, 2 * block + 1):
                # Before and behind what was there first, in the order of tokens.
                for other in (1000 + 100 * cut, cut - 1):
                    engine.turn(range(cut), other, range(2000, 2000 + block))
            for cut in range(1, 2 * block + 1):
                engine.turn(range(cut), 1000 + 100 * cut, range(2000, 2000 + block), 3)
            engine.turn(whole)
            engine.drained()

        self.each(scenario, pages=200)

    @pytest.mark.clause("CM-08")
    def test_the_same_prompt_again(self) -> None:
        def scenario(engine: Engine) -> None:
            block, layout = engine.block, engine.manager.layout
            for number, length in enumerate((2 * block, 3 * block + 1, 4 * block - 1, 5 * block)):
                prompt = range(1000 * number, 1000 * number + length)
                engine.turn(prompt)
                again = engine.turn(prompt)
                least = (length - 1) // block * block
                if not layout.has_states and not layout.has_rings:
                    least = length - 1 - (length - 1) % layout.reuse_unit
                assert least <= again < length, f"{again} of {length} tokens are reused, and {least} could be"
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-08")
    def test_the_next_turn_of_a_conversation(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            engine.turn(range(3 * block))
            again = engine.turn(range(3 * block), range(500, 500 + block + 1))
            assert again == 3 * block, f"{again} of the {3 * block} tokens of the turn before are reused"
            # A turn whose end was generated token by token.
            sequence = engine.open(range(600, 600 + block + 1))
            engine.prefill(sequence)
            engine.decode(sequence, 2 * block - 1)
            text = sequence.tokens.tolist()
            engine.close(sequence)
            again = engine.turn(*text, range(800, 800 + block))
            assert again == 3 * block == len(text), f"{again} of the {3 * block} tokens of the turn before are reused"
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-08")
    def test_siblings_resume_where_they_part(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            common = range(3 * block)
            for number in range(2):
                engine.turn(common, range(100 * number + 100, 100 * number + 100 + 2 * block))
            third = engine.turn(common, range(300, 300 + 2 * block))
            assert third >= 3 * block, f"{third} of {3 * block} common tokens are reused by the third sibling"
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-08")
    def test_positions_that_the_caller_names(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            engine.turn(range(5 * block), restore_at=[2 * block])
            found = engine.probe(range(2 * block), 900, 901)
            assert found >= 2 * block, f"{found} tokens can be reused, and {2 * block} were asked for with restore_at"

        self.each(scenario)

    @pytest.mark.clause("CM-10")
    def test_pages_have_one_owner(self) -> None:
        def scenario(engine: Engine) -> None:
            block, layout = engine.block, engine.manager.layout
            everyone = [engine.open(range(100 * n, 100 * n + 2 * block + 1 + n)) for n in range(3)]
            engine.prefill(*everyone)
            for sequence in everyone:
                engine.learn(sequence)
            step = engine.run(*(Run(sequence, 1) for sequence in everyone))
            owners: dict[int, str] = {}
            named = [
                (group, page, f"the table of sequence {number}")
                for group in layout.groups
                for number, sequence in enumerate(everyone)
                for page in step.tables[group.index][sequence.slot].tolist()
                if page != NO_PAGE
            ]
            named += [
                (g, page, "the free pages") for g in layout.groups for page in engine.free_pages(g.index).tolist()
            ]
            slabs = layout.slab_bytes
            held = [each for each in named if each[2] != "the free pages"]
            for group, page, owner in held:
                begin = page * group.page_bytes
                assert page > 0 and begin >= slabs, f"{group.name}: {owner} names the reserved page {page}"
                assert begin + group.page_bytes <= layout.arena_bytes, f"{group.name}: page {page} is none"
                for byte in range(begin, begin + group.page_bytes, 256):
                    other = owners.setdefault(byte, f"{owner} ({group.name})")
                    assert other == f"{owner} ({group.name})", f"{group.name}: page {page} of {owner} is {other}'s too"
            for group, page, owner in named:
                if owner == "the free pages":
                    begin = page * group.page_bytes
                    taken = {owners.get(byte) for byte in range(begin, begin + group.page_bytes, 256)} - {None}
                    assert page > 0 and not taken, f"{group.name}: page {page} is free, and {taken} too"
            engine.close(*everyone)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-11")
    def test_nothing_is_lost(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            room = [group.available for group in manager.capacity().groups]
            for number in range(2):
                begin = 1000 * number
                parent = engine.open(range(begin, begin + 2 * block + 1))
                engine.prefill(parent)
                engine.decode(parent, block)
                engine.learn(parent, 0)
                child = engine.fork(parent)
                engine.decode(child, 2)
                engine.suspend(parent)
                engine.resume(parent)
                engine.truncate(parent, block + 2)
                engine.prefill(parent)
                engine.close(child, parent)
                engine.turn(range(begin, begin + 2 * block - 1), 7, 8, 9)
            engine.drained()
            now = [group.available for group in manager.capacity().groups]
            assert now == room, f"{now} pages can be had after everything was closed and cleared, {room} before"

        # So few pages that what one round loses the next one lacks.
        self.each(scenario, pages=12)

    @pytest.mark.clause("CM-12")
    def test_blocks_that_nobody_reads_are_given_up(self) -> None:
        def scenario(engine: Engine) -> None:
            block, layout = engine.block, engine.manager.layout
            sequence = engine.open(range(14 * block))
            while sequence.computed < sequence.known:
                step = engine.run(Run(sequence, min(block // 2 + 1, sequence.known - sequence.computed)))
                for group in filter(drops, layout.groups):
                    table = step.tables[group.index][sequence.slot, : -(-sequence.computed // block)]
                    wanted = np.ones(len(table), bool)
                    for low, high in group.retention.droppable(sequence.computed, KEPT_ROLLBACK, block):
                        wanted[low:high] = False
                    kept, gone = (
                        np.flatnonzero(~wanted & (table != NO_PAGE)),
                        np.flatnonzero(wanted & (table == NO_PAGE)),
                    )
                    assert not len(kept), (
                        f"{group.name}: at {sequence.computed} tokens blocks {kept.tolist()} are never read again, "
                        "and the sequence keeps them"
                    )
                    assert not len(gone), (
                        f"{group.name}: at {sequence.computed} tokens blocks {gone.tolist()} may be read after a token "
                        "is taken back, and the sequence has given them up"
                    )
            engine.close(sequence)
            engine.drained()

        self.each(scenario, only=lambda layout: any(map(drops, layout.groups)), unless="no mix drops blocks")

    @pytest.mark.clause("CM-12")
    def test_a_long_sequence_fits_where_all_groups_give_up(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            # Twice what the arena has pages for.
            length = 2 * engine.manager.layout.slab_count * block
            sequence = engine.open(range(3))
            engine.prefill(sequence)
            engine.decode(sequence, length)
            engine.close(sequence)
            engine.drained()

        def gives_up(layout: Layout) -> bool:
            return all(map(drops, layout.groups))

        self.each(scenario, pages=8, only=gives_up, unless="no mix consists of groups that drop blocks")

    @pytest.mark.clause("CM-13")
    def test_scopes_never_share(self) -> None:
        scopes = (Scope(), Scope(adapter="a"), Scope(salt="a"), Scope(media=((0, "a"),)), Scope(media=((1, "a"),)))

        def scenario(engine: Engine) -> None:
            block = engine.block
            prompt = range(3 * block + 1)
            for number, scope in enumerate(scopes):
                for other in scopes[number:]:
                    found = engine.probe(prompt, scope=other)
                    assert found == 0, f"{other} finds {found} tokens, and nobody in it has computed any"
                reused = engine.turn(prompt, scope=scope)
                assert reused == 0, f"{scope} reuses {reused} tokens of another scope"
            for scope in scopes:
                assert engine.turn(prompt, scope=scope) > 0, f"{scope} does not find what it has computed"
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-14")
    def test_who_opts_out_takes_and_gives_nothing(self) -> None:
        def scenario(engine: Engine) -> None:
            block = engine.block
            known, private = range(3 * block), range(500, 500 + 3 * block)
            engine.turn(known)
            assert engine.turn(known, reuse=False) == 0, "reuse=False reuses"
            engine.turn(private, reuse=False)
            found = engine.probe(private, 1)
            assert found == 0, f"{found} tokens of a sequence that was opened with reuse=False are found"
            engine.drained()

        self.each(scenario)


class StandstillTests(ManagerAuthor):
    """Calls that change nothing."""

    @pytest.mark.clause("CM-09")
    def test_to_look_changes_nothing(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            prompt = range(3 * block + 1)
            engine.turn(prompt)
            engine.turn(range(700, 700 + block))
            before = manager.stats()
            expected = manager.probe(tokens(prompt))
            for _ in range(3):
                manager.probe(tokens(range(700, 700 + block), 3))
                manager.capacity()
            assert manager.stats() == before, "probe() or capacity() has changed the manager's numbers"
            sequence = engine.open(prompt)
            assert sequence.reused == expected, f"probe() says {expected}, open() reuses {sequence.reused}"
            before = manager.stats()
            free = [engine.free_pages(group.index).tolist() for group in manager.layout.groups]
            for _ in range(3):
                manager.plan([Run(sequence, 1)])
            assert manager.stats() == before, "plan() has changed the manager's numbers"
            now = [engine.free_pages(group.index).tolist() for group in manager.layout.groups]
            assert list(map(sorted, now)) == list(map(sorted, free)), "plan() has taken or freed pages"
            engine.prefill(sequence)
            engine.close(sequence)
            engine.drained()

        self.each(scenario)

    @pytest.mark.clause("CM-09")
    def test_planning_evicts_nothing(self) -> None:
        def scenario(engine: Engine) -> None:
            manager, block = engine.manager, engine.block
            for number in range(5):
                engine.turn(range(1000 * number, 1000 * number + 3 * block))
            sequence = engine.open(range(90_000, 90_000 + 3 * block))
            before = manager.stats()
            plan = manager.plan([Run(sequence, 3 * block)])
            assert plan.fits, "everything else is cached only, and a plan does not fit"
            assert manager.stats() == before, "plan() evicts; only commit() may"
            engine.prefill(sequence)
            engine.close(sequence)
            engine.drained()

        self.each(scenario, pages=8)
