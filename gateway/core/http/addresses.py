"""Recognize HTTP addresses and hosts."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

#: characters that no host name has: blanks, control characters, and characters that end the host in a URL
_NEVER_IN_NAMES: Final = re.compile(r"[\s\x00-\x20\x7f/\\?#@:\[\]%*,;'\"<>]")
#: hosts of this machine that the resolver cannot point at another one
_THIS_MACHINE: Final = ("localhost", "127.0.0.1", "::1")


def is_address(url: str) -> bool:
    """Return whether a URL has the scheme http or https, a host, and a port from 1 to 65535 or none."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_private_address(url: str) -> bool:
    """Return whether no one can change a response of this URL on its way: it has https, or a host of this machine."""
    return is_address(url) and (url.startswith("https://") or urlsplit(url).hostname in _THIS_MACHINE)


def is_host(text: str) -> bool:
    """Return whether the text can be a host to listen on: an IP address or a host name."""
    try:
        if ":" in text:
            return bool(ipaddress.IPv6Address(text))
        if re.fullmatch(r"[0-9.]+", text):
            *head, last = map(int, text.split("."))  # 127.1 is 127.0.0.1
            return len(head) <= 3 and max(head, default=0) <= 255 and last < 256 ** (4 - len(head))  # noqa: PLR2004
        text.encode("idna")  # fails if a part is empty or too long
    except ValueError:
        return False
    return bool(text) and not _NEVER_IN_NAMES.search(text)
