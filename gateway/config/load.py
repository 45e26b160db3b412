"""Find gateway.yaml, apply environment variables and flags, and validate the result.

Precedence: command line flag, environment variable (`GATEWAY_SERVER_PORT`), file, default. Only this module reads the
environment. All errors are collected before they are raised, each with its key path. No error repeats a text of the
file, because a secret can be in the wrong place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from gateway.config.access import ClientKey
from gateway.config.complaints import (
    models_without_provider,
    named_models,
    schema_errors,
    unknown_agents,
    unknown_providers,
    unshared_store,
    yaml_error,
)
from gateway.config.models import Facts
from gateway.config.notes import without_effect
from gateway.config.only import with_only
from gateway.config.providers import UNSENDABLE, Provider, is_sendable
from gateway.config.schema import Settings
from gateway.config.section import expand_home, without_huge_numbers
from gateway.config.variables import FILE_VARIABLE, REFERENCE, References, overrides, unknown_variables, with_variables
from gateway.core.counting.families import TokenizerFamilies, families_from
from gateway.core.errors import ConfigError
from gateway.core.values import dataclass

DEFAULT_FILE: Final = "gateway.yaml"
_FLAGS_VARIABLE: Final = "_GATEWAY_FLAGS"
_METRICS_VARIABLE: Final = "_GATEWAY_METRICS"
#: in place of the secret of a client key that is checked without it
_NOT_KNOWN: Final = "-" * 16
#: the flag with the one provider that replaces all others, and facts of its models
ONLY_PROVIDER: Final = "only_provider"
#: the keys with a path that is relative to the configuration
_FILES: Final = (("context", "families"), ("auth", "jwt", "key_file"))
#: values of `built_in_providers` from the environment that mean false
_FALSE: Final = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and their sources.

    `key_sources`: the variable with the key of each provider. `notes`: valid settings that may be a mistake.
    """

    settings: Settings
    file: Path | None
    key_sources: Mapping[str, str]
    notes: tuple[str, ...] = ()


def load(
    file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    search: bool = True,
) -> Loaded:
    """Read, merge and check the configuration.

    Args:
        file: the file named by `-c`. None: $GATEWAY_CONFIG, or else ./gateway.yaml, or else only defaults.
        environment: variables; None: those of the process.
        flags: values by dotted key path, which override everything else. `only_provider`: see `gateway.cli.serve`.
        search: look for a file if `file` is None.

    Raises:
        ConfigError: with all errors found.
    """
    env = os.environ if environment is None else environment
    path = _find(file, env) if search or file else None
    raw = _string_keys(_read_yaml(path)) if path is not None else {}
    built_in = _shipped("providers.yaml")
    given = dict(flags or {})
    only = given.pop(ONLY_PROVIDER, None)
    providers = _provider_names(raw, built_in, only)
    set_by = overrides(env, providers)
    for dotted, value in {**set_by, **given}.items():
        _set(raw, dotted.split("."), value)
    if isinstance(only, dict):
        raw = with_only(raw, **only)
    references = References(env)
    problems = references.problems
    own = references.into(raw, "")
    folder = path.parent if path is not None else Path()
    own = _with_absolute_paths(_with_agents(own, folder, references), folder)
    merged, unsent = _sendable(_with_built_in(own, references.into(built_in, "providers")), own, built_in)
    unset = {line.partition(":")[0] for line in problems}
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        problems += [line for line in schema_errors(error) if line.partition(":")[0] not in unset]
        problems += unknown_providers(merged)
    else:
        problems += unknown_providers(merged) + unshared_store(settings)
        problems += models_without_provider(settings) + unknown_agents(settings)
    if problems:
        raise ConfigError(with_variables(problems, set_by.keys() - given.keys()))
    sources = _key_sources(_with_built_in(raw, built_in).get("providers"), env)
    notes = (*unsent, *unknown_variables(env, providers, references.named), *without_effect(settings))
    return Loaded(settings, path, sources, notes)


def client_key(name: str, settings: Mapping[str, object]) -> ClientKey:
    """Check the settings of a client key that does not come from the file. Its secret is not known here.

    Raises:
        ConfigError: with all errors found.
    """
    try:
        return ClientKey.model_validate({**settings, "name": name, "key": _NOT_KNOWN})
    except ValidationError as error:
        raise ConfigError(schema_errors(error)) from None


def pass_on(loaded_from: Path | None, flags: Mapping[str, object]) -> None:
    """Put `-c` and the flags of a command into the environment, for its worker processes and later reloads."""
    if loaded_from is not None:
        os.environ[FILE_VARIABLE] = str(loaded_from)
    os.environ[_FLAGS_VARIABLE] = json.dumps(flags)


def share_metrics(folder: Path | None) -> None:
    """Put the folder in which workers share their metrics into the environment; None: there is only one worker."""
    os.environ.pop(_METRICS_VARIABLE, None)
    if folder is not None:
        os.environ[_METRICS_VARIABLE] = str(folder)


def shared_metrics() -> Path | None:
    """Return the folder set by `share_metrics`, or None."""
    folder = os.environ.get(_METRICS_VARIABLE)
    return Path(folder) if folder else None


def load_passed_on() -> Loaded:
    """Load the configuration with the flags that `pass_on` put into the environment.

    Raises:
        ConfigError: with all errors found.
    """
    return load(flags=json.loads(os.environ.get(_FLAGS_VARIABLE, "{}")))


def check_exposure(settings: Settings) -> None:
    """Refuse to let the whole network use a provider key.

    Raises:
        ConfigError: the host is not loopback, the gateway has a provider key, and there are no client keys.
    """
    held = sorted(
        name
        for name, provider in settings.providers.items()
        if provider.holds_credential
        # litellm finds credentials itself, in the environment or from the cloud that the machine runs in.
        or (provider.adapter == "litellm" and provider.auth == "none")
    )
    if is_loopback(settings.server.host) or settings.auth.needs_credential or not held:
        return
    problem = (
        f"auth.keys: {settings.server.host} is reachable from the network, and anyone could use the gateway's key of "
        f"{', '.join(held)}. Set auth.keys, or auth.required with keys made by gateway keys add, or listen on "
        "127.0.0.1."
    )
    raise ConfigError([problem])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.\d{1,3}){3}", host) is not None


def built_in_providers() -> frozenset[str]:
    """Return the names of the built-in providers."""
    return frozenset(_shipped("providers.yaml"))


def unused_providers(settings: Settings) -> frozenset[str]:
    """Return the built-in providers that are not in use: unchanged, without a key, and not named anywhere.

    If callers send their own provider keys, all providers are in use, because `provider/model` then says whose key is
    sent. That is the case if `default_provider` is null or unchanged, or is a provider without a key.
    """
    name = settings.default_provider
    default = settings.providers.get(name or "")
    is_own = name != Settings.model_fields["default_provider"].default
    if default is None or not is_own or not (default.auth == "none" or default.holds_credential):
        return frozenset()
    used = named_providers(settings)
    return frozenset(name for name, row in settings.providers.items() if name not in used and row.auth != "none")


def named_providers(settings: Settings) -> frozenset[str]:
    """Return the providers in use: those that were added or changed, and those that the configuration names.

    The configuration names the default provider and the providers of its routes and models.
    """
    shipped = _shipped("providers.yaml")
    named = {settings.default_provider, *(name.partition("/")[0] for _, name in named_models(settings))}
    named.update(name for row in settings.models for name in row.providers)
    return frozenset(
        name
        for name, row in settings.providers.items()
        if name in named or name not in shipped or not _is_unchanged(row, shipped[name])
    )


def _is_unchanged(row: Provider, shipped: Mapping[str, Any]) -> bool:
    """Return whether a built-in provider was not configured. Setting the variable of its address configures it."""
    has_address = REFERENCE.search(shipped["base_url"]) is None
    return has_address and row == Provider.model_validate({**shipped, "key": ""})


def families(own: str = "", vocabularies: Collection[str] = ()) -> TokenizerFamilies:
    """Load the numbers of the model families: those of the user's file first, then config/families.yaml.

    Args:
        own: `context.families`; empty for none.
        vocabularies: the optional tokenizers that are installed.

    Raises:
        ConfigError: the content of a file is invalid.
    """
    if not own:
        return _shipped_families(frozenset(vocabularies))
    try:
        return families_from(_shipped("families.yaml"), _read_yaml(expand_home(own)), vocabularies)
    except ConfigError as error:
        raise ConfigError([f"context.families: {problem}" for problem in error.problems]) from None
    except ValueError as error:
        raise ConfigError([f"context.families: {error}"]) from None


def template() -> str:
    """Return the commented gateway.yaml that `gateway init` writes: every key with its default."""
    installed = Path(__file__).parent.parent / "data" / DEFAULT_FILE
    return (installed if installed.is_file() else Path(__file__).parent.parent.parent / DEFAULT_FILE).read_text("utf-8")


def data_folder() -> Path:
    """Return the folder of the tables in the package: config/ in a checkout, gateway/data/ once installed."""
    installed = Path(__file__).parent.parent / "data"
    return installed if installed.is_dir() else Path(__file__).parent.parent.parent / "config"


def model_facts(file: Path | None = None) -> dict[str, Facts]:
    """Load the facts in config/models.yaml, by model.

    Raises:
        ConfigError: the content of the file is invalid.
    """
    return _read_facts(file) if file is not None else dict(_shipped_facts())


@functools.cache
def _shipped_facts() -> dict[str, Facts]:
    return _read_facts(data_folder() / "models.yaml")


def _read_facts(path: Path) -> dict[str, Facts]:
    problems: list[str] = []
    facts: dict[str, Facts] = {}
    for name, row in _read_yaml(path).items():
        try:
            facts[str(name)] = Facts.model_validate(row)
        except ValidationError as error:
            problems += [f"{path.name}: {name}.{line}" for line in schema_errors(error)]
    if problems:
        raise ConfigError(problems)
    return facts


def _shipped(name: str) -> dict[str, Any]:
    """Return a new copy of a table in the package."""
    return copy.deepcopy(_parsed(name))


@functools.cache
def _parsed(name: str) -> dict[str, Any]:
    """Parse a table in the package once, because a start needs some of them several times."""
    return _read_yaml(data_folder() / name)


@functools.cache
def _shipped_families(vocabularies: frozenset[str]) -> TokenizerFamilies:
    return families_from(_shipped("families.yaml"), vocabularies=vocabularies)


def _find(file: Path | None, env: Mapping[str, str]) -> Path | None:
    named = file or (Path(env[FILE_VARIABLE]) if env.get(FILE_VARIABLE) else None)
    if named is not None:
        _check_file(named)
        return named
    here = Path(DEFAULT_FILE)
    return here if here.is_file() else None


def _check_file(named: Path) -> None:
    try:
        mode = named.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError([f"{named}: there is no such file; create it with: gateway init {named}"]) from None
    except OSError as error:
        raise ConfigError([f"{named}: cannot be read: {error.strerror}"]) from None
    if stat.S_ISDIR(mode):
        raise ConfigError([f"{named}: is a folder; name the file in it, such as {named / DEFAULT_FILE}"])
    if not stat.S_ISREG(mode):
        raise ConfigError([f"{named}: is not a regular file, so it cannot be read again on a reload"])


def _read_yaml(path: Path) -> dict[Any, Any]:
    loader, text = getattr(yaml, "CSafeLoader", yaml.SafeLoader), ""
    try:
        text = path.read_text("utf-8")
        parser = loader(text)
        try:
            root = parser.get_single_node()
            duplicates = list(_duplicate_keys(root, "", set()))
            value = parser.construct_document(root) if root is not None and not duplicates else None
        finally:
            parser.dispose()
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it is not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError([f"{path}: is not valid YAML{yaml_error(error, text)}"]) from None
    if duplicates:
        raise ConfigError(duplicates)
    if value is None:
        return {}
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a text" if isinstance(value, str) else "a single value"
        raise ConfigError([f"{path}: must contain keys and values, like server: {{port: 8484}}, not {kind}"])
    return value


def _duplicate_keys(node: yaml.Node | None, path: str, seen: set[int]) -> Iterator[str]:
    """Yield an error for each key that is in a block twice. YAML itself silently uses the last one."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield from _duplicate_keys(inner, f"{path}[{index}]", seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                yield from _duplicate_keys(inner, path, seen)
                continue
            place, line = f"{path}.{key.value}" if path else key.value, key.start_mark.line + 1
            if key.value in lines:
                yield f"{place}: is set twice, in lines {lines[key.value]} and {line}; keep one"
            lines[key.value] = line
            yield from _duplicate_keys(inner, place, seen)


def _string_keys(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Convert keys to text, which YAML can read as numbers or booleans, and replace too large numbers by infinity."""
    if id(value) in seen:
        raise ConfigError(["(whole file): an alias refers to a block that contains it"])
    if isinstance(value, dict):
        return {str(without_huge_numbers(key)): _string_keys(inner, (*seen, id(value))) for key, inner in value.items()}
    if isinstance(value, list):
        return [_string_keys(inner, (*seen, id(value))) for inner in value]
    return without_huge_numbers(value)


def _with_built_in(own: dict[str, Any], built_in: Mapping[str, Any]) -> dict[str, Any]:
    """Add the built-in providers to a configuration, whose own keys override theirs."""
    if str(own.get("built_in_providers", True)).lower() in _FALSE:
        built_in = {}
    blocks = own.get("providers")
    if blocks is not None and not isinstance(blocks, dict):
        return own  # the schema reports the error
    known = {name: _addressed(block) for name, block in built_in.items()}
    merged = {name: block for name, block in known.items() if "base_url" in block}
    for name, block in (blocks or {}).items():
        base = known.get(name)
        if isinstance(base, dict) and isinstance(block, dict):
            # A provider with another address must not get the key that was meant for the old address.
            kept = {**base, "key": ""} if "base_url" in block or block.get("auth") == "none" else base
            if block.get("adapter") == "litellm":
                kept = {name: value for name, value in kept.items() if name in ("key", "key_prefixes")}
            merged[name] = {**kept, **block}
        else:
            merged[name] = block
    return {**own, "providers": merged}


def _sendable(
    merged: dict[str, Any], own: Mapping[str, Any], built_in: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Remove keys that cannot be sent and come from variables of built-in providers; add a note for each of them.

    The configuration does not ask for these keys. Another program may have set the variables.
    """
    blocks, named = merged.get("providers"), own.get("providers") or {}
    if not isinstance(blocks, dict) or not isinstance(named, dict):
        return merged, []
    cleaned, notes = dict(blocks), list[str]()
    for name, base in built_in.items():
        own_block, block, match = named.get(name), blocks.get(name), REFERENCE.fullmatch(base.get("key", ""))
        if match is None or not isinstance(block, dict) or (isinstance(own_block, dict) and "key" in own_block):
            continue
        if not is_sendable(block.get("key", "")):
            notes.append(f"{match[1]}: {UNSENDABLE}; the gateway ignores it and has no key of {name}")
            cleaned[name] = {**block, "key": ""}
    return {**merged, "providers": cleaned}, notes


def _with_agents(own: dict[str, Any], folder: Path, references: References) -> dict[str, Any]:
    """Replace the paths of agent files, relative to the configuration, by the content of the files."""
    agents = own.get("agents")
    if not isinstance(agents, dict):
        return own
    read = dict(agents)
    for name, value in agents.items():
        if isinstance(value, str):
            try:
                content = _string_keys(_read_yaml(folder / expand_home(value)))
            except ConfigError as error:
                references.problems.extend(f"agents.{name}: {problem}" for problem in error.problems)
            except ValueError as error:
                references.problems.append(f"agents.{name}: {error}")
            else:
                read[name] = references.into(content, f"agents.{name}")
    return {**own, "agents": read}


def _with_absolute_paths(own: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths of files, which are relative to the configuration, absolute."""
    for keys in _FILES:
        own = _with_absolute_path(own, keys, folder.absolute())
    return own


def _with_absolute_path(block: dict[str, Any], keys: Sequence[str], folder: Path) -> dict[str, Any]:
    name, *inner = keys
    value = block.get(name)
    if inner and isinstance(value, dict):
        return {**block, name: _with_absolute_path(value, inner, folder)}
    if inner or not isinstance(value, str) or not value.strip() or "\0" in value:
        return block
    with contextlib.suppress(ValueError):  # reported where the file is read
        value = str(folder / expand_home(value.strip()))
    return {**block, name: value}


def _addressed(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a built-in provider, without its address if the variable with the host is not set."""
    return {key: value for key, value in block.items() if key != "base_url" or not value.startswith("/")}


def _provider_names(raw: Mapping[str, Any], built_in: Mapping[str, Any], only: object) -> list[str]:
    """Return the providers whose keys variables can set, including the one that a flag sets."""
    own = raw.get("providers")
    flagged = [only["name"]] if isinstance(only, dict) else []
    return list(dict.fromkeys([*built_in, *(own if isinstance(own, dict) else ()), *flagged]))


def _set(target: dict[str, Any], path: Sequence[str], value: object) -> None:
    for name in path[:-1]:
        inner = target.get(name)
        if not isinstance(inner, dict):
            inner = {}
        target[name] = inner = dict(inner)
        target = inner
    target[path[-1]] = value


def _key_sources(providers: object, env: Mapping[str, str]) -> dict[str, str]:
    sources: dict[str, str] = {}
    for name, block in providers.items() if isinstance(providers, dict) else ():
        key = block.get("key") if isinstance(block, dict) else None
        match = REFERENCE.fullmatch(key) if isinstance(key, str) else None
        if match and env.get(match[1]):
            sources[str(name)] = match[1]
        elif isinstance(key, str) and key and (match is None or match[2]):
            sources[str(name)] = "configuration"
    return sources
