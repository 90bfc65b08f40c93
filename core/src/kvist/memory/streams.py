"""Moving bytes between a CUDA device, pinned host memory and a disk. Needs torch; importable without CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from kvist.errors import TierError
from kvist.memory.device import DeviceMemory
from kvist.memory.disk import DiskStore
from kvist.memory.mover import Copy, CpuMover, Tier, block_pages, fetched, page_runs


class StreamMover:
    """A mover with a CUDA stream of its own.

    A copy waits on the device for whatever the submitting thread had put on its current stream, so it overtakes neither
    the kernels that write its source nor those that still read its target. ``move`` returns when the device is done, so
    whatever is launched after that may use the target.

    Pins the host memory, and pages of one block as a stage between device and disk.
    """

    def __init__(self, device: DeviceMemory, host: DeviceMemory | None = None, disk: DiskStore | None = None) -> None:
        """Raises TierError when ``device`` is not a CUDA device or the host memory cannot be pinned."""
        if device.device.type != "cuda":
            raise TierError(
                f"a stream copies to and from CUDA devices, and this memory is on {device.device}",
                hint="use kvist.memory.mover.CpuMover",
            )
        self._device = device
        self._disk = disk
        self._stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]  # torch has no types here
        self._cpu = CpuMover({} if host is None else {Tier.HOST: host}, disk)
        groups = device.layout.groups
        self._pages = {Tier.DEVICE: [device.pages(group.index) for group in groups]}
        if host is not None:
            self._pages[Tier.HOST] = [host.pages(group.index) for group in groups]
        # For each group the place of its part of one block.
        ends = list(accumulate((group.content_bytes for group in groups), initial=0))
        stage = _pinned(ends[-1]) if disk is not None else None
        self._stage = [] if stage is None else [stage[begin:end] for begin, end in pairwise(ends)]
        self._host = None if host is None else host.bytes
        if self._host is not None:
            _pin(self._host)

    def mark(self) -> object:
        return torch.cuda.current_stream(self._device.device).record_event()

    def move(self, copy: Copy, mark: object) -> Sequence[int]:
        if Tier.DEVICE not in (copy.source, copy.target):
            return self._cpu.move(copy, None)
        assert isinstance(mark, torch.cuda.Event)
        # Inference mode: the memory may have been made in it.
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                if copy.source is Tier.DISK:
                    return self._load(copy)
                if copy.target is Tier.DISK:
                    return self._store(copy)
                sources, targets = self._pages[copy.source], self._pages[copy.target]
                for group, source, target, count in page_runs(copy):
                    arriving = targets[group][target : target + count]
                    arriving.copy_(sources[group][source : source + count], non_blocking=True)
                return ()
            finally:
                # Also when issuing one of the copies failed: those before it are on their way.
                self._drain()

    def close(self) -> None:
        self._drain()
        host, self._host = self._host, None
        if host is not None:
            _cuda_call("cudaHostUnregister", host.data_ptr())

    def _drain(self) -> None:
        # A blocking event puts the thread to sleep; Stream.synchronize would keep a core busy.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types here
        self._stream.record_event(event)
        event.synchronize()

    def _store(self, copy: Copy) -> list[int]:
        assert self._disk is not None
        failed = []
        for position, key in enumerate(copy.keys):
            parts: list[memoryview | None] = [None] * len(self._stage)
            for group, page in block_pages(copy.source_pages, position):
                stage = self._stage[group]
                stage.copy_(self._pages[Tier.DEVICE][group][page, : len(stage)], non_blocking=True)
                parts[group] = stage.numpy().data
            self._drain()
            if not self._disk.put(key, parts, copy.generation):
                failed.append(position)
        return failed

    def _load(self, copy: Copy) -> list[int]:
        assert self._disk is not None
        failed: list[int] = []
        for block in fetched(self._disk, copy, failed):
            # The stage is free once the block before has left it.
            self._drain()
            for group, page, part in block:
                stage = self._stage[group]
                stage.numpy()[:] = np.frombuffer(part, np.uint8)
                self._pages[Tier.DEVICE][group][page, : len(stage)].copy_(stage, non_blocking=True)
        return failed


def _pin(memory: torch.Tensor) -> None:
    """Pin memory that exists: what ``pin_memory=True`` allocates is rounded up to the next power of two."""
    try:
        _cuda_call("cudaHostRegister", memory.data_ptr(), memory.numel(), 0)
    except RuntimeError as cause:
        raise TierError(
            f"cannot pin the {memory.numel()} bytes of the host tier: {cause}",
            hint="make the host tier smaller, or raise the limit on locked memory",
        ) from cause


def _cuda_call(name: str, *arguments: int) -> None:
    """Raises RuntimeError when the call fails."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
    torch.cuda.check_error(getattr(runtime, name)(*arguments))


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)
