"""`gateway models update`: fetch a newer table of prices and limits from an address that the user names."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from gateway.cli.common import AsJson, Exit, print_json, printable, quoted, stop

if TYPE_CHECKING:
    from gateway.config.price_table import PriceTable

#: seconds that the download may wait for data, and that it may take in total
_SILENCE_S: Final = 30.0
_WHOLE_S: Final = 300.0
_PIECE_BYTES: Final = 2**16


def update(
    address: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="An https URL, or a file, with litellm's table model_prices_and_context_window.json.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Fetch newer prices and limits of models. The gateway never does this by itself.

    Everything is checked before the old table is replaced. Gateways of this user read the new table when they start.
    """
    from gateway.config.price_table import PriceTable, compressed_table, fetched_file, load_price_table

    with _problems(address):
        source, content = _download(address) if "://" in address else _read_file(Path(address))
        compressed = compressed_table(content, source, datetime.now(UTC).date().isoformat())
        file = fetched_file()
    old, new = load_price_table(), PriceTable(compressed)
    try:
        _replace(file, compressed)
    except OSError as error:
        stop(f"{file} cannot be written: {error.strerror}. The old table stays.", Exit.FAILED)
    changes = _changes(old, new)
    if as_json:
        print_json({"table": new.name, "models": len(new), "before": old.name, **changes, "file": str(file)})
        return
    counted = ", ".join(f"{number:,} {change}" for change, number in changes.items())
    typer.echo(f"{len(new):,} models from {new.name}. Compared with {old.name}: {counted}.")
    typer.echo(f"Written to {file}. Restart the gateway to use it.")


@contextmanager
def _problems(address: str) -> Iterator[None]:
    """End the command with a message if the new table cannot be read, or is not a table of prices."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = printable(str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error))
        stop(f"The table at {quoted(address)} cannot be used: {reason}. The old table stays.", Exit.FAILED)


def _read_file(file: Path) -> tuple[str, bytes]:
    with file.open("rb") as opened:
        return "a file", _bounded(opened.read(_most() + 1))


def _download(url: str) -> tuple[str, bytes]:
    """Return the host of an address, and the content of the file there.

    Raises:
        OSError, ValueError: it cannot be fetched, or is too large.
    """
    import http.client
    import urllib.request

    _check_scheme(url)
    deadline, content = time.monotonic() + _WHOLE_S, bytearray()
    try:
        with urllib.request.urlopen(url, timeout=_SILENCE_S) as response:  # noqa: S310  # checked
            _check_scheme(response.url)  # after redirects
            while len(content) <= _most() and (piece := response.read(_PIECE_BYTES)):
                content += piece
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it takes longer than {_WHOLE_S:g} s")
            expected = response.headers.get("content-length")
    except http.client.HTTPException as error:
        raise ValueError(f"the response is not valid HTTP ({error!r})") from None
    if expected is not None and expected.isdecimal() and len(content) < int(expected):
        raise ValueError(f"it ended after {len(content):,} of {int(expected):,} bytes")
    return urlsplit(url).hostname or "", _bounded(bytes(content))


def _check_scheme(url: str) -> None:
    from gateway.config.load import is_loopback

    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        raise ValueError("prices are only fetched with https, because without it they could be changed on the way")


def _bounded(content: bytes) -> bytes:
    if len(content) > _most():
        raise ValueError(f"it is larger than {_most() / 2**20:g} MiB")
    return content


def _most() -> int:
    from gateway.config.price_table import MOST_BYTES

    return MOST_BYTES


def _replace(file: Path, content: bytes) -> None:
    """Write a file so that readers find the old or the new content."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with os.fdopen(number, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _changes(old: PriceTable, new: PriceTable) -> dict[str, int]:
    """Return how many models are new, removed or changed."""
    return {
        "new": len(new.keys() - old.keys()),
        "removed": len(old.keys() - new.keys()),
        "changed": sum(bytes(old[name]) != bytes(new[name]) for name in old.keys() & new.keys()),
    }
