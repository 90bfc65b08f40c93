"""One request on its way through a scheduler, and the states it can be in."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import attrs

from kvist.errors import RequestError
from kvist.sequence import Sequence
from kvist.spec import Scope
from kvist.step import IntArray
from kvist.wishes import MOST_PRIORITY, Wishes


class State(enum.Enum):
    """Where a job is. In the first three it holds no memory.

    WAITING: in the queue, new or paused. DEFERRED: until an earlier job has computed the prefix that both share.
    SUSPENDED: in the queue, its sequence suspended. ARRIVING: its rows come from another process. LOADING: from a lower
    tier. PREFILL: has tokens to compute before the next one can be chosen. DECODE: one token a step. DRAFT: as DECODE,
    in a step that also computes drafts for it; only between ``turn`` and the turn's end. DONE: ended.
    """

    WAITING = "waiting"
    DEFERRED = "deferred"
    SUSPENDED = "suspended"
    ARRIVING = "arriving"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"
    DONE = "done"


_S = State
#: Which state may follow which. Every job may end at any time.
NEXT: Mapping[State, frozenset[State]] = {
    _S.WAITING: frozenset({_S.DEFERRED, _S.ARRIVING, _S.LOADING, _S.PREFILL, _S.DONE}),
    _S.DEFERRED: frozenset({_S.WAITING, _S.DONE}),
    _S.SUSPENDED: frozenset({_S.LOADING, _S.PREFILL, _S.DONE}),
    _S.ARRIVING: frozenset({_S.PREFILL, _S.WAITING, _S.DONE}),
    _S.LOADING: frozenset({_S.PREFILL, _S.DONE}),
    _S.PREFILL: frozenset({_S.DECODE, _S.SUSPENDED, _S.WAITING, _S.DONE}),
    _S.DECODE: frozenset({_S.DRAFT, _S.SUSPENDED, _S.WAITING, _S.DONE}),
    _S.DRAFT: frozenset({_S.DECODE}),
    _S.DONE: frozenset(),
}


@attrs.define(eq=False, kw_only=True)
class Job:
    """One request. The host makes it and reads it; only the scheduler changes what is not listed as the host's.

    The host's:

    prompt: int32, its tokens; not empty. max_new_tokens: most tokens it generates, at least 1.
    scope: what beside the tokens makes content different.
    priority: from -10 to 10; a higher one goes first, as if it had come earlier.
    wishes: how long its blocks should stay in the cache.
    remote_tokens: leading prompt tokens whose rows come from another process, fewer than the prompt has; 0 for none,
        and as soon as they have come or will not come.

    The scheduler's:

    number: order of submission. rank: jobs go by it, the smallest first. state: see :class:`State`.
    tokens: what has to be computed before the next token can be chosen: the prompt, after a preemption with what was
        generated before.
    sequence: open from admission to the end, while the job is not paused and has not to arrive first.
    behind: whose prefix it waits for, while it is deferred.
    arrival_s, admitted_s, first_token_s, ended_s: readings of the scheduler's clock at submission, first admission, the
        end of the prompt's computation and the end; NaN before.
    reused_tokens: prompt tokens in the cache when the job first ran, -1 before. computed_tokens: tokens of
        :attr:`tokens` computed in chunks. recomputed_tokens: of them, computed before a preemption already.
    pauses, suspensions: how often its pages were taken, without and with a copy in a lower tier.
    error: why the scheduler ended it.
    """

    prompt: IntArray
    max_new_tokens: int
    scope: Scope = attrs.field(factory=Scope)
    priority: int = 0
    wishes: Wishes | None = None
    remote_tokens: int = 0

    number: int = attrs.field(default=-1, init=False)
    rank: float = attrs.field(default=math.nan, init=False)
    state: State = attrs.field(default=State.WAITING, init=False)
    tokens: IntArray = attrs.field(init=False)
    sequence: Sequence | None = attrs.field(default=None, init=False)
    behind: Job | None = attrs.field(default=None, init=False)
    arrival_s: float = attrs.field(default=math.nan, init=False)
    admitted_s: float = attrs.field(default=math.nan, init=False)
    first_token_s: float = attrs.field(default=math.nan, init=False)
    ended_s: float = attrs.field(default=math.nan, init=False)
    reused_tokens: int = attrs.field(default=-1, init=False)
    computed_tokens: int = attrs.field(default=0, init=False)
    recomputed_tokens: int = attrs.field(default=0, init=False)
    pauses: int = attrs.field(default=0, init=False)
    suspensions: int = attrs.field(default=0, init=False)
    #: For the scheduler: tokens that were computed when its pages were taken; what part of its tokens the cache had,
    #: and when that was looked up.
    had_tokens: int = attrs.field(default=0, init=False)
    cached_share: float = attrs.field(default=0.0, init=False)
    looked_up: int = attrs.field(default=-1, init=False)
    error: Exception | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.tokens = self.prompt
        if not len(self.prompt) or self.max_new_tokens < 1:
            raise RequestError(
                f"a job of {len(self.prompt)} prompt tokens and {self.max_new_tokens} new ones has nothing to do",
                hint="give it at least one of each",
            )
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise RequestError(
                f"priority={self.priority} is outside {-MOST_PRIORITY}..{MOST_PRIORITY}",
                hint="only the order of priorities matters: use fewer of them",
            )
        if not 0 <= self.remote_tokens < len(self.prompt):
            raise RequestError(
                f"remote_tokens={self.remote_tokens} of a prompt of {len(self.prompt)}: the last one is computed here"
            )

    @property
    def end(self) -> int:
        """Tokens it has computed at its end, at most: the last generated token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def remaining(self) -> int:
        """Of :attr:`tokens` those not computed yet. Only with a sequence."""
        assert self.sequence is not None
        return len(self.tokens) - self.sequence.computed

    @property
    def started(self) -> bool:
        """Was it ever admitted?"""
        return not math.isnan(self.admitted_s)

    @property
    def preempted(self) -> bool:
        """Has it run, lost its pages and not come back?"""
        return self.state is State.SUSPENDED or (self.pauses > 0 and self.state is State.WAITING)


def order(job: Job) -> tuple[float, int]:
    """Key of the one order that all decisions follow: who comes first is admitted first, gets its tokens computed first
    and gives way last."""
    return job.rank, job.number
