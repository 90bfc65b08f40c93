"""The UCX transport between two processes of this machine, beside copying in one process and beside UCX's own test.

* ucx_over_memcpy: 64 MiB in one piece into memory that both processes have mapped, from ``write`` to ``Done``. The peer
  is numpy's copy of as many bytes in one process.
* ucx_over_perftest: the same beside ``ucx_perftest -t ucp_put_bw`` of the libucx wheel, with the same settings. Its
  number is an average over many puts of which two are under way at once; Kvist's are one at a time, each with a flush.

The copies of numpy take turns with Kvist's; ``ucx_perftest`` runs between two rounds of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import numpy as np
from records import Figure

from kvist.transfer.transport import Connected, Done, Fragments, TransportContext, host_bytes

FIGURES = ("transfer.ucx_over_memcpy", "transfer.ucx_over_perftest")
TARGETS = {FIGURES[0]: 0.6, FIGURES[1]: 0.9}
PEERS = {FIGURES[0]: "memcpy", FIGURES[1]: "ucx_perftest"}

SIZE_BYTES = 64 << 20
#: As the transport sets them where nobody says otherwise.
SETTINGS = {"UCX_TLS": "^cma", "UCX_MM_ERROR_HANDLING": "y", "UCX_KEEPALIVE_INTERVAL": "2s", "UCX_LOG_LEVEL": "fatal"}


def receiver(connection: Connection) -> None:
    """The other process: memory that may be written to, until the parent hangs up."""
    from kvist_transceiver_ucx.transport import UcxTransport

    transport = UcxTransport(TransportContext("receiver"))
    region = transport.allocate(SIZE_BYTES)
    connection.send(transport.hello())
    try:
        connection.recv()
        connection.send(bytes(host_bytes(region.address, SIZE_BYTES)[:: SIZE_BYTES // 64]))
        connection.recv()
    except EOFError:
        pass


class Ours:
    """A writer here, and the process that is written to."""

    def __init__(self) -> None:
        from kvist_transceiver_ucx.transport import UcxTransport

        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=receiver, args=(theirs,), daemon=True)
        self._process.start()
        self._transport = UcxTransport(TransportContext("sender"))
        region = self._transport.allocate(SIZE_BYTES)
        self.memory = host_bytes(region.address, SIZE_BYTES)
        self.memory[:] = np.random.default_rng(0).integers(0, 256, SIZE_BYTES, np.uint8)
        self._peer = self._transport.connect(self._connection.recv())
        while not any(isinstance(event, Connected) for event in self._transport.poll(10)):
            pass
        self._token = 0

    def write(self) -> float:
        """GB/s of one."""
        self._token += 1
        whole = Fragments(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([SIZE_BYTES]))
        begin = time.perf_counter()
        self._transport.write(self._peer, whole, 0, self._token)
        assert self._transport.poll(30) == [Done(self._token)]
        return SIZE_BYTES / (time.perf_counter() - begin) / 1e9

    def close(self) -> None:
        self._connection.send(None)
        assert self._connection.recv() == bytes(self.memory[:: SIZE_BYTES // 64]), "other bytes are there"
        self._connection.close()
        self._transport.disconnect(self._peer)
        self._transport.poll(5)
        self._transport.close()
        self._process.join(10)


def perftest(count: int) -> float:
    """GB/s that UCX's own test tells. Raises RuntimeError with the reason when it does not run."""
    found = importlib.util.find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("the libucx wheel is not installed")
    folder = Path(found.submodule_search_locations[0])
    program = folder / "bin" / "ucx_perftest"
    environment = {**os.environ, **SETTINGS, "LD_LIBRARY_PATH": str(folder / "lib")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([program, "-p", port], **options) as server:
        try:
            time.sleep(1.0)
            command = [program, "127.0.0.1", "-p", port, "-t", "ucp_put_bw", "-e", "-f"]
            command += ["-s", str(SIZE_BYTES), "-n", str(count), "-w", "2"]
            done = subprocess.run(command, timeout=50, check=False, **options)
        finally:
            server.kill()
    fields = (done.stdout.strip().splitlines() or [""])[-1].split()
    if done.returncode or len(fields) < 6:
        raise RuntimeError(f"ucx_perftest ended with exit code {done.returncode}: {done.stdout.strip()[-200:]}")
    # Iterations; median, average and overall latency; average and overall bandwidth in MiB/s; two rates.
    return float(fields[5]) * (1 << 20) / 1e9


def measure(options: argparse.Namespace) -> list[Figure]:
    runs = 4 if options.quick else 20
    target = np.empty(SIZE_BYTES, np.uint8)
    try:
        ours = Ours()
    except Exception as error:
        why = str(error).splitlines()[0]
        return [Figure(figure=name, value=None, unit="GB/s", note=f"UCX is missing: {why}") for name in FIGURES]
    written: list[float] = []
    copied: list[float] = []
    tested: list[float] = []
    note = ""
    for number in range(runs + 1):
        speed = ours.write()
        begin = time.perf_counter()
        np.copyto(target, ours.memory)
        copy = SIZE_BYTES / (time.perf_counter() - begin) / 1e9
        if number:  # The first one meets memory that nobody has touched.
            written.append(speed)
            copied.append(copy)
        if number % (runs // 2) == 0 and not note:
            try:
                tested.append(perftest(20))
            except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
                note = f"peer missing: {error}"
    ours.close()
    return [_figure(FIGURES[0], written, copied, ""), _figure(FIGURES[1], written, tested, note)]


def _figure(name: str, ours: list[float], theirs: list[float], note: str) -> Figure:
    """More is better; the ratio of medians, because the two do not take turns one by one."""
    value, peer = statistics.median(ours), statistics.median(theirs) if theirs else None
    return Figure(
        figure=name,
        value=value,
        unit="GB/s",
        peer=PEERS[name],
        peer_value=peer,
        ratio=None if peer is None else value / peer,
        runs=len(ours),
        target=TARGETS[name],
        note=note,
    )


if __name__ == "__main__":
    sys.exit(harness.run(__file__, __doc__, FIGURES, measure))
