"""`gateway count` and `gateway trim`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Commands
from tests.support.conversations import TOOLS, agent


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "body.json"
    path.write_text(json.dumps({"model": "gpt-4o", "messages": agent(12), "tools": TOOLS}))
    return path


def test_count_prints_tokens_and_how_they_were_counted(gateway_command: Commands, body: Path) -> None:
    done = gateway_command("count", body)
    assert done.code == 0
    assert [line.split()[0] for line in done.lines[1:]] == ["total", "conversation", "tool", "tool", "context"]
    assert "counted with tiktoken:o200k_base" in done.err


def test_count_as_json_has_every_item(gateway_command: Commands, body: Path) -> None:
    found = json.loads(gateway_command("count", body, "--json", "--items").out)
    assert len(found["items"]) == 26
    assert found["tool_results"] == 12


def test_count_lists_tools_with_the_option(gateway_command: Commands, body: Path) -> None:
    found = json.loads(gateway_command("count", body, "--json", "--tools").out)
    tokens = found["tool_tokens"]
    assert found["tools"] == {"list_depot": {"results": 12, "result_tokens": tokens}}
    assert gateway_command("count", body, "--tools").lines[-1].split() == ["list_depot", "12", f"{tokens:,}"]


def test_count_for_another_model(gateway_command: Commands, body: Path) -> None:
    found = json.loads(gateway_command("count", body, "-m", "claude-sonnet-4-5", "--json").out)
    assert (found["model"], found["provider"]) == ("claude-sonnet-4-5", "anthropic")


def test_count_says_that_text_is_exact(gateway_command: Commands, tmp_path: Path) -> None:
    path = tmp_path / "hello.json"
    path.write_text(json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": "hello world"}]}))
    done = gateway_command("count", path, "--items")
    assert "exact" in done.out
    assert done.lines[-1].split() == ["0", "user", "6"]


@pytest.mark.parametrize(
    ("texts", "tokens"), [("hi there", 2), (["hi there", "hi"], 3), ([1, 2, 3, 4], 4), ([[1, 2, 3], [4]], 4)]
)
def test_count_counts_only_the_texts_to_embed(
    gateway_command: Commands, tmp_path: Path, texts: object, tokens: int
) -> None:
    path = tmp_path / "body.json"
    path.write_text(json.dumps({"model": "text-embedding-3-small", "input": texts, "encoding_format": "float"}))
    found = json.loads(gateway_command("count", path, "--json").out)
    assert (found["tokens"], found["wire"], found["budget"]) == (tokens, "embeddings", None)
    assert (found["source"], found["counter"]) == ("exact", "tiktoken:cl100k_base")
    refused = gateway_command("trim", path, "--budget", "1")
    assert refused.code == 1
    assert "it has no messages" in refused.err


def test_body_for_embeddings_is_recognized_by_model_or_option(gateway_command: Commands, tmp_path: Path) -> None:
    path = tmp_path / "body.json"
    path.write_text(json.dumps({"model": "voyage-3", "input": "hi there"}))
    assert json.loads(gateway_command("count", path, "--json").out)["wire"] == "responses"
    done = gateway_command("count", path, "--wire", "embeddings")
    assert done.code == 0
    assert "· embeddings ·" in done.err
    assert not any(line.startswith("context budget") for line in done.lines)


def test_a_body_is_read_from_stdin(gateway_command: Commands, body: Path) -> None:
    done = gateway_command.process("count", "-", "--json", stdin=body.read_text())
    assert json.loads(done.out)["tool_results"] == 12


def test_trim_prints_the_body_as_it_would_be_forwarded(gateway_command: Commands, body: Path) -> None:
    done = gateway_command("trim", body, "--budget", "2500")
    original, sent = json.loads(body.read_text()), json.loads(done.out)
    assert sent["tools"] == original["tools"]
    assert sent["messages"][-1] == original["messages"][-1]
    assert len(json.dumps(sent)) < len(json.dumps(original)) / 2
    assert "of 2,500" in done.err


def test_trim_explains_each_message(gateway_command: Commands, body: Path) -> None:
    done = gateway_command("trim", body, "--budget", "2500", "--explain")
    rows = [line.split() for line in done.lines[1:]]
    assert [row[0] for row in rows] == [str(index) for index in range(26)]
    assert {row[-1] for row in rows} <= {"pinned", "kept", "condense", "drop", "dedupe", "recall"}
    assert rows[0][-1] == "pinned"


def test_the_summary_follows_the_rows_if_both_go_to_one_file(body: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as out:
        command = [sys.executable, "-m", "gateway", "trim", str(body), "--budget", "2500", "--explain"]
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=True)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert lines[0].split()[0] == "item"
    assert "of 2,500" in lines[-1]
    assert len(lines) == 28


def test_trim_explains_each_message_of_what_fits(gateway_command: Commands, body: Path) -> None:
    done = gateway_command("trim", body, "--explain")
    rows = [line.split() for line in done.lines[1:]]
    assert [row[0] for row in rows] == [str(index) for index in range(26)]
    assert {row[-1] for row in rows} == {"kept"}
    assert all(row[2] == row[3] for row in rows)


def test_trim_writes_the_body_to_a_file(gateway_command: Commands, body: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = gateway_command("trim", body, "--budget", "2500", "-o", out)
    assert done.out == ""
    assert json.loads(out.read_text())["model"] == "gpt-4o"


def test_trim_leaves_a_fitting_body_unchanged(gateway_command: Commands, body: Path) -> None:
    done = gateway_command.process("trim", str(body))
    assert done.out == body.read_text() + "\n"
    assert "nothing changed" in done.err


def test_trim_reports_a_body_that_cannot_be_trimmed_enough(gateway_command: Commands, body: Path) -> None:
    done = gateway_command("trim", body, "--budget", "50")
    assert done.code == 1
    assert "messages[" in done.err


def test_remaining_tokens_are_never_negative(gateway_command: Commands, tmp_path: Path) -> None:
    path = tmp_path / "hi.json"
    path.write_text('{"model": "gpt-4o", "messages": [{"role": "user", "content": "hello there"}]}')
    done = gateway_command("trim", path, "--budget", "1")
    assert done.code == 1
    assert " and 0 are free for them" in done.err


@pytest.mark.parametrize("command", ["count", "trim"])
@pytest.mark.parametrize(
    ("content", "says"),
    [("", "JSON"), ("[1]", "object"), ('{"messages": []}', "model"), ('{"model": "gpt-4o"}', "messages")],
)
def test_invalid_body_is_an_error(
    gateway_command: Commands, tmp_path: Path, command: str, content: str, says: str
) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content)
    done = gateway_command(command, path)
    assert done.code == 1
    assert says in done.err


def test_missing_file_is_named(gateway_command: Commands) -> None:
    done = gateway_command("count", "nowhere.json")
    assert (done.code, "nowhere.json" in done.err) == (1, True)


def test_an_unknown_format_is_refused(gateway_command: Commands, body: Path) -> None:
    assert gateway_command("count", body, "--wire", "soap").code == 2


def test_a_users_own_counter_is_used_and_a_broken_one_is_named(
    gateway_command: Commands, body: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "class Ones:\n    name = 'ones'\n    def count(self, text):\n        return 1\n"
    (tmp_path / "my_counter.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    def with_tokenizer(name: str) -> Path:
        rows: Any = [{"match": "gpt-4o", "provider": "openai", "tokenizer": name}]
        path = tmp_path / "own.yaml"
        path.write_text(json.dumps({"models": rows}))
        return path

    found = json.loads(gateway_command("count", body, "--json", "-c", with_tokenizer("my_counter:Ones")).out)
    assert found["counter"] == "ones (my_counter:Ones)"
    broken = gateway_command("check", "-c", with_tokenizer("my_counter:Twos"))
    assert (broken.code, "models[0].tokenizer" in broken.out) == (3, True)


def test_control_characters_in_a_body_are_replaced(gateway_command: Commands, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"model": "gpt-4o\x07\n", "messages": [{"role": "user", "content": "hello"}]}))
    done = gateway_command.process("count", path)
    assert done.code == 0
    assert done.err.startswith("gpt-4o?? at openai")
