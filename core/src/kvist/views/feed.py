"""Where `kvist top` gets its records: from a server, as they come, or from a file, as they came."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from kvist.errors import KvistError
from kvist.iterations.records import Begin, Record, RecordError, decoded, read_run

#: What a server answers under when only its address is given.
PATH = "/v1/iteration_stats"


class FeedError(KvistError):
    """No records can be had."""


class Feed(Protocol):
    """Gives records until there are no more."""

    @property
    def ended(self) -> bool:
        """Is there nothing more to come?"""

    def take(self) -> tuple[Begin, Sequence[Record]]:
        """What has come since the last call. Another ``Begin`` than before: it is another run."""


class ServerFeed:
    """Asks a server for what is new.

    url: of the server, or of its records. Raises FeedError for what is no URL.
    """

    ended = False

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FeedError(f"{url!r} is not the URL of a server", hint="give for example http://127.0.0.1:8000")
        if parts.path in ("", "/"):
            parts = parts._replace(path=PATH)
        self.url = urlunsplit(parts)
        self._timeout_s = timeout_s
        self._begin: Begin | None = None
        self._number = -1

    def take(self) -> tuple[Begin, Sequence[Record]]:
        """Raises FeedError when there is no answer, or another one than records."""
        begin, records = self._ask(self._number)
        if self._begin is not None and begin.began != self._begin.began and self._number >= 0:
            # The server was started anew, and counts from 0.
            begin, records = self._ask(-1)
        self._begin = begin
        if records:
            self._number = records[-1].number
        return begin, records

    def _ask(self, number: int) -> tuple[Begin, list[Record]]:
        url = f"{self.url}?since={number}"
        try:
            with urllib.request.urlopen(url, timeout=self._timeout_s) as answer:
                lines = answer.read().splitlines()
        except urllib.error.HTTPError as error:
            with error:
                raise FeedError(
                    f"{self.url} answers {error.code} {error.reason}",
                    hint="is it a server that records its iterations? give its address, such as http://127.0.0.1:8000",
                ) from error
        except (OSError, ValueError) as error:
            raise FeedError(
                f"no answer from {self.url}: {getattr(error, 'reason', None) or error}",
                hint="is the server running, and is this its address and port?",
            ) from error
        try:
            records = list(decoded(lines, self.url))
        except RecordError as error:
            raise FeedError(f"{self.url} does not answer with records", hint="is this a Kvist server?") from error
        if not records or not isinstance(records[0], Begin):
            raise FeedError(f"{self.url} does not answer with records", hint="is this a Kvist server?")
        return records[0], [record for record in records[1:] if not isinstance(record, Begin)]


class FileFeed:
    """Plays the last run in a file, all of it in ``takes`` takes of equal time. Raises RecordError."""

    def __init__(self, path: Path, takes: int) -> None:
        self._begin, self._records = read_run(path)
        self._given, self._taken, self._takes = 0, 0, takes
        #: Of the run.
        self.duration = self._records[-1].time if self._records else 0.0

    @property
    def ended(self) -> bool:
        return self._given == len(self._records)

    def take(self) -> tuple[Begin, Sequence[Record]]:
        self._taken += 1
        last = self._taken >= self._takes
        limit, first = self.duration * self._taken / self._takes, self._given
        while self._given < len(self._records) and (last or self._records[self._given].time <= limit):
            self._given += 1
        return self._begin, self._records[first : self._given]
