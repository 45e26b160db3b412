"""Read settings from environment variables, and replace `${NAME}` in texts.

No message repeats the value of a variable, because it can be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from gateway.config.complaints import ALIKE, did_you_mean
from gateway.config.providers import Provider
from gateway.config.schema import Settings
from gateway.config.section import without_huge_numbers
from gateway.core.values import dataclass

#: names the configuration file if `-c` does not
FILE_VARIABLE: Final = "GATEWAY_CONFIG"
#: a reference to a variable in a text of the file
REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_PREFIX: Final = "GATEWAY_"
_PROVIDERS: Final = f"{_PREFIX}PROVIDERS_"
_OURS: Final = re.compile(rf"{_PREFIX}\w+", re.ASCII)
#: Variables that Kubernetes sets in each pod for a Service named `gateway` or `gateway-…`, unless
#: `enableServiceLinks: false`.
_SERVICE: Final = re.compile(r"GATEWAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_PORT: Final = re.compile(r"(tcp|udp|sctp)://")
#: least similarity of a suggestion for a provider key, because keys of two providers are similar anyway
_SAME_PROVIDER: Final = 0.9


def overrides(env: Mapping[str, str], providers: Iterable[str]) -> dict[str, object]:
    """Return the values that environment variables set, by key path.

    An empty variable sets nothing, as with `${NAME:-default}`. Compose files and charts pass on unset variables, and
    null instead would remove a budget or admit every caller. Write `null` to set null.
    """
    values: dict[str, object] = {}
    for dotted, is_text in _leaves(Settings, "", list(providers)):
        text = env.get(_variable(dotted))
        if text is not None and text.strip():
            values[dotted] = text if is_text and text != "null" else _parse_scalar(text)
    return values


def with_variables(problems: Iterable[str], overridden: Iterable[str]) -> list[str]:
    """Append the name of the variable to each error about a key that a variable sets."""
    keys = sorted(overridden)
    return [
        next((f"{line} (from {_variable(key)})" for key in keys if re.match(rf"{re.escape(key)}[:.\[]", line)), line)
        for line in problems
    ]


def unknown_variables(env: Mapping[str, str], providers: Iterable[str], named: Iterable[str] = ()) -> list[str]:
    """Return a note for each variable that looks like a key and is none. It can belong to another program.

    Args:
        env: the environment.
        providers: the names of providers, which are parts of keys.
        named: the variables that the file refers to.
    """
    names = list(providers)
    keys = [_variable(dotted) for dotted, _ in _leaves(Settings, "", names)]
    known = {*keys, *named, FILE_VARIABLE}
    return [
        f"{name}: this variable has no effect: {_why(name, keys, names)}"
        for name, value in sorted(env.items())
        if _OURS.fullmatch(name) and name not in known and not _is_of_kubernetes(name, value)
    ]


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Return whether Kubernetes set the variable for a Service, such as `GATEWAY_PORT` with `tcp://10.0.0.1:80`."""
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and _SERVICE_PORT.match(value) is not None)


def _why(name: str, keys: list[str], providers: list[str]) -> str:
    blocks = tuple(_variable(f"providers.{provider}.") for provider in providers)
    if name.startswith(_PROVIDERS) and not name.startswith(blocks):
        meant = _nearest(name, keys, _SAME_PROVIDER)
        return f"this provider is not configured{meant}; add it to the file under providers: first"
    return f"unknown key{_nearest(name, keys)}"


def _nearest(name: str, keys: Iterable[str], cutoff: float = ALIKE) -> str:
    rests = [key.removeprefix(_PREFIX) for key in keys]  # the common prefix would make all names similar
    return did_you_mean(name.removeprefix(_PREFIX).upper(), rests, cutoff=cutoff, before=_PREFIX)


def _variable(dotted: str) -> str:
    return _PREFIX + re.sub(r"[.-]", "_", dotted).upper()


def _leaves(section: type[BaseModel], prefix: str, providers: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the path of every key, and whether its value is text, which is not parsed as YAML."""
    for name, item in section.model_fields.items():
        path = f"{prefix}{name}"
        annotation = item.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _leaves(annotation, f"{path}.", [])
        elif get_origin(annotation) is dict and get_args(annotation)[1] is Provider:
            for provider in providers:
                yield from _leaves(Provider, f"{path}.{provider}.", [])
        else:
            union = get_origin(annotation) in (Union, UnionType)
            types = get_args(annotation) if union else (annotation,)
            yield path, any(getattr(kind, "__name__", "") in ("str", "SecretStr", "Path") for kind in types)


def _parse_scalar(text: str) -> object:
    try:
        return without_huge_numbers(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # an impossible date; unclosed brackets
        return text


@dataclass(frozen=True, slots=True)
class References:
    """Replace references to variables. `problems`: errors about unset variables. `named`: all variables referred to."""

    env: Mapping[str, str]
    problems: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)

    def into(self, value: Any, path: str) -> Any:
        """Return the value of a key path with all references in its texts replaced."""
        if isinstance(value, str):
            return REFERENCE.sub(lambda match: self._value_of(match[1], match[2], path), value)
        if isinstance(value, dict):
            return {str(key): self.into(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.into(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
        return value

    def _value_of(self, name: str, default: str | None, path: str) -> str:
        self.named.add(name)
        value = self.env.get(name)
        if value is None and default is None:
            self.problems.append(
                f"{path}: the environment variable {name} is not set; set it or write ${{{name}:-default}}"
            )
        # As in a shell, `:-` also replaces an empty variable.
        return value or default or ""
