"""Sign webhook events as specified by Standard Webhooks 1.0.0."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

_PREFIX: Final = "whsec_"
#: allowed lengths of a key in bytes
_LENGTHS: Final = range(24, 65)


def signing_key(secret: str) -> bytes:
    """Return the key in a secret.

    Raises:
        ValueError: the secret has no valid key.
    """
    key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    if not secret.startswith(_PREFIX) or len(key) not in _LENGTHS:
        raise ValueError("must be whsec_ and 24 to 64 random bytes as Base64")
    return key


def signature(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of the header webhook-signature."""
    signed = b"%b.%d.%b" % (message_id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
