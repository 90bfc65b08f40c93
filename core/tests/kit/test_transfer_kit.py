"""The suites for transports pass those that are built in, and name the clause of what is wrong with others."""

from __future__ import annotations

import pytest
from kit.mutants.base import Mutant
from kit.mutants.transceivers import MUTANTS, LocalAuthor

from kvist.testing.suites import run
from kvist.testing.transfer import TransceiverTests, TransportTests


class Tcp:
    factory = "kvist.transfer.tcp:TcpTransport"


class Shm:
    factory = "kvist.transfer.shm:ShmTransport"


class TestLocal(LocalAuthor, TransportTests):
    pass


class TestTcp(Tcp, TransportTests):
    pass


class TestShm(Shm, TransportTests):
    pass


class TestLocalTransceiver(LocalAuthor, TransceiverTests):
    pass


class TestTcpTransceiver(Tcp, TransceiverTests):
    pass


class TestShmTransceiver(Shm, TransceiverTests):
    pass


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_clauses_test_finds_it(mutant: Mutant, monkeypatch) -> None:
    # What does not happen over the local transport never will.
    monkeypatch.setattr("kvist.testing.transfer.author.LONG_S", 0.3)
    monkeypatch.setattr("kvist.testing.transfer.world.LONG_S", 0.3)
    with mutant.make() as suite:
        failures = run(suite, mutant.clause, first=True)
    assert failures, f"{mutant.name}: no test of {mutant.clause} failed"
    assert mutant.clause in str(failures[0])
