"""Test configuration errors: one per mistake, in terms of the file, and without secrets."""

from __future__ import annotations

import pytest

from tests.config.conftest import Problems

SECRET = "hunter2"
MAPPING = "input should be keys and values, like {a: b}"
LIST = "input should be a list, like [a, b]"
QUOTES = 'inside brackets a text with ${NAME} needs quotes, like {url: "${NAME}"}'
JWT = "issuer: i, audience: a"
JWT_URL = f"{JWT}, jwks_url: 'https://login.example/keys'"
HTTPS = (
    "must begin with https://, because an attacker who replaces the keys on their way can forge tokens; http:// is for localhost "
    "and 127.0.0.1 only"
)
NO_AUDIENCE = "is empty; write the audience of the gateway"
ALGORITHMS = (
    "input should be 'RS256', 'RS384', 'RS512', 'PS256', 'PS384', 'PS512', 'ES256', 'ES384', 'ES512' or 'EdDSA'"
)
MARKS = "a text that begins with *, & or ! needs quotes"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("providers: {openai: 3}", "providers.openai: input should be keys and values, like {adapter: …}"),
        ("providers: 3", f"providers: {MAPPING}"),
        ("auth: {keys: [3]}", "auth.keys[0]: input should be keys and values, like {name: …}"),
        *(
            (f"auth: {{jwt: {{{own}}}}}", problem)
            for own, problem in (
                (f"{JWT}, jwks_url: 'http://login.example/keys'", f"auth.jwt.jwks_url: {HTTPS}"),
                (f"{JWT}, jwks_url: 'http://127.0.0.1.evil.example/keys'", f"auth.jwt.jwks_url: {HTTPS}"),
                (f"{JWT}, jwks_url: 'http://localhost@evil.example/keys'", f"auth.jwt.jwks_url: {HTTPS}"),
                (f"{JWT}, jwks_url: 'file:///etc/passwd'", f"auth.jwt.jwks_url: {HTTPS}"),
                (JWT, "auth.jwt: needs either jwks_url or key_file"),
                (f"{JWT_URL}, key_file: k.pem", "auth.jwt: needs either jwks_url or key_file"),
                ("audience: a, key_file: k.pem", "auth.jwt.issuer: field required"),
                ("issuer: i, key_file: k.pem", "auth.jwt.audience: field required"),
                ("issuer: i, audience: '', key_file: k.pem", f"auth.jwt.audience: {NO_AUDIENCE}"),
                ("issuer: i, audience: [a, ''], key_file: k.pem", f"auth.jwt.audience: {NO_AUDIENCE}"),
                ("issuer: i, audience: [], key_file: k.pem", f"auth.jwt.audience: {NO_AUDIENCE}"),
                (f"{JWT_URL}, algorithms: []", "auth.jwt.algorithms: needs 1 or more entries, and has 0"),
                (f"{JWT_URL}, algorithms: [HS256]", f"auth.jwt.algorithms[0]: {ALGORITHMS}"),
                (f"{JWT_URL}, algorithms: [none]", f"auth.jwt.algorithms[0]: {ALGORITHMS}"),
                (f"{JWT_URL}, leeway_s: 601", "auth.jwt.leeway_s: input should be less than or equal to 600 (got 601)"),
                (
                    f"{JWT_URL}, groups: {{a: {{}}}}",
                    "auth.jwt: groups needs claims.group, the claim that names the groups of a caller",
                ),
                (
                    f"{JWT_URL}, claims: {{group: g}}",
                    "auth.jwt: claims.group has no effect without groups; list the groups there, or remove it",
                ),
                (
                    f"{JWT_URL}, claims: {{group: g}}, groups: {{a: {{rpm: 0}}}}",
                    "auth.jwt.groups.a.rpm: input should be greater than or equal to 1 (got 0)",
                ),
                (f"{JWT_URL}, claims: {{nam: g}}", "auth.jwt.claims.nam: unknown key (did you mean name?)"),
            )
        ),
        ("sessions: {ttl: 30}", "sessions.ttl: must be a duration like 90s, 15m, 12h or 30d, at most 36500d (got 30)"),
        (
            "budget: {window: 3600}",
            "budget.window: must be a duration like 90s, 15m, 12h or 30d, at most 36500d (got 3600)",
        ),
        ("agents: {a: 3}", "agents.a: input should be keys and values, like {steps: …}"),
        ("budget: 3", "budget: input should be keys and values, like {tokens: …} (got 3)"),
        ("models: 3", f"models: {LIST}"),
        ("models: [3]", "models[0]: input should be keys and values, like {match: …}"),
        ("context: {strategies: drop}", f"context.strategies: {LIST}"),
        *(
            (
                f"server: {{cors_origins: ['{pattern}']}}",
                "server.cors_origins: an origin cannot be a pattern; list each one in full, like https://app.example",
            )
            for pattern in ("*", "http://localhost:*", "https://*.example.com")
        ),
        ("context: {strategies: []}", "context.strategies: needs 1 or more entries, and has 0"),
        ("agents: {a: {steps: [{name: 3}]}}", "agents.a.steps[0].name: input should be a valid string"),
        (
            "models: [{match: x, provider: openai, fallback: [a, b, c, d, e, f, g, h]}]",
            "models[0].fallback: takes 7 entries or fewer, and has 8",
        ),
        ("store: {journal: 3}", "store.journal: input should be 'auto' or 'off', or a path"),
        ("models: [{match: x, provider: {openai: 0}}]", "models[0].provider.openai: input should be greater than 0"),
        ("models: [{match: x, provider: {openai: {}}}]", "models[0].provider.openai: input should be a valid number"),
        (
            "models: [{match: x, provider: 3}]",
            "models[0].provider: input should be a valid string, or keys and values, like {a: b}",
        ),
    ],
)
def test_one_fault_is_one_complaint_in_words_of_the_file(text: str, problem: str, problems: Problems) -> None:
    assert problems(text) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("budget:\ntokens: 5", "tokens: unknown key (did you mean budget.tokens, indented under budget?)"),
        (
            "telemetry:\n  level: info",
            "telemetry.level: unknown key (did you mean telemetry.log.level, indented under log?)",
        ),
        (
            "agents: {a: {steps: [{name: b, denied: [c]}]}}",
            (
                "agents.a.steps[0].denied: unknown key (did you mean "
                "agents.a.steps[0].available_tools.denied, indented under available_tools?)"
            ),
        ),
        ("server:\n  budget: {}", "server.budget: unknown key (did you mean budget without indentation?)"),
        ("budget: {token: 5}", "budget.token: unknown key (did you mean tokens?)"),
        ("hunter2: 5", "hunter2: unknown key"),
    ],
)
def test_wrongly_indented_key_gets_a_suggestion(text: str, problem: str, problems: Problems) -> None:
    assert problems(text) == [problem]


def test_a_variable_that_is_no_list_is_told_how_one_is_written(problems: Problems) -> None:
    assert problems("", {"GATEWAY_SESSIONS_ID_HEADERS": "x-foo"}) == [
        f"sessions.id_headers: {LIST} (from GATEWAY_SESSIONS_ID_HEADERS)"
    ]
    assert problems("", {"GATEWAY_SESSIONS_ID_HEADERS": "[x-foo, x-bar]"}) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("store: {url: ${URL}}", f" (line 1, column 15): {QUOTES}"),
        ("store:\n  {url: 'a', b: redis://${HOST}/1}", f" (line 2, column 26): {QUOTES}"),
        ("auth: [${KEY:-hunter2}]", f" (line 1, column 9): {QUOTES}"),
        ("auth: {admin_key: *hunter2}", f" (line 1, column 19): {MARKS}"),
        ("auth: {admin_key: !hunter2 a}", f" (line 1, column 19): {MARKS}"),
        ("auth: {admin_key: !hun!hunter2 a}", f" (line 1, column 19): {MARKS}"),
        ("a: &hunter2 1\nb: &hunter2 2", " (line 2, column 4): an anchor (&) is used twice"),
        ("a: 1\n---\nb: 2", " (line 2, column 1): it holds more than one document (---)"),
        ("a: hunter2: b", " (line 1, column 11): mapping values are not allowed"),
        ("a: 'hunter2", " (line 1, column 12): found unexpected end of stream"),
        ("server:\n\tport: 1", " (line 2, column 1): there is a tab where YAML allows only spaces"),
        ("server:\n  port: 1\n\thost: hunter2", " (line 3, column 1): there is a tab where YAML allows only spaces"),
        ("a: \x07hunter2", ": it contains a control character"),
        ("a: 2024-99-99", ": it contains an impossible date or number; put quotes around a text that looks like one"),
    ],
)
def test_yaml_error_does_not_repeat_the_file(text: str, reason: str, problems: Problems) -> None:
    [problem] = problems(text)
    assert problem.partition("is not valid YAML")[2].startswith(reason)
    assert SECRET not in problem


def test_a_variable_in_quotes_between_brackets_is_read(problems: Problems) -> None:
    assert problems('store: {url: "${URL}"}', {"URL": "memory://"}) == []
