"""Edit the Messages requests of a session at random, as clients and proxies do: some edits keep thinking valid."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from tests.support.claude_checker import THINKING
from tests.support.claude_grammar import BETA

Json = dict[str, Any]

MODELS = (
    "claude-fable-5-2",
    "claude-mythos-5-1",
    "claude-fable-5-1",
    "claude-opus-5-5",
    "claude-sonnet-5-5",
    "claude-haiku-5-5",
    "claude-opus-5",
    "claude-opus-4-8",
    "claude-haiku-4-5",
)
MARK = {"type": "ephemeral"}


class Edits:
    """Edit the body of one session. `originals` holds every message as the provider and the tools made it."""

    def __init__(self, chance: random.Random, body: Json) -> None:
        self._chance = chance
        self.body = body
        self.headers: dict[str, str] = {}
        self.originals: list[Json] = copy.deepcopy(body["messages"])

    def append(self, message: Json) -> None:
        """Add a message to what was sent, and to the originals."""
        self.body["messages"].append(copy.deepcopy(message))
        self.originals.append(copy.deepcopy(message))

    def edit(self) -> str:
        """Make one edit; return its name."""
        choice = self._chance.choice(EDITS)
        choice(self)
        return choice.__name__

    def _message(self, role: str | None = None) -> Json | None:
        found = [one for one in self.body["messages"] if role is None or one["role"] == role]
        return self._chance.choice(found) if found else None

    def _as_blocks(self, message: Json) -> list[Json]:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        content: list[Json] = message["content"]
        return content

    def _block(self, *kinds: str) -> Json | None:
        every = [one for message in self.body["messages"] if isinstance(message["content"], list)
                 for one in message["content"] if one["type"] in kinds]  # fmt: skip
        return self._chance.choice(every) if every else None

    def _keep(self, is_kept: Callable[[int], bool]) -> None:
        """Keep the thinking blocks whose number is to be kept."""
        number = -1
        for message in self.body["messages"]:
            if not isinstance(message["content"], list):
                continue
            kept = []
            for block in message["content"]:
                number += block["type"] in THINKING
                if block["type"] not in THINKING or is_kept(number):
                    kept.append(block)
            message["content"] = kept

    def _count(self) -> int:
        contents = [one["content"] for one in self.body["messages"] if isinstance(one["content"], list)]
        return sum(block["type"] in THINKING for content in contents for block in content)

    def nothing(self) -> None:
        """Send everything back unchanged."""

    def strip_thinking(self) -> None:
        self._keep(lambda _: False)

    def strip_oldest(self) -> None:
        first = self._chance.randint(0, self._count())
        self._keep(lambda number: number >= first)

    def strip_newest(self) -> None:
        last = self._chance.randint(0, self._count())
        self._keep(lambda number: number < last)

    def strip_one(self) -> None:
        gone = self._chance.randint(0, max(0, self._count() - 1))
        self._keep(lambda number: number != gone)

    def strip_some(self) -> None:
        gone = {number for number in range(self._count()) if self._chance.random() < 0.5}
        self._keep(lambda number: number not in gone)

    def restore_message(self) -> None:
        places = range(min(len(self.originals), len(self.body["messages"])))
        place = self._chance.choice(places)
        self.body["messages"][place] = copy.deepcopy(self.originals[place])

    def restore_all(self) -> None:
        self.body["messages"] = copy.deepcopy(self.originals)

    def reorder_thinking(self) -> None:
        message = self._message("assistant")
        if message is None or not isinstance(message["content"], list):
            return
        places = [place for place, block in enumerate(message["content"]) if block["type"] in THINKING]
        if len(places) > 1:
            one, other = self._chance.sample(places, 2)
            content = message["content"]
            content[one], content[other] = content[other], content[one]

    def move_thinking(self) -> None:
        """Swap the thinking of two messages."""
        one, other = self._block(*THINKING), self._block(*THINKING)
        if one is not None and other is not None:
            first, second = dict(one), dict(other)
            for block, new in ((one, second), (other, first)):
                block.clear()
                block.update(new)

    def repeat_thinking(self) -> None:
        block, message = self._block(*THINKING), self._message("assistant")
        if block is not None and message is not None:
            self._as_blocks(message).insert(0, copy.deepcopy(block))

    def redact(self) -> None:
        """Send a block as redacted thinking: what identifies it stays the same."""
        block = self._block("thinking")
        if block is not None:
            data = block["signature"]
            block.clear()
            block.update({"type": "redacted_thinking", "data": data})

    def edit_visible_thinking(self) -> None:
        block = self._block("thinking")
        if block is not None:
            block["thinking"] += " (edited)"

    def forge(self) -> None:
        block = self._block("thinking")
        if block is not None:
            block["signature"] = block["signature"][:-6] + "AAAAA="

    def shorten_result(self) -> None:
        block = self._block("tool_result")
        if block is not None:
            block["content"] = "[shortened]"

    def clear_result(self) -> None:
        block = self._block("tool_result")
        if block is not None:
            block["content"] = ""

    def shape_of_result(self) -> None:
        block = self._block("tool_result")
        if block is not None and isinstance(block["content"], str) and block["content"]:
            block["content"] = [{"type": "text", "text": block["content"], "cache_control": MARK}]

    def edit_input(self) -> None:
        block = self._block("tool_use")
        if block is not None:
            block["input"] = {**block["input"], "path": "other"}

    def mark_in_input(self) -> None:
        """Add a false cache mark to the input of a tool call."""
        block = self._block("tool_use")
        if block is not None:
            block["input"] = {**block["input"], "cache_control": MARK}

    def order_of_keys(self) -> None:
        message = self._message()
        if message is not None and isinstance(message["content"], list):
            message["content"] = [dict(reversed(block.items())) for block in message["content"]]

    def drop_turn(self) -> None:
        messages = self.body["messages"]
        if len(messages) > 4:
            start = self._chance.randrange(1, len(messages) - 3, 2)
            del messages[start : start + 2]

    def swap_turns(self) -> None:
        messages = self.body["messages"]
        if len(messages) > 6:
            messages[1:5] = [*messages[3:5], *messages[1:3]]

    def append_text(self) -> None:
        message = self._message()
        if message is not None:
            self._as_blocks(message).append({"type": "text", "text": "Remember the rules."})

    def remove_text(self) -> None:
        message = self._message()
        if message is not None and isinstance(message["content"], list) and len(message["content"]) > 1:
            message["content"] = [block for block in message["content"] if block["type"] != "text"] or [
                {"type": "text", "text": "gone"}
            ]

    def shape_of_text(self) -> None:
        message = self._message()
        if message is None:
            return
        content = message["content"]
        if isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
        elif len(content) == 1 and set(content[0]) == {"type", "text"}:
            message["content"] = content[0]["text"]

    def mark_cache(self) -> None:
        block = self._block("text", "tool_result", "tool_use")
        if block is not None:
            block["cache_control"] = MARK

    def unmark_cache(self) -> None:
        for message in self.body["messages"]:
            for block in message["content"] if isinstance(message["content"], list) else ():
                block.pop("cache_control", None)

    def mark_tools_and_system(self) -> None:
        if self.body["tools"]:
            self.body["tools"][-1]["cache_control"] = MARK
        system = self.body["system"]
        text = system if isinstance(system, str) else system[0]["text"]
        self.body["system"] = [{"type": "text", "text": text, "cache_control": MARK}]

    def edit_system(self) -> None:
        self.body["system"] = self._chance.choice(["You repair programs.", "You write programs."])

    def add_tool(self) -> None:
        self.body["tools"].append({"name": f"tool{self._chance.randrange(3)}", "input_schema": {"type": "object"}})

    def add_deferred_tool(self) -> None:
        tool = {"name": f"later{self._chance.randrange(3)}", "input_schema": {"type": "object"}, "defer_loading": True}
        self.body["tools"].append(tool)

    def remove_tool(self) -> None:
        if len(self.body["tools"]) > 1:
            self.body["tools"].pop(self._chance.randrange(len(self.body["tools"])))

    def edit_tool(self) -> None:
        self._chance.choice(self.body["tools"])["description"] = "edited"

    def insert_system_message(self) -> None:
        place = self._chance.randrange(1, len(self.body["messages"]) + 1)
        self.body["messages"].insert(place, {"role": "system", "content": "Be brief."})

    def remove_system_message(self) -> None:
        self.body["messages"] = [one for one in self.body["messages"] if one["role"] != "system"]

    def edit_image(self) -> None:
        block = self._block("image")
        if block is not None:
            block["source"] = {**block["source"], "data": "AAAA"}

    def turn_on_drop_block(self) -> None:
        self.headers["anthropic-beta"] = f"other-beta,{BETA}" if self._chance.random() < 0.8 else "other-beta"
        self.body["thinking"] = {
            "type": "adaptive",
            "block_binding": {"prefix_mismatch_behavior": self._chance.choice(["error", *["drop_block"] * 3])},
        }

    def turn_off_drop_block(self) -> None:
        self.body["thinking"] = {"type": "adaptive"}

    def beta(self) -> None:
        self.headers["anthropic-beta"] = self._chance.choice(["", BETA])

    def switch_model(self) -> None:
        self.body["model"] = self._chance.choice(MODELS)

    def thinking_mode(self) -> None:
        kind = self._chance.choice(["adaptive", "between_tools", "disabled"])
        self.body["thinking"] = {"type": kind}

    def other_fields(self) -> None:
        self.body["max_tokens"] = self._chance.randrange(2000, 4000)
        self.body["output_config"] = {"effort": self._chance.choice(["low", "high", "xhigh"])}
        self.body["metadata"] = {"user_id": str(self._chance.random())}

    def tool_choice(self) -> None:
        self.body["tool_choice"] = {"type": self._chance.choice(["auto", "none", "any"])}

    def sampling(self) -> None:
        name, values = self._chance.choice([("temperature", (1, 0.5)), ("top_p", (0.99, 0.5)), ("top_k", (5,))])
        self.body[name] = self._chance.choice(values)

    def usual_fields(self) -> None:
        """Undo edits whose fields the provider may refuse."""
        for name in ("temperature", "top_p", "top_k", "tool_choice"):
            self.body.pop(name, None)
        self.body["thinking"] = {"type": "adaptive"}

    def prefill(self) -> None:
        self.body["messages"].append({"role": "assistant", "content": "The answer is"})


EDITS: tuple[Callable[[Edits], None], ...] = tuple(
    method for name, method in vars(Edits).items() if not name.startswith("_") and name not in ("append", "edit")
)
