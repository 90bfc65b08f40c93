"""The command ``kvist top``: a live view of a cache in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvist.replay.report import shown_bytes
from kvist.views.board import Board, spread
from kvist.views.feed import Feed, FeedError, FileFeed, ServerFeed

_BAR = 40
#: Sign, style and name of what a page of the device can be.
_PARTS = (("█", "green", "held"), ("▒", "cyan", "cached"), ("·", "dim", "free"))
_LEVELS = " ▁▂▃▄▅▆▇█"


def command(
    source: Annotated[str, typer.Argument(metavar="URL|FILE", help="A server, or a file of records to play.")],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    play_seconds: Annotated[float, typer.Option(min=0.0, help="How long to play a file.")] = 20.0,
    once: Annotated[bool, typer.Option("--once", help="Print what there is now, or a file's end, and stop.")] = False,
) -> None:
    """Watch a cache in the terminal: throughput, hit rate, occupancy, requests.

    The source is a server's address, such as http://127.0.0.1:8000, or what `kvist replay --record` has written.
    """
    remote = "://" in source
    takes = 1 if once else max(1, round(play_seconds / interval))
    feed: Feed = ServerFeed(source) if remote else FileFeed(Path(source), takes)
    begin, records = feed.take()
    board = Board(begin, window_of(feed, begin.time_unit))
    board.take(begin, records)
    console = Console()
    if once:
        console.print(view(board))
        return
    trouble = ""
    with Live(view(board), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        try:
            while not feed.ended:
                time.sleep(interval)
                try:
                    begin, records = feed.take()
                except FeedError as error:
                    # It may come back; what was seen stays on the screen.
                    trouble = str(error).partition("\n")[0]
                else:
                    trouble = ""
                    if begin.began != board.begin.began:
                        board = Board(begin, board.window)
                    board.take(begin, records)
                live.update(view(board, trouble), refresh=True)
        except KeyboardInterrupt:
            pass
    console.print(view(board, trouble))


def window_of(feed: Feed, time_unit: str) -> float:
    """How far back "now" reaches: half a minute, and of a file a tenth of it."""
    if isinstance(feed, FileFeed):
        return max(feed.duration / 10, 1.0)
    return 30.0 if time_unit == "s" else 1000.0


def view(board: Board, trouble: str = "") -> RenderableType:
    """All of it, for a rich console."""
    parts: list[RenderableType] = [_title(board, trouble)]
    if board.last is None:
        parts.append(Text("no step yet", style="dim"))
    else:
        parts += [_work(board), _occupancy(board), _requests(board)]
    return Group(*parts)


def _title(board: Board, trouble: str) -> Text:
    seconds = board.begin.time_unit == "s"
    when = f"{board.time:,.0f} {'s' if seconds else 'steps'}"
    title = Text.assemble(("kvist top", "bold"), f"  {board.begin.source or 'cache'}  {when}")
    if trouble:
        title.append(f"\n{trouble}", style="bold red")
    return title


def _work(board: Board) -> RenderableType:
    last, recent, totals = board.last, board.recent, board.totals
    assert last is not None
    unit = board.begin.time_unit if board.begin.time_unit == "s" else "step"
    now, sofar = recent.counts, totals.counts
    work = Table.grid(padding=(0, 2))
    work.add_column(style="dim")
    work.add_column(justify="right")
    work.add_column()
    rate = board.rate(now["computed_tokens"])
    work.add_row("computed", f"{rate:,.0f} tokens/{unit}", Text(sparkline(board.history(30)), style="green"))
    per_step = now["computed_tokens"] / max(1, now["steps"])
    work.add_row("per step", f"{per_step:,.1f} tokens", f"{board.rows:,} rows in the last")
    work.add_row("requests", f"{last.running:,} running", f"{last.waiting:,} waiting, {board.finished:,} finished")
    since = f"without {board.dropped:,} lost records" if board.dropped else "since the start"
    hits = Table.grid(padding=(0, 2))
    hits.add_column(style="dim")
    hits.add_column(justify="right")
    hits.add_column()
    hits.add_row("hit rate", _percent(recent.hit_rate), f"{_percent(totals.hit_rate)} {since}")
    origins = [f"{tokens:,} {tier.name}" for tokens, tier in zip(totals.reused_below, board.begin.tiers[1:])]
    origins.insert(0, f"{sofar['reused_tokens'] - sum(totals.reused_below):,} device")
    hits.add_row("reused", f"{sofar['reused_tokens']:,}", f"of {sofar['prompt_tokens']:,}: {', '.join(origins)}")
    hits.add_row(
        "suspended",
        f"{sofar['suspends']:,}",
        f"{sofar['resumes']:,} resumed, {sofar['recomputed_tokens']:,} tokens recomputed",
    )
    return Columns([Panel(work, title="work", title_align="left"), Panel(hits, title="reuse", title_align="left")])


def _occupancy(board: Board) -> RenderableType:
    last, totals = board.last, board.totals
    assert last is not None
    table = Table(title="pages", title_justify="left", expand=False)
    table.add_column("tier, group", overflow="fold")
    legend = Text.assemble(*(part for sign, style, name in _PARTS for part in ((sign, style), f" {name}  ")))
    table.add_column(legend, no_wrap=True, min_width=_BAR)
    for heading in ("held", "cached", "free", "evicted"):
        table.add_column(heading, justify="right")
    device, *below = board.begin.tiers
    for group, now, sums in zip(device.groups, last.groups, totals.groups):
        # Groups share one arena: what another one has taken is not free for this one.
        counts = (now.held, now.cached, now.free)
        elsewhere = max(0, group.capacity - sum(counts))
        table.add_row(
            Text(f"{device.name} {group.name}"),
            bar(counts, sum(counts) + elsewhere),
            *(f"{count:,}" for count in (*counts, sums["evicted"])),
        )
    for tier, there, groups in zip(below, last.lower, totals.lower):
        for group, lower, sums in zip(tier.groups, there.groups, groups):
            used = (0, lower.used, max(0, group.capacity - lower.used))
            if not group.capacity:
                share = lower.used * group.page_bytes
                used = (0, share, max(0, tier.capacity_bytes - share))
            table.add_row(
                Text(f"{tier.name} {group.name}"),
                bar(used, sum(used)),
                "",
                f"{lower.used:,}",
                f"{used[2]:,}" if group.capacity else shown_bytes(used[2]),
                f"{sums['dropped']:,}",
            )
    return table


def _requests(board: Board) -> RenderableType:
    if not board.requests:
        return Text("no request has ended yet", style="dim")
    seconds = board.begin.time_unit == "s"
    unit = "s" if seconds else "steps"
    digits = 2 if seconds else 0
    table = Table(title=f"the last {len(board.requests):,} requests", title_justify="left")
    for heading in (f"time in {unit}", "median", "95 %", "last"):
        table.add_column(heading, justify="left" if heading.startswith("time") else "right")
    newest = board.requests[-1]
    for phase in ("queue", "transfer", "prefill", "decode"):
        values = [getattr(request, phase) for request in board.requests]
        if not any(values) and phase == "transfer":
            continue
        middle = spread(values)
        assert middle is not None
        table.add_row(phase, *(f"{value:,.{digits}f}" for value in (*middle, getattr(newest, phase))))
    table.caption = f"{board.finished:,} finished, {board.pauses:,} pauses in all"
    table.caption_justify = "left"
    return table


def bar(counts: tuple[int, ...], total: int) -> Text:
    """A bar whose parts are as long as their share of ``total``; the rest of it is blank."""
    text, drawn, upto = Text(), 0, 0
    for (sign, style, _), count in zip(_PARTS, counts):
        upto += count
        end = round(_BAR * upto / total) if total else 0
        text.append(sign * (end - drawn), style=style)
        drawn = end
    text.append(" " * (_BAR - drawn))
    return text


def sparkline(values: list[int]) -> str:
    """One character for each value, as high as its share of the largest."""
    top = max(values, default=0)
    return "".join(_LEVELS[-(-value * (len(_LEVELS) - 1) // top) if top else 0] for value in values)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
