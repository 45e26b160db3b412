"""Read settings from environment variables, and replace `${NAME}` in texts.

No line repeats what a variable holds: it may be a secret.
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
from gateway.config.section import in_sight
from gateway.core.values import dataclass

#: names the file where `-c` does not
FILE_VARIABLE: Final = "GATEWAY_CONFIG"
#: how a text of the file names one
REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_PREFIX: Final = "GATEWAY_"
_PROVIDERS: Final = f"{_PREFIX}PROVIDERS_"
_OURS: Final = re.compile(rf"{_PREFIX}\w+", re.ASCII)
#: What Kubernetes puts into each pod for a Service named `gateway` or `gateway-…`. One with `enableServiceLinks: false`
#: gets none of it.
_SERVICE: Final = re.compile(r"GATEWAY_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_PORT: Final = re.compile(r"(tcp|udp|sctp)://")
#: how alike a name must be to be proposed, where other names are: keys of two providers are quite alike
_SAME_PROVIDER: Final = 0.9


def overrides(env: Mapping[str, str], providers: Iterable[str]) -> dict[str, object]:
    """Key path -> value of every variable that names a key.

    One that is empty says nothing, as with `${NAME:-default}`: compose files and charts pass on variables that nobody
    set, and taken as null that would lift a budget or open the door. What is to be null is written so.
    """
    found: dict[str, object] = {}
    for dotted, is_text in _leaves(Settings, "", list(providers)):
        text = env.get(_variable(dotted))
        if text is not None and text.strip():
            found[dotted] = text if is_text and text != "null" else _parse_scalar(text)
    return found


def with_variables(problems: Iterable[str], overridden: Iterable[str]) -> list[str]:
    """Problems; those of keys that a variable overrides with its name, as the file may say something else."""
    keys = sorted(overridden)
    return [
        next((f"{line} (from {_variable(key)})" for key in keys if re.match(rf"{re.escape(key)}[:.\[]", line)), line)
        for line in problems
    ]


def unknown_variables(env: Mapping[str, str], providers: Iterable[str], named: Iterable[str] = ()) -> list[str]:
    """A line for each variable that looks like a key and is none. They are no error: somebody else may have set them.

    Args:
        env: the environment.
        providers: their names, which are parts of keys.
        named: the variables that stand in the file.
    """
    names = list(providers)
    keys = [_variable(dotted) for dotted, _ in _leaves(Settings, "", names)]
    known = {*keys, *named, FILE_VARIABLE}
    return [
        f"{name}: this variable sets nothing: {_why(name, keys, names)}"
        for name, value in sorted(env.items())
        if _OURS.fullmatch(name) and name not in known and not _is_of_kubernetes(name, value)
    ]


def _is_of_kubernetes(name: str, value: str) -> bool:
    """Whether it tells a pod of a Service. `GATEWAY_PORT` does where it holds an address, as `tcp://10.0.0.1:80`."""
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and _SERVICE_PORT.match(value) is not None)


def _why(name: str, keys: list[str], providers: list[str]) -> str:
    blocks = tuple(_variable(f"providers.{provider}.") for provider in providers)
    if name.startswith(_PROVIDERS) and not name.startswith(blocks):
        meant = _nearest(name, keys, _SAME_PROVIDER)
        return f"no such provider is configured{meant}; it has to stand in the file first, below providers:"
    return f"there is no such key{_nearest(name, keys)}"


def _nearest(name: str, keys: Iterable[str], cutoff: float = ALIKE) -> str:
    rests = [key.removeprefix(_PREFIX) for key in keys]  # the prefix they share would make all look alike
    return did_you_mean(name.removeprefix(_PREFIX).upper(), rests, cutoff=cutoff, before=_PREFIX)


def _variable(dotted: str) -> str:
    return _PREFIX + re.sub(r"[.-]", "_", dotted).upper()


def _leaves(section: type[BaseModel], prefix: str, providers: list[str]) -> Iterator[tuple[str, bool]]:
    """(key path, whether its value is text and so is not to be read as YAML) of every key."""
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
        return in_sight(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # a date that there is not; brackets without end
        return text


@dataclass(frozen=True, slots=True)
class References:
    """Puts variables in where the file names them. `problems`: of those that are not set; `named`: all."""

    env: Mapping[str, str]
    problems: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)

    def into(self, value: Any, path: str) -> Any:
        """The value of a key path, with the variables in its texts and those of all below it."""
        if isinstance(value, str):
            return REFERENCE.sub(lambda match: self._held(match[1], match[2], path), value)
        if isinstance(value, dict):
            return {str(key): self.into(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.into(inner, f"{path}[{index}]") for index, inner in enumerate(value)]
        return value

    def _held(self, name: str, default: str | None, path: str) -> str:
        self.named.add(name)
        found = self.env.get(name)
        if found is None and default is None:
            self.problems.append(
                f"{path}: the environment variable {name} is not set; set it or write ${{{name}:-default}}"
            )
        # As in a shell, `:-` also stands in for a variable that is empty.
        return found or default or ""
