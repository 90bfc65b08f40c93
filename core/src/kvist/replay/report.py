"""A replay as a table for people and as JSON for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvist.layout import Layout
from kvist.replay.engine import ReplayResult
from kvist.stats import GroupStats, ManagerStats

if TYPE_CHECKING:
    from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@attrs.frozen(kw_only=True)
class Report:
    """One replay with what it was asked.

    ceiling: the same requests on a cache that never evicts, or ``None`` if that was not asked for.
    """

    trace: str
    model_type: str
    memory: str
    concurrency: int
    chunk_tokens: int | None
    layout: Layout
    result: ReplayResult
    ceiling: ReplayResult | None = None

    @property
    def stats(self) -> ManagerStats:
        """The manager's own numbers at the end."""
        assert self.result.stats is not None
        return self.result.stats

    def as_json(self) -> dict[str, Any]:
        """Plain values; field names carry their units. Names stay, new ones may come."""
        result, layout = self.result, self.layout
        return {
            "trace": self.trace,
            "model_type": self.model_type,
            "memory": self.memory,
            "memory_bytes": layout.arena_bytes,
            "block_tokens": layout.block_tokens,
            "concurrency": self.concurrency,
            "chunk_tokens": self.chunk_tokens,
            "requests": result.served,
            "refused": result.refused,
            "bytes_per_token": layout.token_bytes,
            "padding_bytes_per_token": layout.token_padding_bytes,
            "bytes_per_sequence": layout.sequence_bytes,
            "prompt_tokens": result.prompt_tokens,
            "reused_tokens": result.reused_tokens,
            "hit_rate": result.hit_rate,
            "hit_rate_ceiling": None if self.ceiling is None else self.ceiling.hit_rate,
            "output_tokens": result.output_tokens,
            "cut_tokens": result.cut_tokens,
            "preemptions": result.preemptions,
            "recomputed_tokens": result.recomputed_tokens,
            "decode_steps": result.decode_steps,
            "peak_running": result.peak_running,
            "evicted_pages": sum(group.evicted for group in self.stats.groups),
            "host_us_per_request": result.prompt_us,
            "host_us_per_decode_step": result.decode_step_us,
            "host_us_per_decode_token": result.decode_token_us,
            "groups": [
                {
                    "name": group.name,
                    "page_bytes": group.page_bytes,
                    "padding_bytes": group.padding_bytes,
                    "padding_fraction": group.padding_fraction,
                    "capacity_pages": group.capacity,
                    "peak_held_pages": group.held_peak,
                    "peak_held_bytes": group.held_peak * group.page_bytes,
                    "peak_use": _use(group),
                    "cached_pages": group.cached,
                    "evicted_pages": group.evicted,
                    "moved_pages": group.moved,
                }
                for group in self.stats.groups
            ],
            "reused_per_request": result.reused,
        }

    def tables(self) -> list[Table]:
        """For a rich console."""
        # Imported here and not above: rich is for people, scripts need as_json only.
        from rich.table import Table
        from rich.text import Text

        summary = Table("", "", title=f"{self.model_type} on {self.trace}", show_header=False)
        for name, value in self._lines():
            summary.add_row(name, Text(value, justify="right"))
        groups = Table(title="groups", title_justify="left")
        for heading in ("group", "page", "padding", "capacity", "peak held", "peak use", "cached at end", "evicted"):
            groups.add_column(heading, justify="left" if heading == "group" else "right", overflow="fold")
        for group in self.stats.groups:
            groups.add_row(
                Text(group.name),
                shown_bytes(group.page_bytes),
                f"{group.padding_fraction:.1%}",
                f"{group.capacity:,}",
                f"{group.held_peak:,}",
                f"{_use(group):.1%}",
                f"{group.cached:,}",
                f"{group.evicted:,}",
            )
        return [summary, groups]

    def _lines(self) -> list[tuple[str, str]]:
        result, layout = self.result, self.layout
        lines = [
            ("memory", f"{shown_bytes(layout.arena_bytes)} in blocks of {layout.block_tokens} tokens"),
            (
                "history",
                f"{layout.token_bytes:,.2f} bytes per token, and {layout.token_padding_bytes:,.2f} of padding",
            ),
            ("requests", f"{result.served:,}, at most {result.peak_running} at a time"),
            ("prompt tokens", f"{result.prompt_tokens:,}"),
            ("reused tokens", f"{result.reused_tokens:,}"),
            ("hit rate", f"{result.hit_rate:.2%}"),
        ]
        if layout.sequence_bytes:
            lines.insert(2, ("windows and states", f"{shown_bytes(layout.sequence_bytes)} per sequence at most"))
        if self.ceiling is not None:
            lines.append(("hit rate without eviction", f"{self.ceiling.hit_rate:.2%}"))
        lines += [
            ("output tokens", f"{result.output_tokens:,}"),
            ("evicted pages", f"{sum(group.evicted for group in self.stats.groups):,}"),
        ]
        if result.refused:
            limit = layout.spec.max_tokens
            lines.append(("refused requests", f"{result.refused:,}, longer than the model's {limit:,} tokens"))
        if result.cut_tokens:
            lines.append(("output cut at the model's length", f"{result.cut_tokens:,} tokens"))
        if result.preemptions:
            lines.append(("preemptions", f"{result.preemptions:,}, {result.recomputed_tokens:,} tokens recomputed"))
        lines += [
            ("host time per request", f"{result.prompt_us:,.1f} us"),
            ("host time per decode step", f"{result.decode_step_us:,.1f} us"),
            ("host time per generated token", f"{result.decode_token_us:,.2f} us"),
        ]
        return lines


def _use(group: GroupStats) -> float:
    """Share of the arena that the group held at its peak."""
    return group.held_peak / group.capacity if group.capacity else 0.0


def shown_bytes(count: int) -> str:
    """``count`` bytes in the largest unit that leaves at least 1, e.g. ``1.5 MiB``."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if not unit else f"{value:.1f} {_UNITS[unit]}"
