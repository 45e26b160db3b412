"""Addresses of HTTP: what is one."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_address(url: str) -> bool:
    """Whether it names `http` or `https`, a host, and, where it names a port, one from 1 to 65535."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
