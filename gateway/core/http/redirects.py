"""Refuse redirects of a provider.

A client that follows a redirect would send its whole prompt to another address, past the gateway and unmetered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urljoin, urlsplit

from gateway.core.errors import UpstreamRedirect
from gateway.core.http.headers import header

#: the first digit of the statuses of redirects
_REDIRECTION: Final = 3
#: A host and port that may be shown in a message. The rest of the address may hold a credential.
_HOST: Final = re.compile(r"[\w.\-:\[\]]{1,261}", re.ASCII)


def check_redirect(provider: str, url: str, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Refuse a response with a 3xx status. `url`: the address of the request.

    Raises:
        UpstreamRedirect: the status is 3xx.
    """
    if status // 100 == _REDIRECTION:
        raise UpstreamRedirect(
            f'The provider "{provider}" answered {status}, a redirect to {_target(url, headers)}. Redirects are not '
            f"followed. Set providers.{provider}.base_url to the final address."
        )


def _target(url: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the host and port that a redirect names. A relative address has the host of the request."""
    location = header(headers, b"location").decode("latin-1")
    if not location:
        return "no address"
    try:
        host = urlsplit(urljoin(url, location)).netloc.rpartition("@")[2]
    except ValueError:
        host = ""
    return host if _HOST.fullmatch(host) else "an address that cannot be read"
