"""Requests that come from other processes, as far as a scheduler is concerned."""

from __future__ import annotations

from typing import Protocol, TypeVar

from kvist.scheduling.job import Job

J = TypeVar("J", bound=Job, contravariant=True)


class Remote(Protocol[J]):
    """Moves requests between processes for one scheduler, e.g. by :class:`kvist.transfer.transfers.Transfers`. It tells
    the scheduler by ``landed`` and ``lost`` what has become of a job."""

    @property
    def open(self) -> int:
        """Transfers, in either direction, that hold pages of the scheduler's cache and will give them back by
        themselves."""

    def receive(self, job: J) -> None:
        """Open a sequence for ``job.tokens`` whose first ``job.remote_tokens`` rows come from another process, and have
        them sent. Raises CapacityError, and nothing has changed, when there is no room now."""

    def cancel(self, job: J) -> None:
        """Nobody waits for the job's rows any more. Neither ``landed`` nor ``lost`` is to follow."""
