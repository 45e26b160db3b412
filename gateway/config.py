"""gateway.yaml -> frozen `Settings`. Every complaint names its key path; all are collected before one is raised.

Order of precedence: command line flag, environment (`GATEWAY_SERVER_PORT`), file, default. Environment variables are
read here and nowhere else.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from gateway.core.errors import ConfigError
from gateway.core.identity import is_valid

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_DURATION: Final = re.compile(r"(\d+)([smhd])\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ENV_PREFIX: Final = "GATEWAY_"
_FLAGS_VARIABLE: Final = "_GATEWAY_FLAGS"
DEFAULT_FILE: Final = "gateway.yaml"

Positive = Annotated[float, Field(gt=0)]


def duration(text: str) -> int:
    """Seconds of `90s`, `15m`, `12h`, `30d`.

    Raises:
        ValueError: it is none of these.
    """
    match = _DURATION.match(text)
    if match is None or int(match[1]) == 0:
        raise ValueError("must be a duration like 90s, 15m, 12h or 30d")
    return int(match[1]) * _SECONDS[match[2]]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, str_strip_whitespace=True)


class Server(_Section):
    """Where the gateway listens and what it takes."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8484, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=256, description="Processes. More than one needs a store they share.")
    max_body_mb: Positive = Field(64, description="Largest request body, also once unpacked (MiB).")
    max_concurrency: int = Field(1024, ge=1, description="Calls under way in one worker; above it 503 at once.")
    max_header_kb: Positive = Field(64, description="All headers of one request (KiB); above it 431.")
    header_timeout_s: Positive = Field(20, description="Time to send a request's head.")
    body_timeout_s: Positive = Field(30, description="Longest silence while a body is being sent.")
    shutdown_grace_s: float = Field(30, ge=0, description="Time that running calls get when the gateway is stopped.")


class ClientKey(_Section):
    """One client key."""

    name: str = Field(description="Its sessions are kept under this name.")
    key: SecretStr = Field(description="The key itself, at least 16 characters; best as ${VARIABLE}.")
    models: tuple[str, ...] = Field((), description="Shell patterns of the models it may call; empty: all.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not is_valid(value):
            raise ValueError("use 1-255 characters of A-Z a-z 0-9 . _ : -")
        return value

    @field_validator("key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value()) < 16:  # noqa: PLR2004  # 16 random characters are 80 bits and more
            raise ValueError("a key needs at least 16 characters")
        return value


class Auth(_Section):
    """Who may call."""

    keys: tuple[ClientKey, ...] = Field((), description="Client keys. Empty: open; then listen on loopback only.")
    admin_key: SecretStr | None = Field(
        None, description="Needed for writes under /api when set; when unset those are for loopback only."
    )

    @model_validator(mode="after")
    def _distinct(self) -> Auth:
        names = [key.name for key in self.keys]
        secrets = [key.key.get_secret_value() for key in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have the same name")
        if len(set(secrets)) < len(secrets):
            raise ValueError("two names have the same key")
        return self


class Timeouts(_Section):
    """How long a provider may take, in seconds."""

    connect: Positive = Field(10, description="To accept the connection, TLS included.")
    first_byte: Positive = Field(300, description="To begin its answer.")
    between_bytes: Positive = Field(120, description="Longest silence within an answer.")


class Tls(_Section):
    """TLS towards a provider."""

    verify: bool = Field(default=True, description="Check the certificate.")
    ca_file: Path | None = Field(
        None, description="PEM file of certificate authorities to trust instead of the system's."
    )


AuthStyle = Literal["bearer", "x-api-key", "api-key", "none"]


class Provider(_Section):
    """One provider."""

    base_url: str = Field(description="Where its API begins, with the version segment; /v1 is added to a bare host.")
    key: SecretStr = Field(SecretStr(""), description="Its credential; empty: the caller's own is forwarded.")
    auth: AuthStyle = Field("bearer", description="How the credential is sent.")
    headers: dict[str, str] = Field({}, description="Fixed headers, sent unless the caller sends them.")
    timeout_s: Timeouts = Field(Timeouts(), description="Time limits in seconds.")
    max_connections: int = Field(1024, ge=1, description="Connections to it from one worker.")
    tls: Tls = Field(Tls(), description="TLS settings.")
    key_prefixes: tuple[str, ...] = Field((), description="How this provider's own credentials begin.")

    @field_validator("base_url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        match = re.match(r"(https?)://([^/?#\s]+)(/[^?#\s]*)?\Z", value)
        if match is None:
            raise ValueError("must be an http:// or https:// address without query")
        if "@" in match[2]:
            raise ValueError("must not hold a user name or password; use key:")
        path = (match[3] or "").rstrip("/")
        return f"{match[1]}://{match[2]}{path or '/v1'}"

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise ValueError(f"{name!r} is no header name")
            if not re.fullmatch(r"[\t\x20-\x7e]*", text):
                raise ValueError(f"the value of {name!r} holds characters that no header may")
        return {name.lower(): text for name, text in value.items()}


class PriceRow(_Section):
    """USD per million tokens."""

    input: Decimal = Field(ge=0)
    output: Decimal = Field(ge=0)
    cache_read: Decimal | None = Field(None, ge=0)
    cache_write: Decimal | None = Field(None, ge=0)


class Facts(_Section):
    """What is known of a model."""

    window: int | None = Field(None, ge=1, description="Context window in tokens.")
    output: int | None = Field(None, ge=1, description="Most output tokens of one call.")
    tokenizer: str | None = Field(None, description="Name of its tokenizer.")
    price: PriceRow | None = Field(None, description="USD per million tokens.")


class Model(Facts):
    """One route: which models, where to, under which name, and facts that override the tables."""

    match: str = Field(description="Shell pattern of model names.")
    provider: str = Field(description="Name of a provider.")
    name: str | None = Field(None, description="The name to send instead, for an alias.")


class Sessions(_Section):
    """How calls are put together to sessions."""

    id_headers: tuple[str, ...] = Field(
        ("x-session-id",), description="Headers that name the session, before the built-in list."
    )
    on_missing: Literal["derive", "require", "none"] = Field(
        "derive", description="A call that names no session: guess it, refuse it, or keep nothing."
    )
    ttl: str = Field("30d", description="A session is forgotten this long after its last call: 90s, 15m, 12h, 30d.")
    on_disconnect: Literal["drain", "cancel"] = Field(
        "drain", description="The client leaves: read the answer to its end for exact usage (at most drain_s), or stop."
    )
    drain_s: float = Field(30, ge=0, description="How long a left answer is read on.")
    stream_totals: Literal["off", "comment"] = Field(
        "comment", description="Totals in a last comment line of each stream."
    )
    usage_missing: Literal["estimate", "zero"] = Field(
        "estimate", description="What a call costs whose usage nobody reported."
    )

    @field_validator("id_headers")
    @classmethod
    def _lower(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in value)

    @field_validator("ttl")
    @classmethod
    def _ttl(cls, value: str) -> str:
        duration(value)
        return value

    @property
    def ttl_s(self) -> int:
        """`ttl` in seconds."""
        return duration(self.ttl)


class StoreSettings(_Section):
    """Where sessions are kept."""

    url: str = Field("sqlite://~/.local/share/gateway/gateway.db", description="memory:// or sqlite://PATH")
    timeout_ms: int = Field(250, ge=1, description="Longest wait for the store in one call.")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if value == "memory://" or (value.startswith("sqlite://") and len(value) > len("sqlite://")):
            return value
        raise ValueError("must be memory:// or sqlite://PATH")

    @property
    def sqlite_path(self) -> Path | None:
        """The database file, or None for another kind of store."""
        if not self.url.startswith("sqlite://"):
            return None
        return Path(self.url.removeprefix("sqlite://")).expanduser()


class Log(_Section):
    """One line per call."""

    format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else JSON lines.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="info: every call; warning: failures only."
    )


class Telemetry(_Section):
    """What the gateway tells of itself."""

    log: Log = Field(Log(), description="The log on stderr.")


class Settings(_Section):
    """The whole configuration."""

    server: Server = Field(Server(), description="Where the gateway listens and what it takes.")
    auth: Auth = Field(Auth(), description="Client keys and the admin key.")
    providers: dict[str, Provider] = Field({}, description="Providers by name; added to the built-in ones key by key.")
    default_provider: str | None = Field("openai", description="For a model that no route names; null: refuse it.")
    built_in_providers: bool = Field(default=True, description="Whether the built-in providers and their routes exist.")
    models: tuple[Model, ...] = Field((), description="Routes; first match wins; tried before the built-in ones.")
    sessions: Sessions = Field(Sessions(), description="How calls are put together to sessions.")
    store: StoreSettings = Field(StoreSettings(), description="Where sessions are kept.")
    telemetry: Telemetry = Field(Telemetry(), description="Log.")


#: routes every installation has, after the configured ones
BUILT_IN_ROUTES: Final = (
    ("gpt-*", "openai"),
    ("chatgpt-*", "openai"),
    ("o[0-9]*", "openai"),
    ("text-embedding-*", "openai"),
    ("claude-*", "anthropic"),
    ("gemini-*", "gemini"),
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where they came from. `key_sources`: provider -> the variable its key was read from."""

    settings: Settings
    file: Path | None
    key_sources: Mapping[str, str]


def template() -> str:
    """The commented gateway.yaml that `gateway init` writes: every key, with its default."""
    installed = Path(__file__).parent / "data" / DEFAULT_FILE
    return (installed if installed.is_file() else Path(__file__).parent.parent / DEFAULT_FILE).read_text("utf-8")


def data_folder() -> Path:
    """The folder of the tables that ship with the package: config/ of a checkout, gateway/data/ once installed."""
    installed = Path(__file__).parent / "data"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "config"


def load(
    file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Read, merge and check the configuration.

    Args:
        file: as `-c` names it; None looks at $GATEWAY_CONFIG, then ./gateway.yaml, then uses the defaults.
        environment: variables; None takes the process's.
        flags: dotted key path -> value; these beat everything else.

    Raises:
        ConfigError: with every problem found.
    """
    env = os.environ if environment is None else environment
    path = _find(file, env)
    raw = _read_yaml(path) if path is not None else {}
    for dotted, value in (flags or {}).items():
        _set(raw, dotted.split("."), value)
    problems: list[str] = []
    built_in = _read_yaml(data_folder() / "providers.yaml")
    providers = _merge_providers(built_in if raw.get("built_in_providers", True) else {}, raw.get("providers"))
    if providers is not None:
        raw["providers"] = providers
    for dotted, text in _overrides(raw, env):
        if dotted not in (flags or {}):
            _set(raw, dotted.split("."), _parse_scalar(text))
    key_sources = _key_sources(raw.get("providers"), env)
    expanded = _expand(raw, env, "", problems)
    unset = {line.partition(":")[0] for line in problems}
    try:
        settings = Settings.model_validate(expanded)
    except ValidationError as error:
        problems += [line for line in _describe(error) if line.partition(":")[0] not in unset]
    problems += _cross_references(raw)
    if problems:
        raise ConfigError(problems)
    return Loaded(settings, path, key_sources)


def pass_on(loaded_from: Path | None, flags: Mapping[str, object]) -> None:
    """Leave a command's `-c` and flags where its worker processes and later reloads find them."""
    if loaded_from is not None:
        os.environ["GATEWAY_CONFIG"] = str(loaded_from)
    os.environ[_FLAGS_VARIABLE] = json.dumps(flags)


def load_passed_on() -> Loaded:
    """`load` as the command did that called `pass_on`.

    Raises:
        ConfigError: as `load`.
    """
    return load(flags=json.loads(os.environ.get(_FLAGS_VARIABLE, "{}")))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of gateway.yaml, with descriptions."""
    schema = Settings.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "gateway.yaml", **schema}


def refuse_open_door(settings: Settings) -> None:
    """Refuse to offer a held provider key to the whole network.

    Raises:
        ConfigError: the host is not loopback, a provider key is held, and there are no client keys.
    """
    held = sorted(name for name, provider in settings.providers.items() if provider.key.get_secret_value())
    if is_loopback(settings.server.host) or settings.auth.keys or not held:
        return
    problem = (
        f"auth.keys: {settings.server.host} is reachable from the network and the gateway holds the key of "
        f"{', '.join(held)}, so anyone could spend it. Set auth.keys, or listen on 127.0.0.1."
    )
    raise ConfigError([problem])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(?:\.\d{1,3}){3}", host) is not None


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
            problems += [f"{path.name}: {name}.{line}" for line in _describe(error)]
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


def _read_yaml(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        value = yaml.load(path.read_text("utf-8"), loader)  # noqa: S506  # a safe loader, the one in C where it was built
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError([f"{path}: is not valid YAML: {' '.join(str(error).split())}"]) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError([f"{path}: must hold keys and values, not {type(value).__name__}"])
    return value


def _merge_providers(built_in: dict[str, Any], own: object) -> dict[str, Any] | None:
    if own is None:
        return built_in
    if not isinstance(own, dict):
        return None  # the schema says what is wrong with it
    merged = dict(built_in)
    for name, block in own.items():
        base = built_in.get(name)
        # A provider moved to another address must not get the key that was meant for the old one.
        if isinstance(base, dict) and isinstance(block, dict):
            kept = dict(base) if "base_url" not in block else {**base, "key": ""}
            merged[name] = {**kept, **block}
        else:
            merged[name] = block
    return merged


def _overrides(raw: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """`GATEWAY_A_B` -> (`a.b`, value) of every key that exists; others are somebody else's (Kubernetes sets some)."""
    providers = raw.get("providers")
    names = [str(name) for name in providers] if isinstance(providers, dict) else []
    for dotted in _leaf_paths(Settings, "", names):
        text = env.get(_ENV_PREFIX + re.sub(r"[.-]", "_", dotted).upper())
        if text is not None:
            yield dotted, text


def _leaf_paths(section: type[BaseModel], prefix: str, providers: Sequence[str]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _leaf_paths(annotation, f"{path}.", ())
        elif get_origin(annotation) is dict and get_args(annotation)[1] is Provider:
            for provider in providers:
                yield from _leaf_paths(Provider, f"{path}.{provider}.", ())
        else:
            yield path


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


def _expand(value: object, env: Mapping[str, str], path: str, problems: list[str]) -> object:
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


def _cross_references(raw: Mapping[str, Any]) -> list[str]:
    """What is wrong between keys that are each right."""
    providers, models = raw.get("providers"), raw.get("models")
    known = providers if isinstance(providers, dict) else {}
    named: list[tuple[str, object]] = [("default_provider", raw.get("default_provider"))]
    if isinstance(models, list):
        named += [
            (f"models[{i}].provider", row.get("provider")) for i, row in enumerate(models) if isinstance(row, dict)
        ]
    problems = [
        f"{path}: there is no provider {name!r}{_did_you_mean(name, known)}"
        for path, name in named
        if isinstance(name, str) and name not in known
    ]
    server, store = raw.get("server"), raw.get("store")
    workers = server.get("workers", 1) if isinstance(server, dict) else 1
    in_memory = isinstance(store, dict) and store.get("url") == "memory://"
    if in_memory and isinstance(workers, int) and workers > 1:
        problems.append("server.workers: more than one worker needs a store they share; set store.url to sqlite://PATH")
    return problems


def _describe(error: ValidationError) -> list[str]:
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        path = _dotted(problem["loc"])
        if problem["type"] == "extra_forbidden":
            siblings = _siblings(problem["loc"])
            lines.append(f"{path}: there is no such key{_did_you_mean(str(problem['loc'][-1]), siblings)}")
        else:
            text = problem["msg"].removeprefix("Value error, ")
            shown = "" if _is_secret(problem["loc"]) else _shown(problem.get("input"))
            lines.append(f"{path}: {text[:1].lower()}{text[1:]}{shown}")
    return lines


def _is_secret(location: tuple[int | str, ...]) -> bool:
    return any(part in ("key", "admin_key", "keys") for part in location)


def _shown(value: object) -> str:
    return f" (got {value!r})" if isinstance(value, (str, int, float, bool)) else ""


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(whole file)"


def _siblings(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] | None = Settings
    for part in location[:-1]:
        section = _inner_section(section, part) if section is not None else None
    return list(section.model_fields) if section is not None else []


def _inner_section(section: type[BaseModel], part: int | str) -> type[BaseModel] | None:
    if not isinstance(part, str) or part not in section.model_fields:
        return section  # an index, or a provider's name: the section is that of the elements
    candidates = [section.model_fields[part].annotation, *get_args(section.model_fields[part].annotation)]
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _did_you_mean(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
