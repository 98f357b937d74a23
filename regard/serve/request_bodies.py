"""Reading of request bodies: strict JSON, forms and files, all of them limited before they are parsed.

JSON is UTF-8 of a limited depth, without NaN, and its strings are valid Unicode: a lone surrogate would only fail later, in
a tokenizer. A request is parsed once (`RequestBody.fields`), so the check of an API key sees what the handler will see.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from regard.serve.api_errors import ApiError

LARGE = 1 << 16  # bytes of a body that is parsed beside the event loop
MAX_FIELDS = 64  # of a form or a query string
STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")
M = TypeVar("M", bound="RequestModel")


class RequestModel(BaseModel):
    """The fields of a request; those that are not known are ignored, as the servers do that clients were made for."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class UploadedFile:
    """A file that a client sent."""

    name: str
    content: bytes


@dataclass
class RequestBody:
    """The body of a request, which is parsed when it is first needed."""

    content: bytes
    headers: Headers
    query: bytes
    max_depth: int
    _fields: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """The media type in lower case, without parameters."""
        return self.headers.get("content-type", "").split(";")[0].strip().lower()

    async def json(self) -> Any:
        """Return the value of a JSON body."""
        if len(self.content) > LARGE:
            return await asyncio.to_thread(parse_json, self.content, self.max_depth)
        return parse_json(self.content, self.max_depth)

    async def fields(self) -> dict[str, Any]:
        """Return the fields of the query string and of a body that is JSON, a form or a form with files.

        Fields of the body hold where both have them."""
        if self._fields is None:
            self._fields = {**parse_form(self.query), **await self._body_fields()}
        return self._fields

    async def _body_fields(self) -> dict[str, Any]:
        if not self.content:
            return {}
        if self.kind == "application/x-www-form-urlencoded":
            return {name: text.replace("\r\n", "\n") for name, text in parse_form(self.content).items()}
        if self.kind == "multipart/form-data":
            return await self._multipart()
        found = await self.json()
        if not isinstance(found, dict):
            raise ApiError(400, "Invalid request: the body must be a JSON object or a form")
        return found

    async def _multipart(self) -> dict[str, Any]:
        async def stream() -> AsyncIterator[bytes]:
            yield self.content

        size = max(len(self.content), 1)
        parser = MultiPartParser(self.headers, stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=size)  # type: ignore[arg-type]
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, ValueError, LookupError) as error:
            raise ApiError(400, "Invalid request: the form cannot be read") from error
        found: dict[str, Any] = {}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                found[name] = UploadedFile(value.filename or "", await value.read())
                await value.close()
            else:
                check_unicode(value)
                found[name] = value.replace("\r\n", "\n")
        return found


def parse_form(content: bytes) -> dict[str, str]:
    """Return the fields of a query string or a form; of a name that is there more than once the last one."""
    try:
        pairs = parse_qsl(content.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except UnicodeDecodeError:
        raise ApiError(400, "Invalid request: the form or query string is not UTF-8") from None
    except ValueError:
        raise ApiError(400, f"Invalid request: a form has at most {MAX_FIELDS} fields") from None
    return dict(pairs)


def parse_json(content: bytes, max_depth: int) -> Any:
    """Return the value of a JSON text; one that is not valid, or nested too deeply, is a 400."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"Invalid request: the body is not UTF-8 ({error.reason} at byte {error.start + 1})"
        raise ApiError(400, message, code="invalid_utf8") from None
    depth = 0
    for found in STRING_OR_BRACKET.finditer(content):
        bracket = found[0]
        depth += 1 if bracket in b"[{" else -1 if bracket in b"]}" else 0
        if depth > max_depth:
            message = f"Invalid request: JSON is nested deeper than {max_depth} levels (--max-json-depth)"
            raise ApiError(400, message, code="limit_exceeded", limit=max_depth, value=depth)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "Invalid request: the body is not JSON", code="invalid_json") from None
    if "\\ud" in text or "\\uD" in text:
        check_unicode(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def check_unicode(value: Any) -> None:
    """Refuse strings with lone surrogates anywhere in a value of JSON."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and SURROGATE.search(one):
            raise ApiError(400, "Invalid request: a string has a lone surrogate, which is not Unicode text")
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one


def validate(model: type[M], value: Any) -> M:
    """Return the fields of a request as an object of their model; the error names the first that is wrong."""
    if not isinstance(value, dict):
        raise ApiError(400, "Invalid request: the body must be a JSON object", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])[:100]
        if first["type"] == "missing":
            raise ApiError(400, f"Invalid request: missing {where} parameter", param=where) from None
        raise ApiError(400, f"Invalid request: {where}: {first['msg']}", param=where, code="invalid_value") from None
    except RecursionError:
        raise ApiError(400, "Invalid request: a value is nested too deeply", code="invalid_value") from None


def finite(value: float) -> float | None:
    """Return a number as JSON can write it: null for infinity and for what is not a number."""
    return value if math.isfinite(value) else None
