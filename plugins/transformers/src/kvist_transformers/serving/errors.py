"""Errors as clients of OpenAI's API know them, in Kvist's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvist.errors import CapacityError, KvistError, RequestError

#: Seconds after which a client that was sent away may come again.
RETRY_AFTER_S = 1


class ApiError(Exception):
    """What a client is told instead of an answer.

    status: of HTTP. kind, code, param: ``type``, ``code`` and ``param`` of OpenAI's error object.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if hint is None else f"{message}\nhint: {hint}"
        self.code = code
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """An error of a request, or of the engine while it computed it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        return ApiError(400, error.message, code="context_length_exceeded", hint=error.hint)
    if isinstance(error, RequestError):
        return ApiError(400, error.message, code="invalid_value", hint=error.hint)
    if isinstance(error, KvistError):
        return ApiError(500, error.message, code="engine_error", hint=error.hint)
    return ApiError(500, f"{type(error).__name__}: {error}", code="engine_error", hint="see the server's log")


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's problems with a body."""
    problem = problems[0]
    place = [part for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        reason = problem.get("ctx", {}).get("error", problem["msg"])
        return ApiError(400, f"the body is not JSON: {reason} at character {place[0]}", code="invalid_json")
    if not place:
        return ApiError(400, f"the body is not a request: {problem['msg']}", hint="send a JSON object")
    # A union's branches are named behind the field: the field is what its sender knows.
    field = str(place[0])
    said = dict.fromkeys(other["msg"] for other in problems if field in other["loc"][:2])
    return ApiError(400, f"{field}: {', or: '.join(said)}", code="invalid_value", param=field)
