"""The records and their lines: JSON, one object per line, told apart by ``kind``. Fields that are 0 are left out.

Everything is counted since the record before, so that sums over all step records are the manager's own totals. Pages
and bytes named as being somewhere are those at the time of the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kvist.errors import KvistError

#: The content type of lines of records.
MEDIA_TYPE = "application/x-ndjson"

#: Where a request's time goes. queue: it waits to run, or to run again. transfer: its cache is on its way from another
#: process or a lower tier. prefill: its tokens are computed. decode: it generates.
Phase = Literal["queue", "transfer", "prefill", "decode"]


class RecordError(KvistError):
    """Records that cannot be read."""


class Group(msgspec.Struct, frozen=True):
    """A group in one tier. capacity: pages if it had the whole tier, 0 where the tier's budget is in bytes."""

    name: str
    page_bytes: int
    capacity: int


class Tier(msgspec.Struct, frozen=True):
    """A tier, ``device``, ``host`` or ``disk``, with its groups."""

    name: str
    capacity_bytes: int
    groups: tuple[Group, ...]


class Begin(msgspec.Struct, frozen=True, tag_field="kind", tag="begin", omit_defaults=True):
    """What the records after it are about; the first line of a run, and of every answer of a server.

    began: seconds since 1970. time_unit: of the times in all records, ``s``, or ``steps`` where no model ran.
    tiers: the device first; step records name neither tiers nor groups, but have them in this order.
    dropped: of an answer, records that were asked for and are gone.
    """

    source: str
    began: float
    time_unit: Literal["s", "steps"]
    block_tokens: int
    tiers: tuple[Tier, ...]
    dropped: int = 0


class DeviceGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group on the device; see :class:`kvist.stats.GroupStats`. new: pages that steps took."""

    free: int = 0
    cached: int = 0
    held: int = 0
    copying: int = 0
    new: int = 0
    evicted: int = 0
    moved: int = 0
    lost_tokens: int = 0


class LowerGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group below the device; see :class:`kvist.stats.TierGroupStats`. offloaded: pages that came from above.
    onboarded: pages that went up to the device. dropped: pages that made room."""

    used: int = 0
    copying: int = 0
    offloaded: int = 0
    onboarded: int = 0
    dropped: int = 0


class LowerTier(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tier below the device; see :class:`kvist.stats.TierStats`."""

    groups: tuple[LowerGroup, ...]
    used_bytes: int = 0
    reused_tokens: int = 0
    resumed_tokens: int = 0
    failed_blocks: int = 0


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step", omit_defaults=True):
    """What happened up to the end of a step since the record before; see :class:`kvist.stats.ManagerStats`.

    number: grows by one with every record of a run. time: when, since the run began. rows, tokens: of the step, 0 in
    the record of what came after the last one. running, waiting: requests, as the engine says.
    reused_tokens: of the prompts of ``requests``; those that no tier of ``lower`` claims were on the device.
    """

    number: int
    time: float
    groups: tuple[DeviceGroup, ...]
    lower: tuple[LowerTier, ...] = ()
    rows: int = 0
    tokens: int = 0
    running: int = 0
    waiting: int = 0
    open_sequences: int = 0
    extents: int = 0
    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    partial_reuses: int = 0
    received_tokens: int = 0
    handed_tokens: int = 0
    computed_tokens: int = 0
    suspends: int = 0
    resumes: int = 0
    resumed_tokens: int = 0
    recomputed_tokens: int = 0
    forks: int = 0
    forked_tokens: int = 0

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that had to be computed here."""
        return self.prompt_tokens - self.reused_tokens - self.received_tokens


class RequestRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="request", omit_defaults=True):
    """A request that has ended at ``time``.

    request: the engine's name for it. outcome: why it ended, as the engine says. queue, transfer, prefill, decode: how
    long it was in each phase, in all. pauses: how often it went back into the queue.
    """

    number: int
    time: float
    request: str
    outcome: str
    queue: float = 0.0
    transfer: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    pauses: int = 0


class BranchRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """See :class:`kvist.prefix.branches.Branch`."""

    name: str
    parent: int
    scope: str
    start: int = 0
    own_tokens: int = 0
    tokens: int = 0
    extents: int = 0
    children: int = 0
    held: bool = False
    hits: int = 0
    hit_tokens: int = 0


class BranchesRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="branches", omit_defaults=True):
    """The largest branches of the prefix tree at ``time``."""

    number: int
    time: float
    branches: tuple[BranchRecord, ...] = ()


Record = StepRecord | RequestRecord | BranchesRecord
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Begin | StepRecord | RequestRecord | BranchesRecord)


def encoded(record: Begin | Record) -> bytes:
    """One line, with its end."""
    return _encoder.encode(record) + b"\n"


def decoded(lines: Iterable[bytes], where: str) -> Iterator[Begin | Record]:
    """The records of ``lines``. where: for errors. Raises RecordError for a line that is none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(
                f"{where}, line {number}: not a record: {error}",
                hint="give what `kvist replay --record` or a server's /v1/iteration_stats has written",
            ) from error


def read_run(path: Path) -> tuple[Begin, list[Record]]:
    """The last run in a file. Raises RecordError for a file that cannot be read or has none."""
    begin: Begin | None = None
    records: list[Record] = []
    try:
        with path.open("rb") as lines:
            for record in decoded(lines, str(path)):
                if isinstance(record, Begin):
                    begin, records = record, []
                else:
                    records.append(record)
    except OSError as error:
        raise RecordError(
            f"cannot read records {path}: {error.strerror or error}",
            hint="give a file that `kvist replay --record` or a server has written",
        ) from error
    if begin is None:
        raise RecordError(
            f"{path} has no line with kind 'begin'", hint="give the whole file; its first line says what the rest means"
        )
    return begin, records
