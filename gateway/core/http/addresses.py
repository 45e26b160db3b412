"""Recognize HTTP addresses and hosts."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

#: what no name of a host has: blanks, what is not shown, and what ends a host where it stands in a URL
_NEVER_IN_NAMES: Final = re.compile(r"[\s\x00-\x20\x7f/\\?#@:\[\]%*,;'\"<>]")


def is_address(url: str) -> bool:
    """Whether it names `http` or `https`, a host, and, where it names a port, one from 1 to 65535."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_host(text: str) -> bool:
    """Whether it may be one to listen on: an address, or what may be the name of one."""
    try:
        if ":" in text:
            return bool(ipaddress.IPv6Address(text))
        if re.fullmatch(r"[0-9.]+", text):
            *bytes_, rest = map(int, text.split("."))  # 127.1 is 127.0.0.1
            return len(bytes_) <= 3 and max(bytes_, default=0) <= 255 and rest < 256 ** (4 - len(bytes_))  # noqa: PLR2004
        text.encode("idna")  # fails where a part is empty or too long
    except ValueError:
        return False
    return bool(text) and not _NEVER_IN_NAMES.search(text)
