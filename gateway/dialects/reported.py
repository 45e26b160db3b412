"""Read the token usage that a provider reports, in all known forms.

The rules, each from recorded responses:

- The last value of each field counts. A running total on every chunk is therefore not added up.
- null never replaces a value. Zero is a value, but an object with only zeros replaces nothing.
- Details are parts of their parent. `total_tokens` is the provider's own number.
- Values that are not a count (text, booleans, negative numbers, NaN) are treated as absent.
- Values above 2^53 become 2^53.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Final

from gateway.core.usage import MAX_TOKENS, Usage, UsageSource
from gateway.core.values import dataclass

#: objects with details: their counts, and the full name of each count in `UsageReader`
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
#: tokens that are cached longer than by default, at a higher price: one hour at Anthropic, 12 hours at OpenAI
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
#: the counts of all input, of all output and of both, and the names of each count of a part of them
_SIDES: Final = frozenset(("prompt_tokens", "input_tokens", "total_tokens", *_OUTPUT))
_PARTS: Final = (_CACHE_READ, _CACHE_WRITE, _REASONING, _AUDIO_IN, _AUDIO_OUT, _CACHE_WRITE_1H)
_NO_PARTS: Final = (0,) * len(_PARTS)
#: lifetimes of OpenAI's cache writes; this object is inside the details of the input
_LIFETIMES: Final = "cache_write_tokens_details"
#: the counts in `tool_usage`, by tool
_TOOL_COUNTS: Final = (("web_search", "num_requests"), ("image_gen", "total_tokens"))
_TOP_LEVEL: Final = frozenset(
    {
        *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens"),
        *(name for name in (*_CACHE_READ, *_CACHE_WRITE, *_REASONING) if "." not in name),
    }
)
#: passes of an advisor model, and passes that summarize the conversation
_ADVISOR: Final = "advisor_message"
_COMPACTION: Final = "compaction"
#: the pass of a model that responded because the requested model refused
_FALLBACK: Final = "fallback_message"
#: types of passes that belong to an attempt to respond
_ATTEMPT_TYPES: Final = ("message", _FALLBACK)
#: Reasoning of more than this many times the output is billed in addition to it. The second value applies if no total
#: was reported.
_ADDITIONAL_FROM: Final = 2.0
_ADDITIONAL_FROM_WITHOUT_TOTAL: Final = 1.5
#: USD; a larger amount is not accepted as the cost of one call
_MAX_USD: Final = 1_000_000
#: the cost field of xAI, and its units per USD: https://docs.x.ai/developers/cost-tracking
_TICKS: Final = "cost_in_usd_ticks"
_TICKS_OF_USD: Final = 10**10


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """Usage that a provider reported. Each field without a default is None if it was not reported."""

    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0
    cache_write_1h_tokens: int = 0
    #: cost of the call as the provider reported it; None if it did not
    cost_usd: Decimal | None = None
    #: web searches by the provider (Anthropic, OpenAI's Responses), which have a fee each
    searches: int = 0
    #: tokens of images that a provider's tool generated in addition to the response, with their own prices
    picture_tokens: int = 0
    #: usage per model, if the provider reports passes separately: an advisor has its own price
    by_model: tuple[tuple[str, Usage], ...] = ()
    #: Tokens of the request as sent, if passes are listed. 0: they do not predict the size of the next request.
    #: None: passes are not listed, and the request is all of the input.
    request_tokens: int | None = None
    #: If passes are listed: model and usage of each attempt to respond. A new attempt begins when another model takes
    #: over.
    attempts: tuple[tuple[str | None, Usage], ...] = ()

    @property
    def has_tokens(self) -> bool:
        """Return True if token counts were reported, not only a cost."""
        return self.input_tokens is not None or self.output_tokens is not None

    @property
    def is_billed(self) -> bool:
        """Return True if the reported usage or cost is above zero."""
        return bool(self.input_tokens or self.output_tokens or self.cost_usd)

    def complete(self, estimated_input: int, estimated_output: int) -> tuple[Usage, UsageSource]:
        """Return the usage to charge: the reported values, and the estimate for a side that was not reported."""
        source: UsageSource = "provider"
        tokens_in, tokens_out = self.input_tokens, self.output_tokens
        if tokens_in is None:
            source, tokens_in = "mixed", estimated_input
        if tokens_out is None:
            source, tokens_out = "mixed", estimated_output
        tokens_out += self._additional_reasoning(tokens_in, tokens_out)
        usage = Usage(
            tokens_in,
            tokens_out,
            # A total below the sum of its parts is wrong. Some hosts omit the total or report zero.
            max(self.total_tokens or 0, tokens_in + tokens_out),
            self.cache_read_tokens,
            self.cache_write_tokens,
            self.reasoning_tokens,
            self.audio_input_tokens,
            self.audio_output_tokens,
            self.cache_write_1h_tokens,
        )
        return usage, source

    def _additional_reasoning(self, tokens_in: int, tokens_out: int) -> int:
        """Return the reasoning tokens that are billed in addition to the output tokens.

        Either the total includes them (xAI), or they are too many to be part of the output. Slightly more reasoning
        than output is the same text, counted with another tokenizer.
        """
        factor = _ADDITIONAL_FROM if self.total_tokens else _ADDITIONAL_FROM_WITHOUT_TOTAL
        if self.reasoning_tokens > factor * tokens_out:
            return self.reasoning_tokens
        return min(self.reasoning_tokens, max(0, (self.total_tokens or 0) - tokens_in - tokens_out))


class UsageReader:
    """Collect the usage objects of one response; a stream may have many."""

    __slots__ = ("_attempts", "_cost_usd", "_fields", "_is_edited", "_named", "_request_tokens")

    def __init__(self) -> None:
        self._fields: dict[str, int] = {}
        self._named: dict[str, dict[str, int]] = {}
        self._attempts: list[tuple[str | None, dict[str, int]]] = []
        self._cost_usd: Decimal | None = None
        self._request_tokens: int | None = None
        self._is_edited = False

    def add(self, usage: object, *, input_side_only: bool = False) -> None:
        """Add one usage object as the provider sent it; any other value is ignored.

        `input_side_only`: Anthropic's `message_start` reports the input. Its `output_tokens` is a placeholder, and a
        cost in it would be one too. Hosts that do not know the input yet, such as translating proxies, send zeros.
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
            # Some streams end with zeros for an input that they reported at the start.
            fields = {name: number for name, number in fields.items() if name not in _INPUT or name not in self._fields}
        self._fields.update(fields)

    def edited(self) -> None:
        """Note that the provider removed a part of the request before its model read it."""
        self._is_edited = True

    def add_tools(self, tool_usage: object) -> None:
        """Add the `tool_usage` that OpenAI's Responses report for the tools that OpenAI ran."""
        if not isinstance(tool_usage, dict):
            return
        for tool, name in _TOOL_COUNTS:
            details = tool_usage.get(tool)
            number = count(details.get(name)) if isinstance(details, dict) else None
            if number is not None:
                self._fields[f"{tool}.{name}"] = number

    def _is_empty_end(self, fields: Mapping[str, int]) -> bool:
        """Return True for the zeros with which some streams end, but not for a zero as the first output count."""
        if not fields or any(fields.values()) or not any(self._fields.values()):
            return False
        reported = self.reported()
        is_missing = reported is None or reported.output_tokens is None
        return not (is_missing and fields.keys().isdisjoint(_INPUT) and not fields.keys().isdisjoint(_OUTPUT))

    def _take_cost(self, usage: Mapping[str, object], *, unless_zero: bool = False) -> None:
        cost = usage.get("cost")
        if cost is None:
            cost = usage.get(_TICKS)
        if cost is not None and (cost or not unless_zero):
            self._cost_usd = _cost(usage)

    def reported(self) -> ReportedUsage | None:
        """Return everything that was reported, or None if nothing was."""
        total = _reported(self._fields, self._cost_usd)
        request_tokens = 0 if self._is_edited else self._request_tokens
        if total is None or not (self._named or request_tokens is not None):
            return total
        named = tuple([(name, used) for name, fields in self._named.items() if (used := _used(fields)) is not None])
        attempts = tuple([(name, used) for name, fields in self._attempts if (used := _used(fields)) is not None])
        return replace(total, by_model=named, request_tokens=request_tokens, attempts=attempts)


def _reported(fields: Mapping[str, int], cost_usd: Decimal | None = None) -> ReportedUsage | None:
    output_tokens = _first(fields, _OUTPUT)
    total = fields.get("total_tokens")
    read, write, reasoning, audio_in, audio_out, write_1h = _parts(fields)
    input_tokens = _input_side(fields, read, write, output_tokens, total)
    if input_tokens is None and output_tokens is None and total is not None:
        input_tokens, output_tokens = total, 0
    elif output_tokens is None and input_tokens is not None and total is not None:
        # Embeddings report the prompt and a total, and have no output.
        output_tokens = max(0, total - input_tokens)
    if input_tokens is None and output_tokens is None and cost_usd is None:
        return None
    return ReportedUsage(
        input_tokens,
        output_tokens,
        total,
        read,
        write,
        reasoning,
        audio_in,
        audio_out,
        write_1h,
        cost_usd,
        fields.get("server_tool_use.web_search_requests", 0) + fields.get("web_search.num_requests", 0),
        fields.get("image_gen.total_tokens", 0),
    )


def _parts(fields: Mapping[str, int]) -> Sequence[int]:
    """Return the counts of the parts of input and output, in the order of `_PARTS`; 0 for those not reported."""
    reported = [number for name, number in fields.items() if name not in _SIDES]
    return [_first(fields, names) or 0 for names in _PARTS] if any(reported) else _NO_PARTS


def _used(fields: Mapping[str, int]) -> Usage | None:
    """Return the usage of some passes, or None if they report none."""
    part = _reported(fields)
    return part.complete(0, 0)[0] if part is not None else None


def _input_side(
    fields: Mapping[str, int], read: int, write: int, output_tokens: int | None, total: int | None
) -> int | None:
    prompt = fields.get("prompt_tokens")
    if prompt is not None:
        # One host excludes cached tokens from prompt_tokens, which its total shows. Other hosts have a total that is
        # larger by the reasoning tokens.
        left_out = read > 0 and total == prompt + read + (output_tokens or 0)
        left_out = left_out and read != _first(fields, _REASONING)
        return prompt + read if left_out else prompt
    tokens = fields.get("input_tokens")
    if "cache_read_input_tokens" in fields or "cache_creation_input_tokens" in fields:
        # Anthropic reports the cached tokens separately from the rest.
        return min((tokens or 0) + read + write, MAX_TOKENS)
    return tokens


def _counts(usage: Mapping[str, object]) -> dict[str, int]:
    """Return the known counts of one usage object; ignore all other fields."""
    counts: dict[str, int] = {}
    for name, value in usage.items():
        if name in _TOP_LEVEL:
            if (number := count(value)) is not None:
                counts[name] = number
        elif name in _DETAILS and isinstance(value, dict):
            for part, full_name in _DETAILS[name].items():
                if part in value and (number := count(value[part])) is not None:
                    counts[full_name] = number
            if _LIFETIMES in value:
                counts |= _counts({_LIFETIMES: value[_LIFETIMES]})
    return counts


def _sum_of_passes(iterations: list[object]) -> dict[str, int]:
    """Return the sums of Anthropic's billed passes (compaction, advisor); the top level has only the last pass."""
    total: dict[str, int] = {}
    for entry in iterations:
        if isinstance(entry, dict):
            for name, value in _counts(entry).items():
                total[name] = min(total.get(name, 0) + value, MAX_TOKENS)
    return total


def _first_pass(iterations: list[object]) -> int:
    """Return the input of the first pass of the requested model, which is the request as sent; later passes differ.

    Return 0 if the conversation was compacted, because the pass that reads all of it does not predict the remaining
    size. Return 0 too if the first pass is of another model, which counts tokens differently.
    """
    passes = [entry for entry in iterations if isinstance(entry, dict) and entry.get("type") != _ADVISOR]
    if not passes or any(entry.get("type") == _COMPACTION for entry in passes) or passes[0].get("type") == _FALLBACK:
        return 0
    first = _reported(_counts(passes[0]))
    return (first.input_tokens or 0) if first is not None else 0


def _by_model(iterations: list[object]) -> dict[str, dict[str, int]]:
    """Return the sums of the passes for each model that they name."""
    passes: dict[str, list[object]] = {}
    for entry in iterations:
        if isinstance(entry, dict) and isinstance(name := entry.get("model"), str):
            passes.setdefault(name, []).append(entry)
    return {name: _sum_of_passes(entries) for name, entries in passes.items()}


def _attempts(iterations: list[object]) -> list[tuple[str | None, dict[str, int]]]:
    """Return model and sums of each attempt to respond; consecutive passes of one model are one attempt."""
    attempts: list[tuple[str | None, list[object]]] = []
    for entry in iterations:
        if isinstance(entry, dict) and entry.get("type") in _ATTEMPT_TYPES:
            name = entry.get("model")
            model = name if isinstance(name, str) else None
            if not attempts or attempts[-1][0] != model:
                attempts.append((model, []))
            attempts[-1][1].append(entry)
    return [(model, _sum_of_passes(passes)) for model, passes in attempts]


def _cost(usage: Mapping[str, object]) -> Decimal | None:
    """Return the reported cost in USD: a number, the total in Perplexity's list of parts, or xAI's ticks.

    OpenRouter reports its own charge in `cost`. `upstream_inference_cost` is what the owner of a key pays at another
    provider (BYOK), so it is added. Responses to other calls have it as well, as a part of `cost`, so `is_byok`
    decides. If `is_byok` is missing, an upstream cost above `cost` cannot be a part of it.

    https://openrouter.ai/docs/cookbook/administration/usage-accounting
    """
    cost = usage.get("cost")
    if cost is None:
        return _usd(usage.get(_TICKS), _TICKS_OF_USD)
    own = _usd(cost.get("total_cost") if isinstance(cost, dict) else cost)
    details = usage.get("cost_details")
    upstream = _usd(details.get("upstream_inference_cost")) if isinstance(details, dict) else None
    if own is None or upstream is None:
        return own
    is_byok = usage.get("is_byok")
    return own + upstream if is_byok is True or (is_byok is None and upstream > own) else own


def _usd(value: object, units: int = 1) -> Decimal | None:
    """Return an amount in USD, or None if the value is not an amount. `units`: units of the value per USD."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_USD * units:
        return None
    return abs(Decimal(str(value)) / units)  # JSON has a negative zero


def count(value: object) -> int | None:
    """Return a token count as an integer from 0 to 2^53, or None if the value is not one."""
    if type(value) is int:
        return min(value, MAX_TOKENS) if value >= 0 else None
    if isinstance(value, float) and value >= 0 and value.is_integer():
        return min(int(value), MAX_TOKENS)
    return None


def _first(fields: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    # Most responses have none of these fields.
    if fields.keys().isdisjoint(names):
        return None
    for name in names:
        if name in fields:
            return fields[name]
    return None
