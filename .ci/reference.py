"""Write docs/reference/ from the code: configuration, headers, errors, API, commands, modules. `--check`: compare only.

Each fact stands once, in the code that uses it; this only puts it into tables.
"""

# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from gateway import config
from gateway.cli import app
from gateway.core.calling_agent import CLIENT_HEADERS
from gateway.core.errors import BudgetExhausted, GatewayError
from gateway.core.http.gateway_headers import DIRECTIVES, READ
from gateway.core.http.headers import CREDENTIALS
from gateway.core.identity import KNOWN_HEADERS
from gateway.dialects import anthropic_errors, openai_errors
from gateway.server import headers
from gateway.server.openapi import document, error_classes
from gateway.upstream.litellm.faults import NOT_TRANSLATABLE, Refusal

_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
_PACKAGE = Path(__file__).resolve().parent.parent / "gateway"
_WRITTEN = "<!-- Written by `make reference` from the code. -->"
#: the most that a budget counts
_COUNTABLE = 2**53
_METHODS = ("get", "post", "patch", "delete")

Node = Mapping[str, Any]


def page(title: str, *parts: str) -> str:
    """Return a whole page."""
    return "\n\n".join([f"# {title}", _WRITTEN, *parts]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. A `|` in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def prose(text: str) -> str:
    """One paragraph, however its lines are broken."""
    return " ".join(text.split())


def code(text: str) -> str:
    """As code."""
    return f"`{text}`" if text else ""


# --- configuration ------------------------------------------------------------------------------------------------


class Keys:
    """Walks the schema of gateway.yaml. What was shown under one key is not shown again under another."""

    def __init__(self, schema: Node) -> None:
        self._schema = schema
        self._shown: dict[str, str] = {}

    def page(self) -> str:
        """Return the page of all keys."""
        sections = self._schema["properties"]
        plain = {name: node for name, node in sections.items() if not self._inner(node)}
        parts = [
            prose("""
                All keys of `gateway.yaml`. None is required. `gateway init` writes a commented file with all keys, and
                `gateway check` lists the errors of a file. With [the schema](../../config/gateway.schema.json) editors
                complete and check it. `NAME` is a name of your own, and `[]` is an entry of a list.

                A key can also be set by an environment variable: `GATEWAY_SERVER_PORT=9000`, or for a list
                `GATEWAY_SESSIONS_ID_HEADERS='[x-trace, x-session-id]'`. An empty variable counts as not set; `null`
                removes a value. `${VARIABLE}` and `${VARIABLE:-default}` work in every string.
                [Deploy the gateway](../guides/deploy.md#reload) lists the keys that need a restart.
            """),
            "## Top level",
            self._table(self._rows(plain, "")),
        ]
        for name, node in sections.items():
            if name not in plain:
                parts += [f"## {name}", *self._about(node), self._table(self._below(node, name))]
        return page("Configuration", *parts)

    def _about(self, node: Node) -> list[str]:
        about = node.get("description") or self._resolve(node).get("description")
        return [sentence(about)] if about else []

    def _table(self, rows: Iterable[Sequence[str]]) -> str:
        return table(("key", "type", "default", "meaning"), rows)

    def _rows(self, properties: Node, prefix: str) -> Iterator[Sequence[str]]:
        for name, node in properties.items():
            path = f"{prefix}{name}"
            below = list(self._below(node, path))
            default = "" if below and isinstance(node.get("default", {}), dict) else self._default(node)
            yield code(path), self._type(node), default, self._meaning(node, path)
            yield from below

    def _below(self, node: Node, path: str) -> Iterator[Sequence[str]]:
        """Return the rows of the keys below one key."""
        found = self._inner(node)
        if found is None:
            return
        suffix, target = found
        first = self._shown.setdefault(target, path)
        if first == path:
            yield from self._rows(self._schema["$defs"][target]["properties"], f"{path}{suffix}.")

    def _meaning(self, node: Node, path: str) -> str:
        found = self._inner(node)
        about = " ".join(self._about(node))
        if found is not None and self._shown[found[1]] != path:
            about += f" Keys as below `{self._shown[found[1]]}`."
        return about.strip()

    def _inner(self, node: Node) -> tuple[str, str] | None:
        """Return the separator between a key and the keys below it, and their section; None if there are none."""
        for option in (node, *node.get("anyOf", ())):
            if "$ref" in option:
                return "", option["$ref"].rpartition("/")[2]
            for within, suffix in (("items", "[]"), ("additionalProperties", ".NAME")):
                inner = option.get(within)
                found = self._inner(inner) if isinstance(inner, Mapping) else None
                if found is not None:
                    return f"{suffix}{found[0]}", found[1]
        return None

    def _resolve(self, node: Node) -> Node:
        inner: Node = self._schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        return inner

    def _type(self, node: Node) -> str:
        options = node.get("anyOf", (node,))
        return " or ".join(dict.fromkeys(self._kind(option) for option in options))

    def _kind(self, node: Node) -> str:
        if "enum" in node:
            return ", ".join(code(str(value)) for value in node["enum"])
        if "const" in node:
            return code(str(node["const"]))
        if "$ref" in node:
            return "section"
        kind = node.get("type", "any")
        if kind == "array":
            return f"list of {self._type(node.get('items', {}))}"
        if kind == "object":
            return "mapping"
        return f"{kind}{bounds(node)}"

    def _default(self, node: Node) -> str:
        return code(json.dumps(node["default"], ensure_ascii=False)) if "default" in node else "required"


def bounds(node: Node) -> str:
    """Return the allowed range of a number, without the limit of the number type."""
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    given = [(sign, node[name]) for name, sign in words.items() if isinstance(node.get(name), int | float)]
    shown = [f"{sign} {limit:,.12g}" for sign, limit in given if limit < _COUNTABLE]
    return f", {' and '.join(shown)}" if shown else ""


def sentence(text: str) -> str:
    """With a full stop. Pages of this documentation become links."""
    text = re.sub(r"\bdocs/((?:[a-z]+/)?([a-z-]+\.md))", r"[\2](../\1)", text.strip())
    return text if text.endswith((".", ":", "!", "?")) else f"{text}."


# --- headers ------------------------------------------------------------------------------------------------------


def headers_page() -> str:
    """Return the page of all headers."""
    asked = {name.decode(): about for name, about in {**READ, **DIRECTIVES}.items()}
    keys = ", ".join(code(name.decode()) for name in sorted(CREDENTIALS))
    known = ", ".join(code(name.decode()) for name in KNOWN_HEADERS)
    agents = ", ".join(code(name.decode()) for name in CLIENT_HEADERS)
    return page(
        "Headers",
        "## Requests",
        table(("header", "meaning"), ((code(name), about) for name, about in asked.items())),
        f"A key is read from {keys}. If client keys are configured, this is a client key. Otherwise it is the "
        "credential for the provider, which is forwarded if the gateway has no key of its own.",
        "These headers, which other gateways and some clients send, also name a session. The first valid one counts, "
        f"after those of `sessions.id_headers`: {known}, and any other `x-…-session-id`. "
        "[Clients](../clients.md#headers-that-name-a-session) lists which client sends which header.",
        "These headers of clients, which are forwarded too, name the agent of the session that makes a call: "
        f"{agents}. Codex repeats its own in the field `client_metadata`, which is preferred. Values that are not "
        "valid names are ignored.",
        "All other headers are forwarded, except cookies, `origin`, `referer`, forwarding and hop-by-hop headers, and "
        "headers that name another method or path (`x-http-method-override`, `x-original-url`).",
        "## Responses",
        "Every metered call, also a refused one, has the session headers. A metered call is a `POST` that a provider "
        "bills. The headers of a stream are sent before its usage is known, so they have the totals before the call. "
        "The new totals follow in a comment before the stream's end mark, one line for each header "
        "(`sessions.stream_totals`).",
        table(("header", "value"), ((code(name), about) for name, about in headers.RESPONSE_HEADERS.items())),
        "The provider's own headers are passed on. One of them is its request id (`x-request-id`, Anthropic: "
        "`request-id`), which SDKs show as `request_id` and the provider's support asks for. A response of the gateway "
        "itself has no such id.",
    )


# --- errors -------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the page of all errors."""
    rows = [
        (
            code(kind.code), str(kind.status), code(kind.openai_type), code(kind.anthropic_type),
            "true" if kind.retry else "false", str(kind.retry_after or ""), first_line(kind),
        )
        for kind in sorted(error_classes(), key=lambda kind: (kind.status, kind.code, kind.__name__))
    ]  # fmt: skip
    arithmetic = {
        "account": "session", "id": "first", "unit": "tokens", "limit": 60, "used": 39, "held": 0, "resets_at": None,
        "needed": 31,
    }  # fmt: skip
    example = BudgetExhausted(
        'Session "first" has used 39 of its 60 tokens, and this call needs 31. '
        "Raise it with: gateway sessions budget first 120, or start a new session.",
        arithmetic,
    )
    return page(
        "Errors",
        "Errors of the gateway itself. A provider's own error is passed on unchanged, with "
        "`x-gateway-upstream-error: true`.",
        table(
            ("code", "status", "type (OpenAI)", "type (Anthropic)", "`x-should-retry`", "`Retry-After`", "when"), rows
        ),
        "`budget.exhausted_status` changes the status of `budget_exhausted`. `rate_limit_exceeded` has the rest of the "
        "minute as `Retry-After`. A request whose head cannot be read gets `invalid_request` (400), `header_timeout` "
        "(400) or `headers_too_large` (431).",
        "Paths of OpenAI's APIs and of the gateway itself return:",
        fenced(example, lambda: openai_errors.body(example)),
        "Paths of Anthropic's API return:",
        fenced(example, lambda: anthropic_errors.body(example, "01a1ff2e")),
        "After a stream has begun, an error is its last event, in the format of the stream. "
        "[Cap spending](../guides/cap-spending.md) says more about errors that have `error.budget`.",
        "## Refusals of litellm",
        "For a provider with [`adapter: litellm`](../guides/providers.md#what-is-translated), litellm itself may "
        "refuse a request. This error has `x-gateway-upstream-error: true`, like an error of the provider:",
        untranslatable(),
        "Leave out the field that the message names, or use a provider that accepts it; a retry is refused again. "
        "Nothing was sent to the provider, and nothing is charged.",
    )


def untranslatable() -> str:
    """Return the example of a request that litellm refuses instead of the provider."""
    refusal = Refusal(400, "", NOT_TRANSLATABLE)
    replies = (refusal.as_reply(anthropic=anthropic) for anthropic in (False, True))
    kinds = [json.loads(reply.body)["error"]["type"] for reply in replies]
    told = (
        "The call cannot be expressed in the provider's format: a field that it does not know, an image that cannot be "
        "fetched, or a provider that litellm does not know."
    )
    return table(
        ("code", "status", "type (OpenAI)", "type (Anthropic)", "when"),
        [(code(NOT_TRANSLATABLE), str(refusal.status), *map(code, kinds), told)],
    )


def fenced(fault: GatewayError, write: Callable[[], bytes]) -> str:
    """Return an error as it is sent."""
    return f"```\nHTTP/1.1 {fault.status}\n{json.dumps(json.loads(write()), ensure_ascii=False)}\n```"


def first_line(thing: object) -> str:
    """Return the first sentence of a docstring."""
    first, *_ = re.split(r"[.](?:$|\s)", (thing.__doc__ or "").strip())
    return f"{first}."


# --- HTTP API -----------------------------------------------------------------------------------------------------


def api_page(api: Node) -> str:
    """Return the page of all paths."""
    parts = [
        prose("""
            `GET /openapi.json` returns the same as an OpenAPI document, and needs no key. The gateway's own paths
            return JSON. Of texts that the gateway has stored, only `/api/results` returns any. See also
            [errors](errors.md) and [headers](headers.md).
        """),
        prose("""
            A client key sees only its own sessions. Operations marked *Administrator* need `auth.admin_key`. If no
            admin key is set, they are allowed only to requests from the gateway's own machine.
        """),
    ]
    for path, item in api["paths"].items():
        for method in _METHODS:
            if method in item:
                parts += operation(api, method, path, item[method])
    parts.append("## Shapes")
    for name, schema in api["components"]["schemas"].items():
        parts += shape(name, schema)
    return page("HTTP API", *parts)


def operation(api: Node, method: str, path: str, found: Node) -> Iterator[str]:
    """One path and method."""
    yield f"## {method.upper()} {path}"
    schemes = [name for option in found["security"] for name in option]
    who = "" if "clientKey" in schemes else " *Administrator.*" if schemes else " No key needed."
    yield f"{found['summary']}{who}"
    given = [resolve(api, one) for one in found.get("parameters", ()) if not path.startswith("/v1/") or one.get("in")]
    if given:
        yield table(
            ("parameter", "in", "type", "meaning"),
            ((code(one["name"]), one["in"], typed(one["schema"]), one["description"]) for one in given),
        )
    if path.startswith("/v1/") and method == "post":
        yield "Bodies are in the provider's format. [Headers](headers.md) lists the gateway's headers."
        return
    if "requestBody" in found:
        yield f"Body: {typed(found['requestBody']['content']['application/json']['schema'])}"
    yield "Answers: " + "; ".join(answers(found["responses"])) + "."


def answers(responses: Node) -> Iterator[str]:
    """Return the table of statuses and their bodies."""
    for status, answer in responses.items():
        content = answer.get("content", {})
        shown = ", ".join(
            typed(media["schema"]) if kind == "application/json" else code(kind) for kind, media in content.items()
        )
        if "$ref" not in answer:
            yield f"{status} {shown or answer['description'].rstrip('.')}"


def resolve(api: Node, node: Node) -> Node:
    """Return the schema that a reference names."""
    if "$ref" not in node:
        return node
    *_, group, name = node["$ref"].split("/")
    found: Node = api["components"][group][name]
    return found


def typed(schema: Node) -> str:
    """Return a type in a few words; schemas become links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(typed(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(code(json.dumps(value).strip('"')) for value in schema["enum"])
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    kinds = schema.get("type", "any")
    return " or ".join(kind_of(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def kind_of(kind: str, schema: Node) -> str:
    """One type of a schema."""
    if kind == "array":
        return f"list of {typed(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"mapping of {typed(schema['additionalProperties'])}"
    return str(schema.get("format", kind)) if kind == "string" else kind


def shape(name: str, schema: Node) -> Iterator[str]:
    """One of the shapes."""
    yield f"### {name}"
    about = schema.get("description", "")
    if about:
        yield sentence(about[0].upper() + about[1:])
    rows = list(fields(schema))
    if rows:
        yield table(("field", "type", "meaning"), rows)
    elif "additionalProperties" in schema:
        yield f"By name: {', '.join(code(inner) for inner in schema['additionalProperties']['properties'])}."


def fields(schema: Node, prefix: str = "") -> Iterator[Sequence[str]]:
    """Its fields, those of objects within it too."""
    for name, inner in schema.get("properties", {}).items():
        optional = "" if name in schema.get("required", ()) else " (not always)"
        yield code(f"{prefix}{name}"), typed(inner) + optional, inner.get("description", "")
        for within, suffix in (
            (inner, "."),
            (inner.get("items", {}), "[]."),
            (inner.get("additionalProperties"), ".NAME."),
        ):
            if isinstance(within, Mapping):
                yield from fields(within, f"{prefix}{name}{suffix}")


# --- commands -----------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Return the page of all commands."""
    root = get_command(app)
    parts = [
        prose("""
            Every command has `--help`. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration (of `serve`, as
            far as it is seen before workers start: a token counter of your own is not), 3 `gateway check` found
            problems, 130 interrupted by Ctrl-C (`serve` and `top` end with 0 then). Tables go to stdout, everything
            else to stderr; `--json` prints JSON instead of text, with the fields that [the API](api.md) has for the
            same thing (of `gateway trim` those of its `context`; the body goes where `-o` says). Without a terminal,
            or with `NO_COLOR`, nothing is coloured. In a terminal a row of a table is one line: texts are shortened
            and columns left out where there is no room; without a terminal nothing is. Numbers may be written as
            `600,000`, `500k` or `1.5M`. Output that cannot be written (a full disk, a closed stdout) is one line on
            stderr and exit code 1; if the reader of a pipe ends early, as `head`
            does, nothing is printed, and the code is 1 if output was left.
        """),
        prose("""
            `gateway --install-completion` makes the Tab key complete commands and options in bash, zsh, fish and
            PowerShell, from the next shell on; `gateway --show-completion` prints what it adds to the shell's files.
        """),
        "## gateway",
        options(root),
    ]
    for name, command in commands(root, "gateway"):
        parts += [f"## {name}", plain(command.help)]
        if not hasattr(command, "commands"):
            parts += [f"```\n{usage(name, command)}\n```", options(command)]
    return page("Commands", *(part for part in parts if part))


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield all commands; the commands of a group follow the group."""
    for name, command in getattr(group, "commands", {}).items():
        yield f"{prefix} {name}", command
        yield from commands(command, f"{prefix} {name}")


def usage(name: str, command: Any) -> str:
    """How it is called."""
    arguments = [metavar(one) if one.required else f"[{metavar(one)}]" for one in command.params if not is_option(one)]
    return " ".join([name, *(["[OPTIONS]"] if any(map(is_option, command.params)) else []), *arguments])


def options(command: Any) -> str:
    """Its arguments and options, but for --help."""
    rows = [
        (code(", ".join([*one.opts, *one.secondary_opts]) + value(one)) if is_option(one) else code(metavar(one)),
         plain(one.help) + default(one))
        for one in command.params
        if not getattr(one, "hidden", False) and "--help" not in one.opts
    ]  # fmt: skip
    return table(("option", "meaning"), rows) if rows else ""


def is_option(parameter: Any) -> bool:
    """Whether it is no argument."""
    return str(parameter.param_type_name) == "option"


def value(parameter: Any) -> str:
    """Return the placeholder of an option's value."""
    return "" if parameter.is_flag else f" {metavar(parameter)}"


def metavar(parameter: Any) -> str:
    """Return the placeholder of a value."""
    if parameter.metavar:
        return str(parameter.metavar)
    return str(parameter.name).upper()


def default(parameter: Any) -> str:
    """Its default, where there is one to speak of."""
    shown = parameter.default
    if callable(shown) or shown in (None, False, "", (), []) or "PydanticUndefined" in repr(shown):
        return ""
    return f" Default: {code(str(getattr(shown, 'value', shown)))}."


def plain(text: str | None) -> str:
    """Help as one paragraph."""
    return sentence(" ".join((text or "").split())) if text else ""


# --- writing ------------------------------------------------------------------------------------------------------


def pages() -> Mapping[str, str]:
    """Every page by its file."""
    return {
        "configuration.md": Keys(config.json_schema()).page(),
        "headers.md": headers_page(),
        "errors.md": errors_page(),
        "modules.md": modules_page(),
        "api.md": api_page(document()),
        "commands.md": commands_page(),
    }


def modules_page() -> str:
    """Return the page with the first sentence of each module, by package."""
    packages: dict[str, list[Sequence[str]]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.name == "__init__.py" and len(ast.parse(path.read_text("utf-8")).body) <= 1:
            continue
        name = path.relative_to(_PACKAGE).as_posix()
        folder = name.rpartition("/")[0]
        packages.setdefault(folder, []).append([code(path.name), _first_sentence(path)])
    parts = [
        f"## {folder or 'gateway'}/\n\n{table(['module', 'what it does'], rows)}" for folder, rows in packages.items()
    ]
    return page("Modules", "The first sentence of each module of the package `gateway`.", *parts)


def _first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = prose((ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n\n")[0])
    return re.split(r"(?<=[.!])\s+(?=[A-Z`])", text, maxsplit=1)[0]


def main() -> int:
    """Write them, or say how they differ; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is not current")
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    asked = parser.parse_args()
    stale = False
    for name, text in pages().items():
        file = asked.folder / name
        before = file.read_text("utf-8") if file.exists() else ""
        if before == text:
            continue
        stale = True
        if asked.check:
            sys.stdout.writelines(
                difflib.unified_diff(
                    before.splitlines(keepends=True), text.splitlines(keepends=True), str(file), "from the code"
                )
            )
        else:
            file.write_text(text, "utf-8")
            print(f"wrote {file}")
    if stale and asked.check:
        print("Write them anew with: make reference", file=sys.stderr)
    return int(stale and asked.check)


if __name__ == "__main__":
    sys.exit(main())
