"""Transfers between two processes: speed beside a plain socket, the time to prepare one, and what survives kills.

* tcp_over_socket: 64 MiB in pages of 64 KiB, from anywhere to anywhere, through the tcp transport between two
  processes, from ``write`` to ``Done``. The peer is a plain socket between the same processes: ``sendall`` of one
  buffer, received into one buffer, answered by a byte.
* prepare_48k_ms: from two page tables and lists of pages to 49,152 runs of bytes, for a request of 2,048 blocks that
  goes from one rank to one of two, keys and values of 12 layers.
* kills_survived: two processes move requests of 0.7 MB, six at a time. At a random moment one of the two is killed, or
  stopped and goes on later, over tcp and shm, and over UCX with and without shared memory where there is one. It counts
  as survived when the other one has an outcome for every request within its deadline, no request is done with wrong
  bytes, no page is written after it could be used again, nothing is left, and it moves requests with the next partner.
* demo.disaggregated_identical: ``kvist demo --disaggregated``, a prefill and a decode process on a real model: 1 when
  the greedy tokens of every request are those of one process and both processes leave nothing behind.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import harness
import numpy as np
from records import Figure

from kvist.errors import TransferError
from kvist.layout import Layout
from kvist.spec import CacheSpec, Heads, History, Layer, RowFormat, Stream
from kvist.testing.transfer.remote import Remote
from kvist.transfer.mapping import Mapping
from kvist.transfer.pagetable import Placement, describe
from kvist.transfer.sharding import rank_spec
from kvist.transfer.tcp import TcpTransport
from kvist.transfer.transport import Connected, Done, Fragments, Message, TransportContext

FIGURES = (
    "transfer.tcp_over_socket",
    "transfer.prepare_48k_ms",
    "transfer.kills_survived",
    "demo.disaggregated_identical",
)

SIZE_BYTES = 64 << 20
PAGE_BYTES = 64 << 10
UCX = "kvist_transceiver_ucx.transport:UcxTransport"
#: What is tried to death, and in which environment.
RIVALS: tuple[tuple[str, dict[str, str]], ...] = (
    ("kvist.transfer.tcp:TcpTransport", {}),
    ("kvist.transfer.shm:ShmTransport", {}),
    (UCX, {"UCX_LOG_LEVEL": "fatal"}),
    (UCX, {"UCX_LOG_LEVEL": "fatal", "UCX_TLS": "tcp"}),
)


def receiver(connection: Connection) -> None:
    """The other process: a transport that may be written to, and a socket that reads."""
    memory = np.zeros(SIZE_BYTES, np.uint8)
    transport = TcpTransport(TransportContext("receiver"))
    region = transport.register(memory.ctypes.data, SIZE_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    connection.send((transport.hello(), listener.getsockname()))
    plain, _ = listener.accept()
    granted = False
    while not granted:
        for event in transport.poll(10):
            if isinstance(event, Connected):
                transport.grant(event.peer, 1, region, np.array([0]), np.array([SIZE_BYTES]))
                transport.message(event.peer, b"granted")
                granted = True
    view = memoryview(memory)
    while True:
        at = 0
        while at < SIZE_BYTES:
            count = plain.recv_into(view[at:])
            if not count:
                return
            at += count
        plain.sendall(b"\1")


def tcp_over_socket(runs: int) -> Figure:
    """GB/s of both, interleaved."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(theirs,), daemon=True)
    process.start()
    hello, address = ours.recv()
    memory = np.random.default_rng(0).integers(0, 256, SIZE_BYTES, np.uint8)
    transport = TcpTransport(TransportContext("sender"))
    transport.register(memory.ctypes.data, SIZE_BYTES)
    plain = socket.create_connection(address)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer = transport.connect(hello)
    while not any(isinstance(event, Message) for event in transport.poll(10)):
        pass
    rng, count = np.random.default_rng(1), SIZE_BYTES // PAGE_BYTES
    sources, destinations = (rng.permutation(count) * PAGE_BYTES for _ in range(2))
    fragments = Fragments(sources, destinations, np.full(count, PAGE_BYTES))
    speeds: tuple[list[float], list[float]] = ([], [])
    for number in range(runs + 1):
        begin = time.perf_counter()
        transport.write(peer, fragments, 1, number)
        assert transport.poll(30) == [Done(number)]
        between = time.perf_counter()
        plain.sendall(memory)
        assert plain.recv(1) == b"\1"
        end = time.perf_counter()
        if number:  # The first one meets memory that nobody has touched.
            speeds[0].append(SIZE_BYTES / (between - begin) / 1e9)
            speeds[1].append(SIZE_BYTES / (end - between) / 1e9)
    plain.close()
    transport.disconnect(peer)
    transport.poll(5)
    transport.close()
    process.join(10)
    return Figure(
        figure=FIGURES[0],
        value=statistics.median(speeds[0]),
        unit="GB/s",
        peer="plain socket",
        peer_value=statistics.median(speeds[1]),
        # More is better here.
        ratio=statistics.median(ours / theirs for ours, theirs in zip(*speeds, strict=True)),
        runs=runs,
        target=0.8,
    )


def prepare(runs: int) -> Figure:
    """ms for 49,152 fragments."""
    row = RowFormat((8, 128), "bfloat16")
    layers = [Layer(n, [Stream(name, row, History(), sharding=Heads(8)) for name in ("k", "v")]) for n in range(12)]
    spec = CacheSpec(layers, 1, "model")
    tables = []
    for placement in (Placement(), Placement(1, 2)):
        own = rank_spec(spec, placement.tensor_count)
        page_bytes = Layout.build(own, 1 << 30).groups[0].page_bytes
        tables.append(describe(Layout.build(own, 4096 * page_bytes), placement))
    rng = np.random.default_rng(0)
    pages = [[rng.permutation(np.arange(1, 4096, dtype=np.int32))[:2048]] for _ in range(2)]
    mapping = Mapping(*tables)
    times = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        made = mapping.fragments(*pages)
        times.append(1e3 * (time.perf_counter() - begin))
    assert len(made) == 2 * 12 * 2048
    return Figure(figure=FIGURES[1], value=statistics.median(times[1:]), unit="ms", runs=runs, at_most=5.0)


class Rivals:
    """A sender and a receiver that are replaced when they die."""

    def __init__(self, factory: str, environment: dict[str, str]) -> None:
        self.factory, self.number, self._environment = factory, 0, environment
        self.processes = {"sender": self._new("sender"), "receiver": self._new("receiver")}

    def _new(self, role: str) -> Remote:
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            return Remote(self.factory, role, fill=role == "sender")
        finally:
            os.environ.clear()
            os.environ.update(before)

    def round(self, rng: random.Random) -> str:
        """One kill or stop. Returns what went wrong; empty if the other one survived."""
        self.number += 1
        sender, receiver = self.processes["sender"], self.processes["receiver"]
        victim, action = rng.choice(["sender", "receiver"]), rng.choice(["kill", "stop"])
        survivor = "receiver" if victim == "sender" else "sender"
        dead, alive = self.processes[victim], self.processes[survivor]
        try:
            hello, prefix = sender.call("hello"), f"{self.number}."
            sender.call("offer_many", prefix, 1000)
            receiver.call("ask_many", prefix, [hello], 1000, 4.0)
            receiver.until("some_done", prefix, timeout_s=10)
            time.sleep(rng.uniform(0, 0.15))
            getattr(dead, action)()
            alive.call("start_no_more")
            if survivor == "sender":
                alive.call("give_up")
            alive.until("all_decided", timeout_s=8)
            if action == "kill":
                dead.__exit__()
                self.processes[victim] = self._new(victim)
            else:
                dead.go_on()
                dead.call("give_up")
                dead.until("all_ended", timeout_s=15)
            alive.until("all_ended", timeout_s=15)
            found = [*alive.call("leaks"), *self.processes[victim].call("leaks")]
            if not (alive.call("verify") and self.processes[victim].call("verify")):
                found.append("bytes were written where they do not belong")
            sender, receiver = self.processes["sender"], self.processes["receiver"]
            sender.call("offer", prefix + "next")
            receiver.call("ask", prefix + "next", sender.call("hello"), 5.0)
            receiver.until("all_ended", timeout_s=10)
            if receiver.call("outcome", prefix + "next") != "done":
                found.append("the survivor does not go on with others")
            return "; ".join(found)
        except (AssertionError, EOFError, OSError, KeyError) as error:
            self.close()
            self.processes = {"sender": self._new("sender"), "receiver": self._new("receiver")}
            return f"{victim}, {action}: {error!r}"

    def close(self) -> None:
        for each in self.processes.values():
            each.go_on()
            each.__exit__()


def kills(count: int) -> Figure:
    """Of so many."""
    rng, problems = random.Random(0), []
    rivals = [each for each in RIVALS if each[0] != UCX or has_ucx()]
    done = 0
    for factory, environment in rivals:
        both = Rivals(factory, environment)
        for number in range(-(-count // len(rivals))):
            done += 1
            if problem := both.round(rng):
                problems.append(problem)
                harness.progress(f"{factory} {environment} {number}: {problem}")
        both.close()
    share = 100 * (done - len(problems)) / done
    note = f"{done} kills and stops at random moments, {len(rivals)} ways to move"
    note += f"; the first problem: {problems[0]}" if problems else ""
    return Figure(figure=FIGURES[2], value=share, unit="%", runs=done, target=100.0, note=note)


def has_ucx() -> bool:
    """Is there a UCX to use?"""
    try:
        from kvist_transceiver_ucx.library import load

        load()
    except (ImportError, TransferError):
        return False
    return True


def disaggregated(quick: bool) -> Figure:
    """As a user would run it."""
    with tempfile.TemporaryDirectory(prefix="kvist-bench-") as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "kvist", "demo", "--disaggregated", "--json", str(path)]
        done = subprocess.run([*command, *(["--quick"] if quick else [])], capture_output=True, text=True)
        if not path.exists():
            why = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            return Figure(figure=FIGURES[3], value=None, unit="(1 = same)", target=1.0, note=why)
        found = json.loads(path.read_text(encoding="utf-8"))
    value = float(found["identical"] and not found["leaks"])
    note = f"{found['identical_requests']} of {found['requests']} requests over {found['transport']}"
    return Figure(figure=FIGURES[3], value=value, unit="(1 = same)", target=1.0, note=note)


PARTS = ("socket", "prepare", "kills", "disaggregated")


def measure(options: argparse.Namespace) -> list[Figure]:
    asked, figures = options.only or PARTS, []
    if "socket" in asked:
        figures.append(tcp_over_socket(3 if options.quick else 15))
    if "prepare" in asked:
        figures.append(prepare(5 if options.quick else 31))
    if "kills" in asked:
        figures.append(kills(8 if options.quick else 200))
    if "disaggregated" in asked:
        figures.append(disaggregated(options.quick))
    return figures


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure, parts=PARTS))
