"""Can two page tables exchange bytes, and do some of them together have all that one needs? Pure functions.

Both sides ask, before a byte moves: what is neither equal nor known to be convertible is refused with both values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvist.transfer.pagetable import GroupTable, PageTable, PartTable


def differences(sender: PageTable, receiver: PageTable) -> list[str]:
    """Why ``sender`` cannot give to ``receiver``, in words; empty if it can."""
    if sender.version != receiver.version:
        return [_both("wire version", sender.version, receiver.version)]
    found = [
        _both(f"fingerprint of the {domain} model", sender.fingerprints[domain], receiver.fingerprints[domain])
        for domain in sender.fingerprints.keys() & receiver.fingerprints.keys()
        if sender.fingerprints[domain] != receiver.fingerprints[domain]
    ]
    if not sender.fingerprints.keys() & receiver.fingerprints.keys():
        found.append(_both("domains", sorted(sender.fingerprints), sorted(receiver.fingerprints)))
    if sender.tag != receiver.tag:
        found.append(_both("page layout", sender.tag, receiver.tag))
    blocks = sender.block_tokens, receiver.block_tokens
    if max(blocks) % min(blocks):
        found.append(_both("block tokens, of which one must divide the other", *blocks))
    for ours, theirs, part, other in shared_parts(sender, receiver):
        found += _part_differences(ours, theirs, part, other, blocks[0] != blocks[1])
    return found


def shared_parts(
    sender: PageTable, receiver: PageTable
) -> Iterator[tuple[GroupTable, GroupTable, PartTable, PartTable]]:
    """What both have of any layer, in the receiver's order: the sender's group, the receiver's, and their parts."""
    known = {part.key: (group, part) for group in sender.groups for part in group.parts}
    for group in receiver.groups:
        for part in group.parts:
            if part.key in known:
                theirs, other = known[part.key]
                yield theirs, group, other, part


def overlaps(sender: PageTable, receiver: PageTable) -> bool:
    """Has ``sender`` anything of what ``receiver`` keeps? Then it is one of the writers that the receiver waits for,
    also if another rank with the same bytes is to send them."""
    return any(_common_units(part, other) for _, _, part, other in shared_parts(sender, receiver))


def uncovered(receiver: PageTable, senders: Sequence[PageTable]) -> list[str]:
    """What ``receiver`` keeps and ``senders`` do not have together, in words. Domains that no sender knows, such as a
    draft model on one side only, are not asked for."""
    domains = {domain for sender in senders for domain in sender.fingerprints}
    context_count = max((sender.context_count for sender in senders), default=1)
    found = []
    for group in receiver.groups:
        for part in group.parts if group.domain in domains else ():
            for rank in range(1 if group.single else context_count):
                lacking = _units(part)
                for sender in senders:
                    if group.single or sender.context_rank == rank:
                        for other in (other for theirs in sender.groups for other in theirs.parts):
                            if other.key == part.key and other.sections == part.sections:
                                lacking &= ~_units(other)
                if lacking.any():
                    blocks = f" of blocks {rank}, {rank + context_count}, ..." if context_count > 1 else ""
                    count = f"{np.count_nonzero(lacking)} of {np.count_nonzero(_units(part))}"
                    found.append(f"{part.name}: nobody has {count} units{blocks}")
    return found


def _part_differences(
    group: GroupTable, theirs: GroupTable, part: PartTable, other: PartTable, regroups: bool
) -> Iterator[str]:
    name = part.name
    if (group.retention, group.single) != (theirs.retention, theirs.single):
        yield _both(f"{name}: retention", group.retention, theirs.retention)
        return
    for what, one, two in (
        ("dtype", part.dtype, other.dtype),
        ("tokens per row", part.tokens_per_row, other.tokens_per_row),
        ("sections of a row", part.sections, other.sections),
        ("bytes of a unit", part.unit_bytes, other.unit_bytes),
        ("order", _order(part), _order(other)),
    ):
        if one != two:
            yield _both(f"{name}: {what}", one, two)
            return
    regroups = regroups and not group.single
    if regroups and group.ring:
        yield f"{name}: rows of rings belong to their block, and the blocks differ"
    if not part.run_rows:
        if regroups or part.shards != other.shards:
            yield (
                f"{name}: its page layout does not say where rows and units lie, so blocks and tensor-parallel ranks "
                "must be the same on both sides"
            )
        elif part.byte_count != other.byte_count:
            yield _both(f"{name}: bytes in a page", part.byte_count, other.byte_count)
    elif not regroups and part.row_count != other.row_count:
        yield _both(f"{name}: rows in a page", part.row_count, other.row_count)
    elif regroups and min(part.row_count, other.row_count) % part.run_rows:
        yield f"{name}: {part.run_rows} rows belong together, and a block has {min(part.row_count, other.row_count)}"


def _order(part: PartTable) -> str:
    if not part.run_rows:
        return "unknown"
    return f"{'unit' if part.by_unit else 'row'} after {'unit' if part.by_unit else 'row'}, runs of {part.run_rows}"


def _units(part: PartTable) -> npt.NDArray[np.bool_]:
    """Per unit of the model's row, is it here?"""
    here = np.zeros(sum(part.sections), np.bool_)
    for begin, end, _ in part.intervals:
        here[begin:end] = True
    return here


def _common_units(part: PartTable, other: PartTable) -> bool:
    return any(
        begin < their_end and their_begin < end
        for begin, end, _ in part.intervals
        for their_begin, their_end, _ in other.intervals
    )


def _both(what: str, sender: object, receiver: object) -> str:
    return f"{what}: the sender has {sender}, the receiver {receiver}"
