"""Which positions a query reads: what the oracles compare page tables with, said apart from the retentions themselves.

A plugin that brings a retention of its own says it here for the kit::

    @reads.register(Chunk)
    def _(retention, query):
        return ((query - query % retention.tokens, query + 1),)
"""

from __future__ import annotations

from functools import singledispatch

from kvist.spec import History, Retention, Spans, Window


@singledispatch
def reads(retention: Retention, query: int) -> Spans:  # noqa: ARG001 - what other retentions take
    """Positions that the query at position ``query`` reads: half-open ranges, ascending and disjoint, none empty.

    The last one ends with the query's own. All that lies between its beginning and a later query is read by some
    query from this one to that. Retentions that are exact read no rows by position and are not asked.
    Raises LookupError for a retention of which the kit was not told.
    """
    raise LookupError(
        f"the kit does not know what a query of {retention!r} reads; say it in the tests of the plugin with "
        f"`@kvist.testing.reads.reads.register({type(retention).__name__})`"
    )


@reads.register(History)
def _reads_history(_: History, query: int) -> Spans:
    return ((0, query + 1),)


@reads.register(Window)
def _reads_window(retention: Window, query: int) -> Spans:
    low = max(0, query - retention.tokens + 1)
    if retention.sinks >= low:
        return ((0, query + 1),)
    return ((0, retention.sinks), (low, query + 1)) if retention.sinks else ((low, query + 1),)
