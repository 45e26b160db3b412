"""Parse an upload in `multipart/form-data`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.mock.wire import ApiError

if TYPE_CHECKING:
    from gateway.mock.wire import ReceivedCall

_BOUNDARY: Final = re.compile(r'boundary="?([^";,]+)"?')
_NAME: Final = re.compile(r'\bname="([^"]*)"')
_FILENAME: Final = re.compile(r'\bfilename="([^"]*)"')


@dataclass(frozen=True, slots=True)
class FormField:
    """One field of a form. `filename` is empty if the field is not a file."""

    data: bytes
    filename: str

    @property
    def text(self) -> str:
        """Return the field as text."""
        return self.data.decode("utf-8", "replace")


def parse(request: ReceivedCall) -> dict[str, FormField]:
    """Return the fields of a form by name.

    Raises:
        ApiError: 400, the body is not `multipart/form-data`.
    """
    boundary = _BOUNDARY.search(request.header("content-type") or "")
    if not boundary:
        raise ApiError(400, "Expected a multipart/form-data body.")
    fields: dict[str, FormField] = {}
    for part in (b"\r\n" + request.body).split(b"\r\n--" + boundary[1].encode())[1:]:
        head, _, data = part.partition(b"\r\n\r\n")
        headers = head.decode("utf-8", "replace")
        name = _NAME.search(headers)
        if name:
            filename = _FILENAME.search(headers)
            fields[name[1]] = FormField(data, filename[1] if filename else "")
    return fields


def required(fields: dict[str, FormField], name: str) -> FormField:
    """Return the field `name`.

    Raises:
        ApiError: 400, the field is missing.
    """
    if name not in fields:
        raise ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    return fields[name]
