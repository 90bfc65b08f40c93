"""Every error Kvist raises on purpose.

A message says what went wrong, where and why; the optional hint says what to do about it.
"""

from __future__ import annotations


class KvistError(Exception):
    """Base of all Kvist errors. ``str()`` gives the message and, on a line of its own, ``hint: ...``."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(cls: type[KvistError], message: str, hint: str | None) -> KvistError:
    return cls(message, hint=hint)


class SpecError(KvistError):
    """A cache specification, layout or model config that cannot work."""


class CapacityError(KvistError):
    """Something needs more pages than exist or than are free."""


class DeadlockError(CapacityError):
    """Every request waits for pages that nobody will give back."""


class RequestError(KvistError):
    """One request is wrong (empty prompt, token out of range, ...); nothing else is affected."""


class StateError(KvistError):
    """A call that the object's state does not allow, e.g. using a closed sequence."""


class PluginError(KvistError):
    """A plugin that is missing, broken, ambiguous or incompatible."""


class TransferError(KvistError):
    """Moving a cache between processes failed or was refused."""


class TierError(KvistError):
    """A memory tier (host, disk) failed or was refused."""
