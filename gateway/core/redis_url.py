"""`redis://`, `rediss://`, `redis+sentinel://` and `redis+cluster://`: where a Redis is, and how it is spoken to.

Options may follow as in other URLs, behind a question mark: for TLS, and what sentinels are told.
"""

from __future__ import annotations

from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from gateway.core.values import dataclass

_PORTS: Final = {"single": 6379, "sentinel": 26379, "cluster": 6379}
#: files of the certificates that are trusted, of our own one and of its key, and whether names have to match
_TLS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_SENTINEL: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class Address:
    """Where and how.

    Attributes:
        shown: names it without passwords and options.
        options: those of the URL, each a name and its value.
    """

    kind: Literal["single", "sentinel", "cluster"]
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


def parse(url: str) -> Address:
    """Read a URL: hosts with commas between them, the service's name for sentinels, the number of the database.

    Raises:
        ValueError: it is none; the message does not repeat it.
    """
    kinds: dict[str, Literal["single", "sentinel", "cluster"]] = {
        **dict.fromkeys(("redis", "rediss"), "single"),
        **dict.fromkeys(("redis+sentinel", "rediss+sentinel"), "sentinel"),
        **dict.fromkeys(("redis+cluster", "rediss+cluster"), "cluster"),
    }
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    place, _, path = where.partition("/")
    who, _, hosts = place.rpartition("@")
    shown = f"{scheme}://{hosts}{'/' if path else ''}{path}"
    tls = scheme.startswith("rediss")
    try:
        kind = kinds[scheme]
        user, _, password = who.partition(":")
        steps = path.split("/") if path else []
        service = unquote(steps.pop(0)) if kind == "sentinel" else ""
        db = int(steps.pop(0)) if steps else 0
        found = tuple(_host(one, _PORTS[kind]) for one in hosts.split(","))
        is_ours = not steps and db >= 0 and (kind != "cluster" or not db) and (kind != "single" or len(found) == 1)
        if not is_ours or (kind == "sentinel" and not service):
            raise ValueError(path)
        options = _options(query, (*(_TLS if tls else ()), *(_SENTINEL if kind == "sentinel" else ())))
    except (KeyError, ValueError, IndexError):
        raise ValueError("this is no address of a Redis") from None
    return Address(kind, found, shown, tls, unquote(user) or None, unquote(password) or None, db, service, options)


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.path or parts.query:
        raise ValueError(text)
    return parts.hostname, parts.port or port


def _options(query: str, known: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = tuple(parse_qsl(query, strict_parsing=True)) if query else ()
    names = [name for name, _ in found]
    is_ours = len(set(names)) == len(names) and set(names) <= set(known)
    if not is_ours or dict(found).get("ssl_check_hostname", "true") not in ("true", "false"):
        raise ValueError(query)
    return found
