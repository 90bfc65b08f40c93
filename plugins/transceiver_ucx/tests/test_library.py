"""Finding UCX, and who may talk to whom. Nothing here needs UCX."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvist.errors import TransferError
from kvist.transfer.transport import IncompatibleError
from kvist_transceiver_ucx import place, wire
from kvist_transceiver_ucx.library import VARIABLE, find, load, require_new_enough

HINT = "pip install 'kvist-transceiver-ucx[cu12]' (or [cu13]), or install the system's UCX"


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_the_order_of_places(tmp_path, monkeypatch, nothing_installed):
    assert find() == ("libucp.so.0", "the system")
    wheel = tmp_path / "libucx"
    (wheel / "lib").mkdir(parents=True)
    spec = SimpleNamespace(submodule_search_locations=[str(wheel)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "libucx" else None)
    assert find() == ("libucp.so.0", "the system"), "a wheel without the library"
    library = wheel / "lib" / "libucp.so.0"
    library.write_bytes(b"")
    assert find() == (str(library), "the libucx wheel")
    mine, given = tmp_path / "mine.so", tmp_path / "given.so"
    mine.write_bytes(b"")
    given.write_bytes(b"")
    monkeypatch.setenv(VARIABLE, str(mine))
    assert find() == (str(mine), VARIABLE)
    assert find(str(given)) == (str(given), "the argument library")


def test_a_named_library_that_is_not_there(monkeypatch):
    monkeypatch.setenv(VARIABLE, "/nowhere/libucp.so.0")
    with pytest.raises(TransferError) as error:
        load()
    assert str(error.value) == (
        "KVIST_UCX_LIBRARY names /nowhere/libucp.so.0, which is no file\nhint: give the path of a libucp.so.0"
    )


def test_no_ucx_at_all(monkeypatch, nothing_installed):
    monkeypatch.setattr("kvist_transceiver_ucx.library.NAME", "libucp-that-nobody-has.so.0")
    with pytest.raises(TransferError) as error:
        load()
    assert str(error.value) == (
        "there is no UCX: KVIST_UCX_LIBRARY is not set, no libucx wheel is installed, and the system has no "
        f"libucp-that-nobody-has.so.0\nhint: {HINT}"
    )


def test_something_else_than_a_library(tmp_path):
    wrong = tmp_path / "libucp.so.0"
    wrong.write_bytes(b"no library")
    with pytest.raises(TransferError) as error:
        load(str(wrong))
    assert error.value.message.startswith(f"the argument library gives {wrong}, which cannot be loaded: ")
    assert error.value.hint == HINT


def test_another_library_under_its_name():
    import msgspec._core

    other = msgspec._core.__file__
    with pytest.raises(TransferError) as error:
        load(other)
    assert error.value.message.startswith(f"{other} (from the argument library) is no libucp: ")


def test_old_versions_are_refused():
    require_new_enough((1, 13, 0), "a", "b")
    require_new_enough((2, 0, 0), "a", "b")
    with pytest.raises(TransferError) as error:
        require_new_enough((1, 12, 9), "/lib/libucp.so.0", "the system")
    assert str(error.value) == (
        f"UCX 1.12.9 at /lib/libucp.so.0 (from the system) is too old; 1.13 is the oldest that works\nhint: {HINT}"
    )


HERE = place.Place("machine", "pid:[1]", 7, 1)


def hello(**changes) -> wire.Hello:
    made = wire.Hello(1, "ucx", "i" * 32, "other", (1, 22, 0), HERE, True, b"address", ())
    return msgspec.structs.replace(made, **changes)


def check(told: wire.Hello, *, shares_memory: bool = True) -> str:
    try:
        wire.read_hello(wire.encode(told), (1, 22, 1), HERE, shares_memory=shares_memory)
    except IncompatibleError as error:
        return error.message
    return ""


def test_who_may_talk_to_whom():
    assert check(hello()) == ""
    assert check(hello(ucx=(1, 21, 0))) == "'other' uses UCX 1.21.0, we use UCX 1.22.1"
    assert check(hello(ucx=(2, 22, 0))) == "'other' uses UCX 2.22.0, we use UCX 1.22.1"
    assert check(hello(version=2)) == "'other' speaks version 2 of 'ucx', we speak version 1 of 'ucx'"
    assert check(hello(scheme="tcp")) == "'other' speaks version 1 of 'tcp', we speak version 1 of 'ucx'"
    container = msgspec.structs.replace(HERE, processes="pid:[2]")
    assert check(hello(place=container)) == (
        "'other' may share memory with us, but its processes cannot be seen from here: nobody could tell when its "
        "writes have ended"
    )
    assert (
        check(hello(place=container, shares_memory=False)) == check(hello(place=container), shares_memory=False) == ""
    )
    assert check(hello(place=msgspec.structs.replace(container, machine="another"))) == ""
    with pytest.raises(IncompatibleError) as error:
        wire.read_hello(b"nonsense", (1, 22, 0), HERE, shares_memory=True)
    assert error.value.message.startswith("this is no hello of a UCX transport: ")


def test_a_process_is_watched_until_it_ends():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        started = int(stat[stat.rindex(")") + 2 :].split()[19])
        there = msgspec.structs.replace(place.here(), pid=child.pid, started=started)
        descriptor = place.watch(there)
        assert descriptor is not None
        os.close(descriptor)
        assert place.watch(msgspec.structs.replace(there, started=started + 1)) is None, "its id was used again"
    finally:
        child.communicate(b"\n", timeout=10)
    assert place.watch(there) is None


def test_the_entry_module_loads_no_ucx():
    code = (
        "import sys, kvist_transceiver_ucx.plugin; print([n for n in ('cffi', 'numpy', 'torch') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
