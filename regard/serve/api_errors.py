"""Errors of requests, and the shape that each API gives them.

| API                                  | shape                                                                          |
|--------------------------------------|--------------------------------------------------------------------------------|
| OpenAI (/v1/...)                     | {"error": {"message", "type", "param", "code"}}                                |
| Regard (/regard/...)                 | {"error": {"message", "type", "code", "status", "retry_after", "limit", "value"}} |
| LibreTranslate, Hugging Face and /v2 | {"error": "message"}; LibreTranslate answers 403 where a key is wrong or missing |

No message holds a path of the server or a traceback.
"""

from __future__ import annotations

from typing import Any

from regard.errors import RegardError
from regard.serve.request_context import Cancelled, DeadlineExceeded, Overloaded, ServeError

LIBRETRANSLATE_PATHS = ("/translate", "/detect", "/languages", "/frontend/settings", "/translate_file")
CLIENT_CLOSED_REQUEST = 499  # as nginx counts requests whose client is gone
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that a client gets as its answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        limit: float | None = None,
        value: float | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.limit, self.value, self.retry_after = limit, value, retry_after

    @property
    def type(self) -> str:
        """The type of the error, as OpenAI's API names it."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def headers(self, path: str) -> dict[str, str]:
        """Return the headers of the answer to a request for this path."""
        found = {}
        if self.retry_after is not None:
            found["Retry-After"] = f"{max(1, round(self.retry_after))}"
        if status_for(path, self) == 401:
            # A browser asks its user for a key and sends it as the password of every request to this server.
            is_page = path == "/" or path.startswith("/static/")
            found["WWW-Authenticate"] = 'Basic realm="regard"' if is_page else "Bearer"
        if self.status in (408, 413, 431):  # the rest of the request is not read
            found["Connection"] = "close"
        return found


def limit_error(what: str, value: float, limit: float, option: str, param: str | None = None) -> ApiError:
    """Return the error for a request that exceeds a limit; it names the limit, the value and the option that sets it."""
    message = f"{what}: {value:,.10g}, and the limit is {limit:,.10g} ({option})"
    return ApiError(400, message, code="limit_exceeded", param=param, limit=limit, value=value)


def as_api_error(error: BaseException) -> ApiError:
    """Return any error as one that a client gets; an error that is not the client's does not tell what is wrong."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        known: dict[str, Any] = {"limit": error.limit, "value": error.value, "retry_after": error.retry_after}
        return ApiError(429, str(error), code="overloaded", **known)
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, Cancelled):
        return ApiError(CLIENT_CLOSED_REQUEST, str(error), code="cancelled")
    if isinstance(error, ServeError):
        return ApiError(503, str(error), code="unavailable", retry_after=error.retry_after)
    if isinstance(error, RegardError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, "the server failed to answer; its log has more under the id of this request", code="internal")


def status_for(path: str, error: ApiError) -> int:
    """Return the status of an error: LibreTranslate answers 403 where others answer 401."""
    is_libretranslate = path in LIBRETRANSLATE_PATHS or path.startswith("/download_file/")
    return 403 if error.status == 401 and is_libretranslate else error.status


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the shape of the API that a path belongs to."""
    if path.startswith("/v1/"):
        found: dict[str, Any] = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    elif path.startswith("/regard/"):
        found = {"message": error.message, "type": error.type, "code": error.code, "status": error.status}
        found["retry_after"] = error.retry_after
    else:
        return {"error": error.message}
    if error.limit is not None:
        found |= {"limit": error.limit, "value": error.value}
    return {"error": found}
