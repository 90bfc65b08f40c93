"""A run with two groups and two tiers below the device, recorded by a clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist.iterations.recorder import Iterations
from kvist.manager import Run
from kvist.spec import History, Window
from kvist.testing.tier_values import Cache
from kvist.testing.values import tokens


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(path: Path, folder: Path, turns: int = 12) -> None:
    """Conversations of which some come back, on a device that is too small for all; more than an hour of them."""
    cache = Cache(History(), Window(6), device_pages=32, host_pages=60, folder=folder)
    manager, clock = cache.manager, Clock()
    with path.open("wb") as file:
        iterations = Iterations(manager, source='<a "test"> & more', clock=clock, file=file)
        for turn in range(turns):
            for chat in (turn % 4, 9):
                timer = iterations.request(f"{turn}-{chat}")
                clock.now += 20
                sequence = manager.open(tokens(range(1, 9), range(1000 * chat, 1000 * chat + 6 + 3 * turn)))
                if sequence.loadable > sequence.computed and manager.load(sequence):
                    timer.enter("transfer")
                    cache.copier.run()
                    manager.poll()
                    clock.now += 5
                reused = sequence.reused
                while sequence.computed < sequence.known:
                    timer.enter("prefill")
                    clock.now += 80
                    count = min(8, sequence.known - sequence.computed)
                    step = manager.plan([Run(sequence, count)]).commit()
                    cache.values.run(step, [sequence], {id(sequence): sequence.tokens})
                    manager.complete(step)
                    iterations.step(step, running=1, waiting=turn % 3)
                timer.enter("decode")
                for token in range(3):
                    sequence.extend([token])
                    clock.now += 7
                    step = manager.plan([Run(sequence, 1)]).commit()
                    cache.values.run(step, [sequence], {id(sequence): sequence.tokens})
                    manager.complete(step)
                    iterations.step(step, running=1)
                if turn == 5:
                    manager.suspend(sequence)
                    manager.resume(sequence)
                timer.finish("stop", prompt_tokens=sequence.prompt_length, reused_tokens=reused, generated_tokens=3)
                manager.close(sequence)
                cache.flush()
        iterations.close()


@pytest.fixture(scope="session")
def records(tmp_path_factory) -> Path:
    """The file."""
    folder = tmp_path_factory.mktemp("records")
    record(folder / "records.jsonl", folder / "disk")
    return folder / "records.jsonl"
