"""Reading gateway.yaml: find it, lay environment and flags over it, and check the whole.

Every complaint names its key path; all are collected before one is raised. Order of precedence: command line flag,
environment (`GATEWAY_SERVER_PORT`), file, default. Environment variables are read here and nowhere else. No complaint
repeats a text that stands in the file: a secret may stand in the wrong place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from gateway.config.complaints import described, served_by_nobody, unknown_agents, unknown_providers, unshared_store
from gateway.config.schema import Facts, KeyBudget, Provider, Settings
from gateway.core.counting.families import Families, families_from
from gateway.core.errors import ConfigError
from gateway.core.forwarding import CREDENTIALS

DEFAULT_FILE: Final = "gateway.yaml"
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ENV_PREFIX: Final = "GATEWAY_"
_FLAGS_VARIABLE: Final = "_GATEWAY_FLAGS"
_METRICS_VARIABLE: Final = "_GATEWAY_METRICS"
#: what `built_in_providers` may read where it comes from the environment
_FALSE: Final = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where they came from. `key_sources`: provider -> the variable its key was read from."""

    settings: Settings
    file: Path | None
    key_sources: Mapping[str, str]


def load(
    file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    search: bool = True,
) -> Loaded:
    """Read, merge and check the configuration.

    Args:
        file: as `-c` names it; None looks at $GATEWAY_CONFIG, then ./gateway.yaml, then uses the defaults.
        environment: variables; None takes the process's.
        flags: dotted key path -> value; these beat everything else.
        search: whether to look for a file where none is named.

    Raises:
        ConfigError: with every problem found.
    """
    env = os.environ if environment is None else environment
    path = _find(file, env) if search or file else None
    raw = _string_keys(_read_yaml(path)) if path is not None else {}
    built_in = _read_yaml(data_folder() / "providers.yaml")
    for dotted, value in {**_overrides(raw, built_in, env), **(flags or {})}.items():
        _set(raw, dotted.split("."), value)
    problems: list[str] = []
    own = _expand(raw, env, "", problems)
    own = _with_agents(own, path.parent if path is not None else Path(), env, problems)
    merged = _with_built_in(own, _expand(built_in, env, "providers", problems))
    unset = {line.partition(":")[0] for line in problems}
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        problems += [line for line in described(error) if line.partition(":")[0] not in unset]
        problems += unknown_providers(merged)
    else:
        problems += unknown_providers(merged) + unshared_store(settings)
        problems += served_by_nobody(settings) + unknown_agents(settings)
    if problems:
        raise ConfigError(problems)
    return Loaded(settings, path, _key_sources(_with_built_in(raw, built_in).get("providers"), env))


def key_budget(values: Mapping[str, object]) -> KeyBudget:
    """A client key's budget from elsewhere than the file.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return KeyBudget.model_validate(values)
    except ValidationError as error:
        raise ConfigError(described(error)) from None


def pass_on(loaded_from: Path | None, flags: Mapping[str, object]) -> None:
    """Leave a command's `-c` and flags where its worker processes and later reloads find them."""
    if loaded_from is not None:
        os.environ["GATEWAY_CONFIG"] = str(loaded_from)
    os.environ[_FLAGS_VARIABLE] = json.dumps(flags)


def share_metrics(folder: Path | None) -> None:
    """Leave word for worker processes of where they keep their figures for each other; None: there is one worker."""
    os.environ.pop(_METRICS_VARIABLE, None)
    if folder is not None:
        os.environ[_METRICS_VARIABLE] = str(folder)


def shared_metrics() -> Path | None:
    """What `share_metrics` said."""
    folder = os.environ.get(_METRICS_VARIABLE)
    return Path(folder) if folder else None


def load_passed_on() -> Loaded:
    """`load` as the command did that called `pass_on`.

    Raises:
        ConfigError: as `load`.
    """
    return load(flags=json.loads(os.environ.get(_FLAGS_VARIABLE, "{}")))


def refuse_open_door(settings: Settings) -> None:
    """Refuse to offer a held provider key to the whole network.

    Raises:
        ConfigError: the host is not loopback, a provider key is held, and there are no client keys.
    """
    held = sorted(
        name
        for name, provider in settings.providers.items()
        if provider.key.get_secret_value()
        or CREDENTIALS & {header.encode() for header in provider.headers}
        # litellm finds one by itself: in the environment, or where the machine's cloud gives it one.
        or (provider.adapter == "litellm" and provider.auth == "none")
    )
    if is_loopback(settings.server.host) or settings.auth.keys or settings.auth.required or not held:
        return
    problem = (
        f"auth.keys: {settings.server.host} is reachable from the network and the gateway holds the key of "
        f"{', '.join(held)}, so anyone could spend it. Set auth.keys, or auth.required with "
        "keys made by gateway keys add, or listen on 127.0.0.1."
    )
    raise ConfigError([problem])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.\d{1,3}){3}", host) is not None


def built_in_providers() -> frozenset[str]:
    """The names of the providers that need no configuration."""
    return frozenset(_read_yaml(data_folder() / "providers.yaml"))


def families() -> Families:
    """The numbers of the model families in config/families.yaml.

    Raises:
        ConfigError: they are not such numbers.
    """
    return families_from(_read_yaml(data_folder() / "families.yaml"))


def template() -> str:
    """The commented gateway.yaml that `gateway init` writes: every key, with its default."""
    installed = Path(__file__).parent.parent / "data" / DEFAULT_FILE
    return (installed if installed.is_file() else Path(__file__).parent.parent.parent / DEFAULT_FILE).read_text("utf-8")


def data_folder() -> Path:
    """The folder of the tables that ship with the package: config/ of a checkout, gateway/data/ once installed."""
    installed = Path(__file__).parent.parent / "data"
    return installed if installed.is_dir() else Path(__file__).parent.parent.parent / "config"


def model_facts(file: Path | None = None) -> dict[str, Facts]:
    """The table of config/models.yaml.

    Raises:
        ConfigError: it is not a table of facts.
    """
    path = file or data_folder() / "models.yaml"
    problems: list[str] = []
    found: dict[str, Facts] = {}
    for name, row in _read_yaml(path).items():
        try:
            found[str(name)] = Facts.model_validate(row)
        except ValidationError as error:
            problems += [f"{path.name}: {name}.{line}" for line in described(error)]
    if problems:
        raise ConfigError(problems)
    return found


def _find(file: Path | None, env: Mapping[str, str]) -> Path | None:
    named = file or (Path(env["GATEWAY_CONFIG"]) if env.get("GATEWAY_CONFIG") else None)
    if named is not None:
        if not named.is_file():
            raise ConfigError([f"{named}: there is no such file; write one with: gateway init {named}"])
        return named
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def _read_yaml(path: Path) -> dict[Any, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        parser = loader(path.read_text("utf-8"))
        try:
            root = parser.get_single_node()
            twice = list(_twice(root, "", set()))
            value = parser.construct_document(root) if root is not None and not twice else None
        finally:
            parser.dispose()
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it is not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError([f"{path}: is not valid YAML{place}"]) from None
    if twice:
        raise ConfigError(twice)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError([f"{path}: must hold keys and values, not {type(value).__name__}"])
    return value


def _twice(node: yaml.Node | None, path: str, seen: set[int]) -> Iterator[str]:
    """A complaint for each key that stands twice in a block: YAML itself would silently take the last."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield from _twice(inner, f"{path}[{index}]", seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                yield from _twice(inner, path, seen)
                continue
            place, line = f"{path}.{key.value}" if path else key.value, key.start_mark.line + 1
            if key.value in lines:
                yield f"{place}: stands here twice, in lines {lines[key.value]} and {line}; keep one"
            lines[key.value] = line
            yield from _twice(inner, place, seen)


def _string_keys(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """YAML reads some keys as numbers or booleans; all of ours are words."""
    if id(value) in seen:
        raise ConfigError(["(whole file): an alias refers to what contains it"])
    if isinstance(value, dict):
        return {str(key): _string_keys(inner, (*seen, id(value))) for key, inner in value.items()}
    if isinstance(value, list):
        return [_string_keys(inner, (*seen, id(value))) for inner in value]
    return value


def _with_built_in(own: dict[str, Any], built_in: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the built-in providers under its own ones, key by key."""
    if str(own.get("built_in_providers", True)).lower() in _FALSE:
        built_in = {}
    blocks = own.get("providers")
    if blocks is not None and not isinstance(blocks, dict):
        return own  # the schema says what is wrong with it
    known = {name: _addressed(block) for name, block in built_in.items()}
    merged = {name: block for name, block in known.items() if "base_url" in block}
    for name, block in (blocks or {}).items():
        base = known.get(name)
        if isinstance(base, dict) and isinstance(block, dict):
            # A provider moved to another address must not get the key that was meant for the old one.
            kept = {**base, "key": ""} if "base_url" in block or block.get("auth") == "none" else base
            if block.get("adapter") == "litellm":
                kept = {name: value for name, value in kept.items() if name in ("key", "key_prefixes")}
            merged[name] = {**kept, **block}
        else:
            merged[name] = block
    return {**own, "providers": merged}


def _with_agents(own: dict[str, Any], folder: Path, env: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """The configuration with what stands in the files of agents, which are looked for beside it."""
    agents = own.get("agents")
    if not isinstance(agents, dict):
        return own
    read = dict(agents)
    for name, value in agents.items():
        if isinstance(value, str):
            try:
                content = _string_keys(_read_yaml(folder / Path(value).expanduser()))
            except ConfigError as error:
                problems += [f"agents.{name}: {problem}" for problem in error.problems]
            else:
                read[name] = _expand(content, env, f"agents.{name}", problems)
    return {**own, "agents": read}


def _addressed(block: Mapping[str, Any]) -> dict[str, Any]:
    """A built-in provider; without its address where nobody has named the host."""
    return {key: value for key, value in block.items() if key != "base_url" or not value.startswith("/")}


def _overrides(raw: Mapping[str, Any], built_in: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, object]:
    """Key path -> value of every `GATEWAY_A_B` that names a key; others are somebody else's (Kubernetes sets some)."""
    own = raw.get("providers")
    names = list(dict.fromkeys([*built_in, *(own if isinstance(own, dict) else ())]))
    found: dict[str, object] = {}
    for dotted, is_text in _leaves(Settings, "", names):
        text = env.get(_ENV_PREFIX + re.sub(r"[.-]", "_", dotted).upper())
        if text is not None:
            found[dotted] = text if is_text and text != "null" else _parse_scalar(text)
    return found


def _leaves(section: type[BaseModel], prefix: str, providers: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """(key path, whether its value is text and so is not to be read as YAML) of every key."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _leaves(annotation, f"{path}.", ())
        elif get_origin(annotation) is dict and get_args(annotation)[1] is Provider:
            for provider in providers:
                yield from _leaves(Provider, f"{path}.{provider}.", ())
        else:
            union = get_origin(annotation) in (Union, UnionType)
            types = get_args(annotation) if union else (annotation,)
            yield path, any(getattr(kind, "__name__", "") in ("str", "SecretStr", "Path") for kind in types)


def _parse_scalar(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _set(target: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        inner = target.get(name)
        if not isinstance(inner, dict):
            inner = {}
        target[name] = inner = dict(inner)
        target = inner
    target[path[-1]] = value


def _key_sources(providers: object, env: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, block in providers.items() if isinstance(providers, dict) else ():
        key = block.get("key") if isinstance(block, dict) else None
        match = _VARIABLE.fullmatch(key) if isinstance(key, str) else None
        if match and env.get(match[1]):
            found[str(name)] = match[1]
        elif isinstance(key, str) and key and not match:
            found[str(name)] = "configuration"
    return found


def _expand(value: Any, env: Mapping[str, str], path: str, problems: list[str]) -> Any:
    if isinstance(value, str):

        def replace(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            found = env.get(name)
            if found is None and default is None:
                problems.append(
                    f"{path}: the environment variable {name} is not set; set it or write ${{{name}:-default}}"
                )
            # As in a shell, `:-` also stands in for a variable that is empty.
            return found or default or ""

        return _VARIABLE.sub(replace, value)
    if isinstance(value, dict):
        return {
            str(key): _expand(inner, env, f"{path}.{key}" if path else str(key), problems)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_expand(inner, env, f"{path}[{index}]", problems) for index, inner in enumerate(value)]
    return value
