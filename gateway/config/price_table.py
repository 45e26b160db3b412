"""Read and write the dated table of prices and limits: the one in the package, or a newer one that was fetched.

The table is made from litellm's file `model_prices_and_context_window.json`, with only the keys that the gateway reads.
It is a gzip file with two lines of JSON: first the source and the date, then the entries by model.
"""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.config.load import data_folder
from gateway.config.section import expand_home

logger = logging.getLogger("gateway")

TABLE_FILE: Final = "prices.json.gz"
_FETCHED: Final = f"~/.local/share/gateway/{TABLE_FILE}"
#: Entries with a price that a table must have. litellm's file has had more than 1,000 since 2024.
LEAST_PRICED: Final = 500
#: maximum bytes of a table, both compressed and decompressed
MOST_BYTES: Final = 32 * 2**20
#: maximum bytes of the first line
_HEAD_BYTES: Final = 1024
#: keys of an entry that the gateway reads, besides those of prices
_USED: Final = frozenset(
    {
        "alias_of", "litellm_provider", "max_input_tokens", "max_output_tokens", "max_tokens", "mode",
        "provider_specific_entry", "supports_reasoning", "tiered_pricing",
    }
)  # fmt: skip
#: parts of the keys of prices and of their factors
_PRICES: Final = ("cost", "uplift")
#: zlib's `wbits` for the gzip format
_GZIP_WBITS: Final = 31


class _Head(msgspec.Struct):
    source: str
    date: str


class PriceTable(Mapping[str, msgspec.Raw]):
    """The raw entries of a table, by model. They are decompressed when they are first read.

    Attributes:
        source: where the table comes from, such as "litellm 1.110.2".
        date: the day on which it was read there, such as "2026-11-28".
    """

    def __init__(self, compressed: bytes) -> None:
        """Read the first line of a table.

        Raises:
            ValueError: it is not such a table.
        """
        try:
            line = zlib.decompressobj(_GZIP_WBITS).decompress(compressed, _HEAD_BYTES).partition(b"\n")[0]
            head = msgspec.json.decode(line, type=_Head)
            date.fromisoformat(head.date)
        except (zlib.error, msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"it is not a table of prices ({error})") from None
        self.source, self.date = head.source, head.date
        self._compressed = compressed

    @property
    def name(self) -> str:
        """Return the source and the date, to show to people."""
        return f"{self.source} ({self.date})"

    @cached_property
    def _entries(self) -> Mapping[str, msgspec.Raw]:
        decompressor = zlib.decompressobj(_GZIP_WBITS)
        content = decompressor.decompress(self._compressed, MOST_BYTES)
        if not decompressor.eof:
            raise ValueError("it is cut off or too large")
        return msgspec.json.decode(content.partition(b"\n")[2], type=dict[str, msgspec.Raw])

    def check(self) -> None:
        """Read all entries.

        Raises:
            ValueError: the table is damaged.
        """
        try:
            len(self)
        except (zlib.error, msgspec.DecodeError, ValueError) as error:
            raise ValueError(f"it is damaged ({error})") from None

    def __getitem__(self, name: str) -> msgspec.Raw:
        """Return the entry of a model."""
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the models."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)


def compressed_table(content: bytes, source: str, day: str) -> bytes:
    """Return the compressed table made from litellm's file.

    Numbers are copied as text, because a float cannot represent every decimal price exactly.

    Raises:
        ValueError: the content is not such a file.
    """
    try:
        raw_entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ValueError(f"it is not JSON with one entry for each model ({error})") from None
    entries = {name: _used_fields(raw) for name, raw in raw_entries.items()}
    priced = sum(any("cost" in key for key in entry) for entry in entries.values())
    if priced < LEAST_PRICED:
        raise ValueError(f"it has prices of {priced:,} models, and at least {LEAST_PRICED:,} are expected")
    lines = (msgspec.json.encode(_Head(source, day)), msgspec.json.encode(entries))
    return gzip.compress(b"\n".join(lines), mtime=0)


def _used_fields(raw: msgspec.Raw) -> Mapping[str, Any]:
    """Return the keys of an entry that the gateway reads; none if it is not an object."""
    with suppress(msgspec.DecodeError):
        entry = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {key: value for key, value in entry.items() if key in _USED or any(part in key for part in _PRICES)}
    return {}


def fetched_file() -> Path:
    """Return the file of the table that `gateway models update` fetches.

    Raises:
        ValueError: the home folder is unknown.
    """
    return expand_home(_FETCHED)


def load_price_table() -> PriceTable:
    """Return the newer one of the fetched table and the one in the package; the fetched one if the dates are equal."""
    shipped = PriceTable((data_folder() / TABLE_FILE).read_bytes())
    fetched = _fetched()
    return fetched if fetched is not None and fetched.date >= shipped.date else shipped


def _fetched() -> PriceTable | None:
    try:
        file = fetched_file()
    except ValueError:  # without a home folder, nothing can have been fetched
        return None
    try:
        with file.open("rb") as opened:
            table = PriceTable(opened.read(MOST_BYTES))
        table.check()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        logger.warning(
            "the fetched prices cannot be used: %s; the gateway uses those of its package. Remove %s, or run "
            "`gateway models update` again",
            error,
            _FETCHED,
        )
        return None
    return table
