"""Encode open holds as JSON, and decode them, for stores that several versions of the gateway use."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

import msgspec

from gateway.core.ledger.arithmetic import Hold
from gateway.core.record import CallRecord
from gateway.core.stored import OpenHold


class _StoredHold(msgspec.Struct, frozen=True):
    """The stored form of an `OpenHold`.

    Its names must not change: a hold that another version cannot read stays reserved.
    """

    hold: Hold
    lost: CallRecord
    units: int = 0
    noted: int = 0
    unit_usd: Decimal | None = None
    goes_on: bool = False


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_StoredHold)


def encode(opened: OpenHold) -> bytes:
    """Return a hold as JSON."""
    return _ENCODER.encode(
        _StoredHold(opened.hold, opened.orphaned, opened.units, opened.noted, opened.unit_usd, opened.goes_on)
    )


def decode(value: bytes, units: int, noted: int) -> OpenHold:
    """Return the hold of this JSON, with its current units and delivered tokens, which are stored separately.

    Raises:
        msgspec.MsgspecError: the value is damaged, or of another version.
    """
    stored = _DECODER.decode(value)
    return OpenHold(stored.hold, stored.lost, units, noted, stored.unit_usd, stored.goes_on)
