"""Test pure functions with generated values."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import InvalidRequest
from gateway.core.http.compression import Corrupt, TooLarge, Unpacker, unpack
from gateway.core.http.sse import EventBuffer, data_of_events, event_data, split_events
from gateway.core.identity import derive, from_body, from_headers, is_valid, text_of
from gateway.core.ids import call_id, first_id_at
from gateway.core.pricing import Price, Rates, cost, price_from_table
from gateway.core.usage import MAX_TOKENS, Charge, Totals, Usage, UsageSource
from gateway.dialects import CHAT, endpoint
from gateway.dialects.base import StreamMeter
from gateway.dialects.fields import _COST_FIELDS, decode, read_fields, write_fields
from gateway.dialects.reported import UsageReader, count

law = settings(max_examples=100, deadline=None)

# --- values -----------------------------------------------------------------------------------------------------------

any_text = st.text(st.characters(), max_size=30)
clean_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
hostile_numbers = st.sampled_from(
    [
        0,
        -1,
        1,
        True,
        False,
        2**53,
        2**53 + 1,
        2**63,
        2**64,
        10**400,
        -(10**400),
        0.0,
        -0.0,
        1.5,
        3.0,
        1e300,
        "7",
        "",
        [],
    ]
) | st.floats(allow_nan=True, allow_infinity=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | clean_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(clean_text, inner, max_size=4),
    max_leaves=12,
)
tokens = st.integers(0, MAX_TOKENS)
usages = st.builds(Usage, tokens, tokens, tokens, tokens, tokens, tokens, tokens, tokens)
sources: st.SearchStrategy[UsageSource] = st.sampled_from(["provider", "estimated", "mixed"])
rates = st.decimals(0, 1, places=9)
maybe_rates = st.none() | rates
prices = st.builds(
    Price, st.builds(Rates, rates, rates, maybe_rates, maybe_rates, maybe_rates, maybe_rates, maybe_rates), st.just({})
)
charges = st.builds(Charge, usages, sources, st.none() | rates)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)

# --- server-sent events -------------------------------------------------------------------------------------------------

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
sse_lines = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b"data: ",
        b"data: {}",
        b"event: x",
        b": note",
        b"id: 1",
        b"",
        b"x",
        "data: 漢".encode(),
    ]
)


@st.composite
def sse_streams(draw: st.DrawFn) -> bytes:
    """Return lines with mixed line ends, and a blank line."""
    lines = draw(st.lists(st.tuples(sse_lines, line_ends), max_size=12))
    end = draw(line_ends)
    return b"".join(line + tail for line, tail in lines) + b"data: last" + end + end


def reference_data(stream: bytes) -> list[bytes]:
    """Parse events line by line as the standard describes; leave out events without data."""
    found: list[bytes] = []
    lines: list[bytes] = []
    for line in re.split(rb"\r\n|\r|\n", stream):
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                lines.append(value.removeprefix(b" "))
        elif lines:
            found.append(b"\n".join(lines))
            lines = []
    return [data for data in found if data]


def read_pieces(pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    buffer = EventBuffer()
    regions = [*map(buffer.feed, pieces), buffer.rest()]
    data = [event_data(block) for region in regions for block in split_events(region)]
    return b"".join(regions), [item for item in data if item]


@given(sse_streams(), cuts)
@law
def test_any_split_of_a_stream_gives_the_bytes_and_the_events_of_the_standard(stream: bytes, places: list[int]) -> None:
    assert read_pieces(cut(stream, places)) == (stream, reference_data(stream))


@given(st.binary(max_size=200), cuts, st.integers(0, 20))
@law
def test_no_bytes_are_lost_or_made_up_whatever_they_are(stream: bytes, places: list[int], limit: int) -> None:
    buffer = EventBuffer(limit)
    out = b""
    fed = 0
    for piece in cut(stream, places):
        out += buffer.feed(piece)
        fed += len(piece)
        assert fed - len(out) <= max(limit, 2)
    assert out + buffer.rest() == stream


#: events with names, as some APIs write them, and sometimes other lines between them
named_streams = st.lists(
    st.sampled_from([b"event: a\ndata: b\n\n"] * 6 + [b"event: data: a\ndata: \n\n", b"event: a\n\n", b"data: a\n"])
    | sse_lines.map(lambda line: line + b"\n\n"),
    max_size=12,
).map(lambda events: b"".join([*events, b"event: z\ndata: last\n\n"]))


@given(sse_streams() | named_streams)
@law
def test_many_events_read_at_once_are_those_read_one_by_one(region: bytes) -> None:
    one_by_one = [data for data in map(event_data, split_events(region)) if data]
    assert data_of_events(region) == one_by_one


chat_chunks: st.SearchStrategy[bytes] = st.sampled_from(
    [
        b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\"choices\\":[{"}}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n',
        b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":6,"completion_tokens":3}}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[{"a":1}]}\n\n',
        b": keep-alive\n\n",
        b"event: x\ndata: {}\n\n",
        b'data: {"error":{"message":"x"}}\n\n',
    ]
)


@given(st.lists(chat_chunks, max_size=12), st.booleans(), cuts)
@law
def test_any_split_of_a_chat_stream_is_metered_alike_and_only_usage_chunks_are_missing(
    chunks: list[bytes], drop: bool, places: list[int]
) -> None:
    stream = b"".join(chunks) + b"data: [DONE]\n\n"
    call = CHAT.read(b'{"model":"m","messages":[]}')
    meter, whole = (StreamMeter(CHAT.reader(call, drop_usage=drop)) for _ in range(2))
    out = b"".join(map(meter.feed, cut(stream, places)))
    assert b"[DONE]" not in out
    out += meter.close()
    assert out == whole.feed(stream) + whole.close()
    assert meter.response() == whole.response()
    kept = [chunk for chunk in chunks if not (drop and b'"choices":[],"usage"' in chunk)]
    assert out == b"".join(kept) + b"data: [DONE]\n\n"


# --- usage ----------------------------------------------------------------------------------------------------------------


@given(st.lists(charges, max_size=8), st.randoms(use_true_random=False))
@law
def test_the_order_of_charges_does_not_matter_and_no_charge_lowers_a_total(found: list[Charge], random: Any) -> None:
    def add_all(items: list[Charge]) -> Totals:
        totals = Totals()
        for item in items:
            after = totals.add(item)
            for name in Totals.__dataclass_fields__:
                assert getattr(after, name) >= getattr(totals, name)
            totals = after
        return totals

    shuffled = list(found)
    random.shuffle(shuffled)
    assert add_all(found) == add_all(shuffled)


@given(hostile_numbers)
@law
def test_a_count_is_a_whole_number_in_bounds_or_nothing(value: object) -> None:
    number = count(value)
    assert number is None or (type(number) is int and 0 <= number <= MAX_TOKENS)


usage_names = st.sampled_from(
    [
        "prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens",
        "cache_read_input_tokens", "cache_creation_input_tokens", "prompt_cache_hit_tokens", "cached_tokens",
        "reasoning_tokens", "prompt_tokens_details", "completion_tokens_details", "input_tokens_details", "iterations",
    ]
)  # fmt: skip
detail_names = st.sampled_from(["cached_tokens", "reasoning_tokens", "audio_tokens", "cache_write_tokens"])
hostile_usage = st.dictionaries(
    usage_names,
    hostile_numbers
    | st.none()
    | st.dictionaries(detail_names, hostile_numbers)
    | st.lists(st.none() | st.dictionaries(usage_names, hostile_numbers, max_size=4), max_size=3),
    max_size=6,
)


@given(st.lists(hostile_usage | hostile_numbers | st.none(), max_size=4), st.booleans(), tokens, tokens)
@law
def test_any_reported_usage_gives_counts_that_only_add(
    reported: list[object], input_side_only: bool, estimated_in: int, estimated_out: int
) -> None:
    reader = UsageReader()
    for item in reported:
        reader.add(item, input_side_only=input_side_only)
    found = reader.reported()
    if found is None:
        return
    usage, source = found.complete(estimated_in, estimated_out)
    assert source in ("provider", "mixed")
    assert all(type(getattr(usage, name)) is int for name in Usage.__dataclass_fields__)
    assert min(getattr(usage, name) for name in Usage.__dataclass_fields__) >= 0
    assert usage.total_tokens >= usage.input_tokens + usage.output_tokens


@given(st.lists(hostile_usage, max_size=3))
@law
def test_reading_the_last_usage_twice_counts_it_once(reported: list[dict[str, object]]) -> None:
    once, twice = UsageReader(), UsageReader()
    for item in reported:
        once.add(item)
        twice.add(item)
        twice.add(item)
    assert once.reported() == twice.reported()


# --- prices -----------------------------------------------------------------------------------------------------------------


@given(usages, prices)
@law
def test_a_cost_lies_between_nothing_and_all_tokens_at_the_highest_rate(usage: Usage, price: Price) -> None:
    every = [getattr(price.rates, name) for name in Rates.__dataclass_fields__]
    highest = max(rate for rate in every if rate is not None)
    billed = max(usage.total_tokens, usage.input_tokens + usage.output_tokens)
    found = cost(usage, price)
    assert found is not None
    assert 0 <= found <= highest * billed * (1 + Decimal("1e-20"))


@given(st.dictionaries(st.sampled_from(["input_cost_per_token", "output_cost_per_token"]) | any_text, hostile_numbers))
@law
def test_invalid_price_table_gives_no_price_or_a_valid_one(entry: dict[str, object]) -> None:
    price = price_from_table(entry)
    assert price is None or min(price.rates.input, price.rates.output) >= 0


# --- identity ------------------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(["metadata", "session_id", "conversation", "prompt_cache_key"]), json_values))
@law
def test_an_id_from_a_body_is_valid_or_none(fields: dict[str, Any]) -> None:
    found = from_body(fields)
    assert found is None or is_valid(found)


@given(
    st.dictionaries(
        st.sampled_from(["x-session-id", "x-a-session-id", "x-parent-session-id"]),
        any_text | st.sampled_from(["a", " a", "a\t", "a b", " "]),
    )
)
@law
def test_an_id_from_headers_is_valid_and_never_the_parents(headers: dict[str, str]) -> None:
    sent = {name.encode(): value.encode("latin-1", "replace") for name, value in headers.items()}
    found = from_headers(sent, (b"x-session-id",))
    given_ids = [value.strip(" \t") for name, value in headers.items() if name != "x-parent-session-id"]
    allowed = [value for value in given_ids if is_valid(value)]
    assert (found in allowed) if allowed else found is None


@given(st.tuples(any_text, st.lists(any_text)), st.tuples(any_text, st.lists(any_text)))
@law
def test_two_openings_share_a_derived_id_only_if_they_are_the_same(
    first: tuple[str, list[str]], second: tuple[str, list[str]]
) -> None:
    same = derive(first[0], "m", first[1]) == derive(second[0], "m", second[1])
    assert same == (first == second)


@given(json_values)
@law
def test_any_content_has_a_text(content: object) -> None:
    assert isinstance(text_of(content), str)


times = st.integers(0, 2**47)  # milliseconds; the ids hold some thousand years
noises = st.binary(min_size=8, max_size=10)


@given(times, times, noises, noises)
@law
def test_ids_sort_as_their_times_do(first: int, second: int, noise: bytes, other: bytes) -> None:
    if first != second:
        assert (call_id(first, noise) < call_id(second, other)) == (first < second)
    border = second // 1000
    assert (call_id(first, noise) < first_id_at(border)) == (first < border * 1000)


# --- compressed bodies ---------------------------------------------------------------------------------------------------------------


packers: st.SearchStrategy[Callable[[bytes], bytes]] = st.sampled_from([gzip.compress, zlib.compress])  # type: ignore[list-item]


@given(st.binary(max_size=300), packers, cuts, st.integers(1, 400))
@law
def test_compressed_body_in_any_pieces_gives_its_bytes(
    data: bytes, pack: Callable[[bytes], bytes], places: list[int], at_most: int
) -> None:
    unpacker = Unpacker(None)
    found = b"".join(part for piece in cut(pack(data), places) for part in unpacker.feed(piece, at_most=at_most))
    assert found == data
    assert unpacker.complete


@given(st.binary(max_size=200), st.integers(0, 100))
@law
def test_invalid_compressed_bytes_are_refused(body: bytes, limit: int) -> None:
    try:
        decompressed = unpack(body, limit)
    except (Corrupt, TooLarge):
        return
    assert len(decompressed) <= limit


# --- bodies -------------------------------------------------------------------------------------------------------------------------


@st.composite
def spelled_objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, Any]]]:
    """Return a JSON object with plain or escaped keys, spaces anywhere, and sometimes duplicate keys."""
    pairs = draw(st.lists(st.tuples(clean_text | st.sampled_from(["model", "a"]), json_values), max_size=5))
    space = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])
    parts = []
    for name, value in pairs:
        key = json.dumps(name, ensure_ascii=draw(st.booleans()))
        if draw(st.booleans()):
            key = '"' + "".join(f"\\u{unit:04x}" for unit in utf16(name)) + '"'
        parts.append(draw(space) + key + draw(space) + ":" + draw(space) + json.dumps(value) + draw(space))
    body = draw(space) + "{" + ",".join(parts or [draw(space)]) + "}" + draw(space)
    return body.encode(), pairs


def utf16(text: str) -> list[int]:
    raw = text.encode("utf-16-be")
    return [int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2)]


@given(spelled_objects())
@example((b'{"MODEL":null}', [("MODEL", None)]))
@law
def test_body_is_refused_only_for_duplicate_keys(spelled: tuple[bytes, list[tuple[str, Any]]]) -> None:
    body, pairs = spelled
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        with pytest.raises(InvalidRequest, match="more than once"):
            read_fields(body)
    elif any(name != name.casefold() and name.casefold() in _COST_FIELDS for name in names):
        with pytest.raises(InvalidRequest, match="must be written"):
            read_fields(body)
    else:
        fields = read_fields(body)
        assert [(name, json.loads(bytes(raw))) for name, raw in fields.items()] == pairs


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0amodel \n1e-.', max_size=60).map(str.encode))
@law
def test_any_body_is_read_or_refused_by_name(body: bytes) -> None:
    for reader in (CHAT, endpoint("POST", "responses").dialect):
        try:
            call = reader.read(body)
        except InvalidRequest:
            continue
        assert call.body == body


#: a name of a field that the gateway does not know
unknown_names = clean_text.filter(
    lambda name: name.lower() not in {"n", "stream", "input", "prompt", "model", "messages"}
)


@given(st.dictionaries(unknown_names, json_values, max_size=5), clean_text.filter(bool), st.booleans(), st.booleans())
@law
def test_unknown_fields_survive_a_change(unknown: dict[str, Any], model: str, stream: bool, ask: bool) -> None:
    body = {**unknown, "model": "alias", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    body.pop("stream_options", None)
    raw = json.dumps(body).encode()
    call = CHAT.read(raw)
    sent = call.with_model(model, CHAT.usage_option(call) if ask else {})
    if model == "alias" and not (ask and stream):
        assert sent is raw
        return
    expected = {**body, "model": model, **({"stream_options": {"include_usage": True}} if ask and stream else {})}
    assert json.loads(sent) == expected
    assert list(json.loads(sent)) == list(expected)
    assert CHAT.read(sent).usage_asked == (ask and stream)


@given(st.dictionaries(clean_text, json_values, max_size=5), clean_text, json_values)
@law
def test_writing_keeps_the_bytes_of_every_field_that_is_not_changed(
    fields: dict[str, Any], name: str, value: object
) -> None:
    raws = {key: msgspec.Raw(json.dumps(inner, indent=1).encode()) for key, inner in fields.items()}
    written = write_fields(raws, {name: value})
    assert json.loads(written) == {**fields, name: value}
    for key, raw in raws.items():
        assert key == name or bytes(raw) in written


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
@law
def test_reading_an_answer_of_any_bytes_never_raises(body: bytes) -> None:
    for dialect in (CHAT, endpoint("POST", "messages").dialect):
        answer = dialect.answer(body)
        assert answer.output_estimate >= 0


names = st.sampled_from(
    ["choices", "delta", "message", "usage", "x_groq", "model", "error", "tool_calls", "function", "name", "arguments",
     "content", "index", "finish_reason", "type", "response", "content_block", "item", "output", "text", "id", "status",
     "stop_reason", "service_tier", "reasoning", "prompt_tokens"]
)  # fmt: skip
shaped_answers = st.recursive(
    hostile_numbers | st.none() | st.sampled_from(["tool_use", "function_call", "message_start", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6),
    max_leaves=25,
)


@given(st.lists(shaped_answers, max_size=4))
@law
def test_reading_events_of_the_right_names_and_the_wrong_types_never_raises(events: list[object]) -> None:
    for dialect in (CHAT, endpoint("POST", "responses").dialect):
        reader = dialect.reader(CHAT.read(b'{"model":"m","messages":[]}'), drop_usage=True)
        for event in events:
            reader.read(json.dumps(event).encode())
        answer = reader.answer()
        assert answer.output_estimate >= 0
        assert all(isinstance(name, str) and 0 < len(name) <= 256 for name in answer.tools)


@given(json_values)
@law
def test_any_json_value_is_decoded_as_the_standard_library_does(value: object) -> None:
    raw = json.dumps(value).encode()
    assert decode(raw) == json.loads(raw)


@given(any_text, any_text)
@law
def test_longer_text_never_has_fewer_tokens(first: str, second: str) -> None:
    assert estimate_tokens(first + second) == pytest.approx(estimate_tokens(first) + estimate_tokens(second))
