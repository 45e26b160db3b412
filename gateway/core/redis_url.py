"""Parse the URLs of Redis: single server, sentinels and cluster.

Options may follow as in other URLs, behind a question mark: for TLS, and what sentinels are told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from gateway.core.values import dataclass

Kind = Literal["single", "sentinel", "cluster"]

#: what an address begins with, before ://
SCHEMES: Final[Mapping[str, Kind]] = {
    "redis": "single", "redis+sentinel": "sentinel", "redis+cluster": "cluster",
    "rediss": "single", "rediss+sentinel": "sentinel", "rediss+cluster": "cluster",
}  # fmt: skip
_PORTS: Final = {"single": 6379, "sentinel": 26379, "cluster": 6379}
#: files of the certificates that are trusted, of our own one and of its key, and whether names have to match
_TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_SENTINEL: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Redis is, and how it is spoken to.

    Attributes:
        hosts: names or addresses, each with its port.
        shown: the URL without passwords and options.
        service: the name that sentinels know it by; empty for other kinds.
        options: those of the URL, each a name and its value.
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...]
    shown: str
    tls: bool = False
    username: str | None = None
    password: str | None = None
    db: int = 0
    service: str = ""
    options: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Address({self.shown})"

    @property
    def place(self) -> str:
        """Which store it is: the same text however the address is written, and with or without TLS."""
        scheme = next(name for name, kind in SCHEMES.items() if kind == self.kind)
        hosts = ",".join(sorted({f"{host}:{port}" for host, port in self.hosts}))
        return "/".join((f"{scheme}://{hosts}", *([self.service] if self.service else []), str(self.db)))


def parse(url: str) -> Address:
    """Read a URL: hosts with commas between them, the service's name for sentinels, the number of the database.

    Raises:
        ValueError: it is no such URL; the message says which part is wrong and does not repeat it.
    """
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    place, _, path = where.partition("/")
    who, _, hosts = place.rpartition("@")
    shown = f"{scheme}://{hosts}{'/' if path else ''}{path}"
    tls = scheme.startswith("rediss")
    kind = SCHEMES.get(scheme)
    if kind is None:
        raise ValueError("this is no address of a Redis")
    user, _, password = who.partition(":")
    found = tuple(_host(one, _PORTS[kind]) for one in hosts.split(","))
    if kind == "single" and len(found) > 1:
        raise ValueError("several hosts are for redis+sentinel:// and redis+cluster://")
    service, db = _behind_hosts(kind, path)
    options = _options(query, (*(_TLS if tls else ()), *(_SENTINEL if kind == "sentinel" else ())))
    return Address(kind, found, shown, tls, unquote(user) or None, unquote(password) or None, db, service, options)


def _host(text: str, port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, named = parts.hostname, parts.port
    except ValueError:
        host, named = None, None
    if not host or parts.path or parts.query or named == 0:
        raise ValueError(
            "each host is a name or an address, with a port between 1 and 65535 where it names one; / ? # in a "
            "password are written %2F %3F %23"
        )
    return host, named or port


def _behind_hosts(kind: Kind, path: str) -> tuple[str, int]:
    """The service of sentinels, and the database."""
    steps, service = path.split("/") if path else [], ""
    if kind == "sentinel":
        service = unquote(steps.pop(0)) if steps else ""
        if not service:
            raise ValueError("behind the sentinels stands the name of their service, as in /mymaster/0")
    text = "/".join(steps) if steps else "0"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("what stands behind the hosts is the database, a number as in /0")
    if kind == "cluster" and int(text):
        raise ValueError("a cluster has no database but 0")
    return service, int(text)


def _options(query: str, known: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    try:
        found = tuple(parse_qsl(query, strict_parsing=True)) if query else ()
    except ValueError:
        raise ValueError("each option behind the question mark is NAME=VALUE") from None
    names = [name for name, _ in found]
    if not set(names) <= set(known):
        raise ValueError(f"there is no such option here; known: {', '.join(known) or 'none, without TLS (rediss://)'}")
    if len(set(names)) < len(names):
        raise ValueError("an option stands there twice")
    if dict(found).get("ssl_check_hostname", "true") not in ("true", "false"):
        raise ValueError("ssl_check_hostname is true or false")
    return found
