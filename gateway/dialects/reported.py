"""Read the usage that a provider reports, in all known forms.

The rules, each from recorded answers: the last word counts, field by field; null never erases; a running total on
every chunk is not added up; details are parts of their parent; `total_tokens` is the provider's own; zero is zero and
absent is absent, but nothing but zeros erases nothing. Values that are no count (text, booleans, negatives, NaN) read
as absent, huge ones are cut to 2^53.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Final

from gateway.core.usage import MAX_TOKENS, Usage, UsageSource
from gateway.core.values import dataclass

#: objects of details: the counts in each, and how they are called beside those of the top level
_DETAILS: Final = {
    group: {name: f"{group}.{name}" for name in names}
    for group, names in {
        "prompt_tokens_details": ("cached_tokens", "cache_write_tokens", "audio_tokens"),
        "input_tokens_details": ("cached_tokens", "cache_write_tokens", "audio_tokens"),
        "input_token_details": ("audio_tokens",),  # of a transcription
        "completion_tokens_details": ("reasoning_tokens", "audio_tokens"),
        "output_tokens_details": ("reasoning_tokens", "thinking_tokens", "audio_tokens"),
        "cache_creation": ("ephemeral_1h_input_tokens",),
        "cache_write_tokens_details": ("ttl_12h_tokens",),
        "server_tool_use": ("web_search_requests",),
    }.items()
}
# fmt: off
_CACHE_READ: Final = (
    "prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens", "cache_read_input_tokens",
    "prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens",
)
_CACHE_WRITE: Final = (
    "prompt_tokens_details.cache_write_tokens", "input_tokens_details.cache_write_tokens",
    "cache_creation_input_tokens",
)
#: what is kept longer than usual, at a higher price: an hour at Anthropic, 12 hours at OpenAI
_CACHE_WRITE_1H: Final = ("cache_creation.ephemeral_1h_input_tokens", "cache_write_tokens_details.ttl_12h_tokens")
_INPUT: Final = frozenset(("prompt_tokens", "input_tokens", *_CACHE_READ, *_CACHE_WRITE))
_OUTPUT: Final = ("completion_tokens", "output_tokens")
_REASONING: Final = (
    "completion_tokens_details.reasoning_tokens", "output_tokens_details.reasoning_tokens",
    "output_tokens_details.thinking_tokens", "reasoning_tokens",
)
_AUDIO_IN: Final = (
    "prompt_tokens_details.audio_tokens", "input_tokens_details.audio_tokens", "input_token_details.audio_tokens",
)
_AUDIO_OUT: Final = ("completion_tokens_details.audio_tokens", "output_tokens_details.audio_tokens")
# fmt: on
#: how long OpenAI keeps what it wrote to the cache; an object inside the details of the input
_LIFETIMES: Final = "cache_write_tokens_details"
#: what is counted in `tool_usage`, by tool
_OF_TOOLS: Final = (("web_search", "num_requests"), ("image_gen", "total_tokens"))
_TOP_LEVEL: Final = frozenset(
    {
        *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens"),
        *(name for name in (*_CACHE_READ, *_CACHE_WRITE, *_REASONING) if "." not in name),
    }
)
#: passes of another model, and of one that sums up the conversation
_ADVICE: Final = "advisor_message"
_COMPACTION: Final = "compaction"
#: the pass of a model that answered because the requested one refused
_FALLBACK: Final = "fallback_message"
#: passes that belong to an attempt to answer
_OF_ATTEMPTS: Final = ("message", _FALLBACK)
#: how many times the output reasoning is at the least that stands beside it, whatever the total says; and where there
#: is no total
_NO_PART: Final = 2.0
_NO_PART_WITHOUT_TOTAL: Final = 1.5
#: USD; what is above it is not taken for the cost of one call
_MOST_USD: Final = 1_000_000
#: what xAI writes, and how many make a USD: https://docs.x.ai/developers/cost-tracking
_TICKS: Final = "cost_in_usd_ticks"
_TICKS_OF_USD: Final = 10**10


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """A provider's figures. A side is None where nothing was said of it, and so is `cost_usd`, what the call costs."""

    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    cache_write_1h_tokens: int = 0
    cost_usd: Decimal | None = None
    #: web searches that the provider made (Anthropic, OpenAI's Responses), which cost a fee each
    searches: int = 0
    #: tokens of pictures that a tool of the provider's made beside the answer, at prices of their own
    picture_tokens: int = 0
    #: what each model used of it, where the provider tells passes apart: an advisor has a price of its own
    named: tuple[tuple[str, Usage], ...] = ()
    #: What the request weighed as it was sent, where passes are listed; 0 where that does not tell what the next one
    #: will weigh. None: it is all of the input.
    request_tokens: int | None = None
    #: Where passes are listed, what each attempt to answer used, and its model: the next attempt begins where another
    #: model takes over.
    attempts: tuple[tuple[str | None, Usage], ...] = ()

    @property
    def has_tokens(self) -> bool:
        """Whether it says more than what the call costs."""
        return self.input_tokens is not None or self.output_tokens is not None

    @property
    def is_billed(self) -> bool:
        """Whether it says that anything is paid for."""
        return bool(self.input_tokens or self.output_tokens or self.cost_usd)

    def complete(self, estimated_input: int, estimated_output: int) -> tuple[Usage, UsageSource]:
        """The usage to charge: what was reported, and the estimate for a side of which nothing was."""
        source: UsageSource = "provider"
        tokens_in, tokens_out = self.input_tokens, self.output_tokens
        if tokens_in is None:
            source, tokens_in = "mixed", estimated_input
        if tokens_out is None:
            source, tokens_out = "mixed", estimated_output
        tokens_out += self._reasoning_beside(tokens_in, tokens_out)
        usage = Usage(
            tokens_in,
            tokens_out,
            # A total below its parts is no total; hosts that leave it out or at zero are seen.
            max(self.total_tokens or 0, tokens_in + tokens_out),
            self.cache_read_tokens,
            self.cache_write_tokens,
            self.reasoning_tokens,
            self.audio_input_tokens,
            self.audio_output_tokens,
            self.cache_write_1h_tokens,
        )
        return usage, source

    def _reasoning_beside(self, tokens_in: int, tokens_out: int) -> int:
        """Return the reasoning tokens that are billed beside these of the output.

        The total shows them (xAI), or they are too many to be a part of the output. A little more than the output is
        the same text, counted again with another tokenizer.
        """
        no_part = _NO_PART if self.total_tokens else _NO_PART_WITHOUT_TOTAL
        if self.reasoning_tokens > no_part * tokens_out:
            return self.reasoning_tokens
        return min(self.reasoning_tokens, max(0, (self.total_tokens or 0) - tokens_in - tokens_out))


class UsageReader:
    """Collects the usage objects of one answer; a stream may carry many."""

    __slots__ = ("_attempts", "_cost_usd", "_fields", "_is_edited", "_named", "_request_tokens")

    def __init__(self) -> None:
        self._fields: dict[str, int] = {}
        self._named: dict[str, dict[str, int]] = {}
        self._attempts: list[tuple[str | None, dict[str, int]]] = []
        self._cost_usd: Decimal | None = None
        self._request_tokens: int | None = None
        self._is_edited = False

    def add(self, usage: object, *, input_side_only: bool = False) -> None:
        """Take one usage object as it stood on the wire; anything else is ignored.

        `input_side_only`: an Anthropic `message_start` states the input; its `output_tokens` is a placeholder, and so
        would be a cost. Hosts that do not know the input yet, as where an answer is translated, write zeros there.
        """
        if not isinstance(usage, dict):
            return
        fields = _counts(usage)
        iterations = usage.get("iterations")
        if isinstance(iterations, list):
            passes = _sum_of_passes(iterations)
            fields |= passes
            self._named, self._attempts = _by_model(iterations), _attempts(iterations)
            self._request_tokens = _first_pass(iterations) if passes else None
        if input_side_only:
            fields.pop("output_tokens", None)
            if not any(fields.values()):
                return
        elif self._is_empty_end(fields):
            self._take_cost(usage, unless_zero=True)
            return
        else:
            self._take_cost(usage)
        if self._fields and not any(fields[name] for name in _INPUT & fields.keys()):
            # Some streams end with zeros for the input, which they reported when they began.
            fields = {name: number for name, number in fields.items() if name not in _INPUT or name not in self._fields}
        self._fields.update(fields)

    def edited(self) -> None:
        """Take that the provider left out a part of the request before its model read it."""
        self._is_edited = True

    def add_tools(self, said: object) -> None:
        """Take what OpenAI's Responses say beside the usage of the tools that OpenAI ran."""
        if not isinstance(said, dict):
            return
        for tool, name in _OF_TOOLS:
            details = said.get(tool)
            number = count(details.get(name)) if isinstance(details, dict) else None
            if number is not None:
                self._fields[f"{tool}.{name}"] = number

    def _is_empty_end(self, fields: Mapping[str, int]) -> bool:
        """Whether these are the zeros with which some streams end; not a zero that is the first word on the output."""
        if not fields or any(fields.values()) or not any(self._fields.values()):
            return False
        said = self.reported()
        is_missing = said is None or said.output_tokens is None
        return not (is_missing and fields.keys().isdisjoint(_INPUT) and not fields.keys().isdisjoint(_OUTPUT))

    def _take_cost(self, usage: Mapping[str, object], *, unless_zero: bool = False) -> None:
        said = usage.get("cost")
        if said is None:
            said = usage.get(_TICKS)
        if said is not None and (said or not unless_zero):
            self._cost_usd = _cost(usage)

    def reported(self) -> ReportedUsage | None:
        """All that was said, or None where nothing was."""
        found = _reported(self._fields, self._cost_usd)
        request_tokens = 0 if self._is_edited else self._request_tokens
        if found is None or not (self._named or request_tokens is not None):
            return found
        named = tuple([(name, used) for name, fields in self._named.items() if (used := _used(fields)) is not None])
        attempts = tuple([(name, used) for name, fields in self._attempts if (used := _used(fields)) is not None])
        return replace(found, named=named, request_tokens=request_tokens, attempts=attempts)


def _reported(fields: Mapping[str, int], cost_usd: Decimal | None = None) -> ReportedUsage | None:
    output_tokens = _first(fields, _OUTPUT)
    total = fields.get("total_tokens")
    read = _first(fields, _CACHE_READ) or 0
    write = _first(fields, _CACHE_WRITE) or 0
    input_tokens = _input_side(fields, read, write, output_tokens, total)
    if input_tokens is None and output_tokens is None and total is not None:
        input_tokens, output_tokens = total, 0
    elif output_tokens is None and input_tokens is not None and total is not None:
        # Embeddings: the prompt and a total, nothing comes out.
        output_tokens = max(0, total - input_tokens)
    if input_tokens is None and output_tokens is None and cost_usd is None:
        return None
    return ReportedUsage(
        input_tokens,
        output_tokens,
        total,
        read,
        write,
        _first(fields, _REASONING) or 0,
        _first(fields, _AUDIO_IN) or 0,
        _first(fields, _AUDIO_OUT) or 0,
        _first(fields, _CACHE_WRITE_1H) or 0,
        cost_usd,
        fields.get("server_tool_use.web_search_requests", 0) + fields.get("web_search.num_requests", 0),
        fields.get("image_gen.total_tokens", 0),
    )


def _used(fields: Mapping[str, int]) -> Usage | None:
    """Return what some passes used, or None where they say nothing of it."""
    part = _reported(fields)
    return part.complete(0, 0)[0] if part is not None else None


def _input_side(
    fields: Mapping[str, int], read: int, write: int, output_tokens: int | None, total: int | None
) -> int | None:
    prompt = fields.get("prompt_tokens")
    if prompt is not None:
        # One host leaves the cached part out of prompt_tokens; its total tells. Others have reasoning in that alone.
        left_out = read > 0 and total == prompt + read + (output_tokens or 0)
        left_out = left_out and read != _first(fields, _REASONING)
        return prompt + read if left_out else prompt
    tokens = fields.get("input_tokens")
    if "cache_read_input_tokens" in fields or "cache_creation_input_tokens" in fields:
        # Anthropic reports the cached parts beside the rest.
        return min((tokens or 0) + read + write, MAX_TOKENS)
    return tokens


def _counts(usage: Mapping[str, object]) -> dict[str, int]:
    """The known counts of one usage object; other fields are the provider's to add, and not ours to keep."""
    found: dict[str, int] = {}
    for name, said in usage.items():
        if name in _TOP_LEVEL:
            if (number := count(said)) is not None:
                found[name] = number
        elif name in _DETAILS and isinstance(said, dict):
            for part, full_name in _DETAILS[name].items():
                if part in said and (number := count(said[part])) is not None:
                    found[full_name] = number
            if _LIFETIMES in said:
                found |= _counts({_LIFETIMES: said[_LIFETIMES]})
    return found


def _sum_of_passes(iterations: list[object]) -> dict[str, int]:
    """Anthropic lists the billed passes of a call (compaction, advisor) apart; its top level holds the last one."""
    total: dict[str, int] = {}
    for entry in iterations:
        if isinstance(entry, dict):
            for name, value in _counts(entry).items():
                total[name] = min(total.get(name, 0) + value, MAX_TOKENS)
    return total


def _first_pass(iterations: list[object]) -> int:
    """The input of the first pass of the call's own model, which has what was sent; later ones have more, or less.

    0 where the conversation was compacted: a pass that reads all of it says nothing of what is left. So does a first
    pass of another model, which counts tokens in its own way.
    """
    passes = [entry for entry in iterations if isinstance(entry, dict) and entry.get("type") != _ADVICE]
    if not passes or any(entry.get("type") == _COMPACTION for entry in passes) or passes[0].get("type") == _FALLBACK:
        return 0
    first = _reported(_counts(passes[0]))
    return (first.input_tokens or 0) if first is not None else 0


def _by_model(iterations: list[object]) -> dict[str, dict[str, int]]:
    """The same sums of each model that passes name."""
    passes: dict[str, list[object]] = {}
    for entry in iterations:
        if isinstance(entry, dict) and isinstance(name := entry.get("model"), str):
            passes.setdefault(name, []).append(entry)
    return {name: _sum_of_passes(mine) for name, mine in passes.items()}


def _attempts(iterations: list[object]) -> list[tuple[str | None, dict[str, int]]]:
    """Return the model and the sums of each attempt to answer: passes in a row of one model are one attempt."""
    found: list[tuple[str | None, list[object]]] = []
    for entry in iterations:
        if isinstance(entry, dict) and entry.get("type") in _OF_ATTEMPTS:
            name = entry.get("model")
            model = name if isinstance(name, str) else None
            if not found or found[-1][0] != model:
                found.append((model, []))
            found[-1][1].append(entry)
    return [(model, _sum_of_passes(passes)) for model, passes in found]


def _cost(usage: Mapping[str, object]) -> Decimal | None:
    """USD as a provider says it: the number, the sum in Perplexity's list of parts, or xAI's ticks.

    OpenRouter tells apart what it charges itself, and what the owner of another provider's key pays there.

    https://openrouter.ai/docs/cookbook/administration/usage-accounting: `upstream_inference_cost` applies to calls with
    a key of one's own (BYOK). Answers to other calls carry it as well, as a part of `cost`, so that `is_byok` decides;
    where that is missing, a part cannot be larger than the whole.
    """
    said = usage.get("cost")
    if said is None:
        return _usd(usage.get(_TICKS), _TICKS_OF_USD)
    own = _usd(said.get("total_cost") if isinstance(said, dict) else said)
    details = usage.get("cost_details")
    theirs = _usd(details.get("upstream_inference_cost")) if isinstance(details, dict) else None
    if own is None or theirs is None:
        return own
    is_byok = usage.get("is_byok")
    return own + theirs if is_byok is True or (is_byok is None and theirs > own) else own


def _usd(value: object, units: int = 1) -> Decimal | None:
    """An amount of money, of which `units` are a USD, or None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_USD * units:
        return None
    return abs(Decimal(str(value)) / units)  # JSON has a zero below zero


def count(value: object) -> int | None:
    """A token count as a provider may write it, or None: whole, not negative, at most 2^53."""
    if type(value) is int:
        return min(value, MAX_TOKENS) if value >= 0 else None
    if isinstance(value, float) and value >= 0 and value.is_integer():
        return min(int(value), MAX_TOKENS)
    return None


def _first(fields: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    # Most answers say none of them.
    if fields.keys().isdisjoint(names):
        return None
    for name in names:
        if name in fields:
            return fields[name]
    return None
