"""Reported usage: each rule comes from a recorded response."""

from __future__ import annotations

import tracemalloc
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.usage import MAX_TOKENS, Usage
from gateway.dialects.reported import ReportedUsage, UsageReader, count


def read(*objects: object) -> ReportedUsage | None:
    reader = UsageReader()
    for item in objects:
        reader.add(item)
    return reader.reported()


def usage(*objects: object) -> Usage:
    result = read(*objects)
    assert result is not None
    return result.complete(1_000_000, 1_000_000)[0]


def sides(*objects: object) -> tuple[int, int, int]:
    result = usage(*objects)
    return result.input_tokens, result.output_tokens, result.total_tokens


@pytest.mark.parametrize("value", [0, 1, 2**53, 3.0, 0.0, -0.0])
def test_integer_in_bounds_is_a_count(value: float) -> None:
    assert count(value) == value
    assert type(count(value)) is int


@pytest.mark.parametrize("value", [2**53 + 1, 10**400, 1e300])
def test_huge_number_is_capped(value: float) -> None:
    assert count(value) == MAX_TOKENS


@pytest.mark.parametrize(
    "value",
    [None, True, False, "7", "", [], [7], {}, -1, -(10**400), 1.5, -1.0, float("nan"), float("inf"), -float("inf")],
)
def test_anything_else_is_absent(value: object) -> None:
    assert count(value) is None


def test_chat_usage_with_its_details() -> None:
    result = usage(
        {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 40, "audio_tokens": 3, "cache_write_tokens": 9},
            "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 2},
        }
    )
    assert result == Usage(100, 50, 150, 40, 9, 20, 3, 2)


def test_responses_usage_with_its_details() -> None:
    result = usage(
        {
            "input_tokens": 100,
            "output_tokens": 50,
            "total_tokens": 150,
            "input_tokens_details": {"cached_tokens": 40},
            "output_tokens_details": {"reasoning_tokens": 20},
        }
    )
    assert result == Usage(100, 50, 150, 40, 0, 20)


def test_anthropic_cached_tokens_are_added_to_the_input() -> None:
    result = usage(
        {"input_tokens": 10, "cache_read_input_tokens": 500, "cache_creation_input_tokens": 70, "output_tokens": 5}
    )
    assert result == Usage(580, 5, 585, 500, 70)


def test_cache_writes_for_an_hour_are_counted_separately() -> None:
    kinds = {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 50}
    start = {"input_tokens": 10, "cache_creation_input_tokens": 70, "cache_creation": kinds, "output_tokens": 1}
    assert usage(start, {"output_tokens": 5}) == Usage(80, 5, 85, 0, 70, cache_write_1h_tokens=50)
    assert usage({**start, "cache_creation": None}, {"output_tokens": 5}) == Usage(80, 5, 85, 0, 70)


def test_cache_writes_for_twelve_hours_are_counted_separately() -> None:
    lifetimes = {"ttl_30m_tokens": 20, "ttl_12h_tokens": 50}
    details = {"cached_tokens": 5, "cache_write_tokens": 70, "cache_write_tokens_details": lifetimes}
    said = {"input_tokens": 90, "input_tokens_details": details, "output_tokens": 1}
    assert usage(said) == Usage(90, 1, 91, 5, 70, cache_write_1h_tokens=50)
    details["cache_write_tokens_details"] = None
    assert usage(said) == Usage(90, 1, 91, 5, 70)


def test_searches_are_counted_once() -> None:
    start = {"input_tokens": 10, "server_tool_use": {"web_search_requests": 0}}
    end = {"output_tokens": 5, "server_tool_use": {"web_search_requests": 3, "web_fetch_requests": 1}}
    result = read(start, end, end, {"output_tokens": 6, "server_tool_use": None})
    assert result is not None
    assert (result.input_tokens, result.output_tokens, result.searches) == (10, 6, 3)


def test_usage_of_openai_tools_is_read() -> None:
    reader = UsageReader()
    for number in (0, 2, None, "3"):
        reader.add_tools({"web_search": {"num_requests": number}, "image_gen": {"total_tokens": 70}, "other": {}})
    reader.add_tools("none")
    assert reader.reported() is None, "it is no usage by itself"
    reader.add({"input_tokens": 10, "output_tokens": 5, "total_tokens": 15})
    result = reader.reported()
    assert result is not None
    assert (result.total_tokens, result.searches, result.picture_tokens) == (15, 2, 70)


def test_anthropics_input_may_be_all_cached() -> None:
    assert sides({"cache_read_input_tokens": 500, "output_tokens": 5}) == (500, 5, 505)


@pytest.mark.parametrize("name", ["prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens"])
def test_other_names_for_cached_tokens_are_known(name: str) -> None:
    assert usage({"prompt_tokens": 10, "completion_tokens": 1, name: 4}).cache_read_tokens == 4


def test_cached_tokens_missing_in_the_prompt_are_added_if_the_total_has_them() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 40}}
    assert sides({"prompt_tokens": 60, "completion_tokens": 10, "total_tokens": 110, **details}) == (100, 10, 110)
    assert sides({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110, **details}) == (100, 10, 110)
    assert sides({"prompt_tokens": 60, "total_tokens": 100, **details}) == (100, 0, 100)


def test_last_value_of_each_field_counts_and_null_does_not_replace() -> None:
    first = {
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    last = {"prompt_tokens": None, "completion_tokens": 9, "total_tokens": 14, "prompt_tokens_details": None}
    for nothing in (None, {"cached_tokens": None, "reasoning_tokens": None}):
        details = {"prompt_tokens_details": nothing, "completion_tokens_details": nothing}
        assert usage(first, None, {**last, **details}) == Usage(5, 9, 14, 2, 0, 1)


def test_a_running_total_is_not_added_up() -> None:
    running = [{"prompt_tokens": 192, "completion_tokens": n, "total_tokens": 192 + n} for n in range(4)]
    assert sides(*running, running[-1]) == (192, 3, 195)


def test_total_larger_than_its_parts_is_kept() -> None:
    assert sides({"prompt_tokens": 291, "completion_tokens": 26, "total_tokens": 513}) == (291, 26, 513)


def test_reasoning_only_in_the_total_is_not_a_missing_cached_part() -> None:
    said = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 169}
    cached, thought = {"cached_tokens": 64}, {"reasoning_tokens": 64}
    assert sides({**said, "prompt_tokens_details": cached, "completion_tokens_details": thought}) == (100, 69, 169)


@pytest.mark.parametrize(
    ("total", "output"),
    # xAI; a total that differs from both sides plus reasoning; reasoning inside the output.
    [(100 + 40 + 30, 70), (100 + 40 + 50, 70), (100 + 40 + 20, 60), (100 + 40, 40), (None, 40)],
)
def test_reasoning_only_in_the_total_is_output(total: int | None, output: int) -> None:
    said = {"prompt_tokens": 100, "completion_tokens": 40, "total_tokens": total}
    result = usage({**said, "completion_tokens_details": {"reasoning_tokens": 30}})
    assert (result.output_tokens, result.reasoning_tokens) == (output, 30)
    assert result.total_tokens == max(total or 0, 100 + output)


@pytest.mark.parametrize(
    ("output", "reasoning", "overhead"),
    # Gemini through Vercel, which bills both. The next rows count reasoning again with another tokenizer.
    [(9, 84, 84), (10, 11, 0), (10, 20, 0), (2298, 2948, 0), (0, 5, 5)],
)
def test_reasoning_far_above_the_output_is_added_to_it(output: int, reasoning: int, overhead: int) -> None:
    said = {"prompt_tokens": 28, "completion_tokens": output, "total_tokens": 28 + output}
    result = usage({**said, "completion_tokens_details": {"reasoning_tokens": reasoning}})
    assert result == Usage(28, output + overhead, 28 + output + overhead, reasoning_tokens=reasoning)


@pytest.mark.parametrize(
    ("output", "reasoning", "overhead"), [(1_015, 1_935, 1_935), (2298, 2948, 0), (10, 15, 0), (10, 16, 16)]
)
@pytest.mark.parametrize("total", [None, 0])
def test_without_a_total_reasoning_above_the_output_is_added_to_it(
    output: int, reasoning: int, overhead: int, total: int | None
) -> None:
    said = {"prompt_tokens": 100, "completion_tokens": output, "total_tokens": total}
    result = usage({**said, "completion_tokens_details": {"reasoning_tokens": reasoning}})
    assert (result.output_tokens, result.total_tokens) == (output + overhead, 100 + output + overhead)


def test_audio_of_a_transcription_is_counted_separately() -> None:
    details = {"text_tokens": 4, "audio_tokens": 10}
    result = usage({"type": "tokens", "input_tokens": 14, "input_token_details": details, "output_tokens": 45})
    assert result == Usage(14, 45, 59, audio_input_tokens=10)


@pytest.mark.parametrize("total", [0, 5, None, "x"])
def test_total_below_its_parts_is_ignored(total: object) -> None:
    assert sides({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": total}) == (10, 5, 15)


def test_zero_is_zero() -> None:
    result = read({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
    assert result is not None
    assert result.complete(50, 60) == (Usage(), "provider")


ZEROS = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57}, (50, 7, 57)),
        ({"input_tokens": 50, "output_tokens": 7}, (50, 7, 57)),
        ({"total_tokens": 57}, (57, 0, 57)),
        ({"prompt_tokens": 50, "total_tokens": 50}, (50, 0, 50)),
        ({"prompt_tokens": 50}, (50, 1_000_000, 1_000_050)),
        ({"completion_tokens": 7}, (1_000_000, 7, 1_000_007)),
    ],
)
@pytest.mark.parametrize("zeros", [ZEROS, {**ZEROS, "prompt_tokens_details": {"cached_tokens": 0}, "cost": 0}])
def test_zeros_at_the_end_of_a_stream_replace_nothing(
    said: dict[str, int], expected: tuple[int, int, int], zeros: dict[str, Any]
) -> None:
    assert sides(said, zeros, zeros) == expected
    result = read({**said, "cost": 0.5}, zeros)
    assert result is not None
    assert result.cost_usd == Decimal("0.5")


def test_zero_input_at_the_end_does_not_replace_the_input() -> None:
    assert sides({"input_tokens": 50, "output_tokens": 3}, {"input_tokens": 0, "output_tokens": 7}) == (50, 7, 57)
    assert sides({"output_tokens": 3}, {"input_tokens": 0, "output_tokens": 7}) == (0, 7, 7)
    last = {"input_tokens": 60, "cache_read_input_tokens": 0, "output_tokens": 7}
    assert sides({"input_tokens": 50, "output_tokens": 3}, last) == (60, 7, 67), "one of them is no zero"


def test_zero_total_at_the_end_does_not_set_a_missing_side() -> None:
    assert sides({"input_tokens": 50}, {"total_tokens": 0}) == (50, 1_000_000, 1_000_050)


def test_zero_after_details_of_an_unknown_side_is_a_count() -> None:
    result = read({"prompt_tokens_details": {"cached_tokens": 7}}, {"completion_tokens": 0})
    assert result is not None
    assert (result.input_tokens, result.output_tokens) == (None, 0)


def test_zeros_at_the_start_are_counts() -> None:
    said = {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57}
    assert sides(ZEROS, ZEROS, said, ZEROS) == (50, 7, 57)


def test_zero_for_a_missing_side_is_its_count() -> None:
    assert sides({"input_tokens": 50}, {"output_tokens": 0}) == (50, 0, 50)
    assert sides({"input_tokens": 50, "output_tokens": 7}, {"output_tokens": 0}) == (50, 7, 57)
    assert sides({"output_tokens": 7}, {"completion_tokens": 0}) == (1_000_000, 7, 1_000_007)


def test_cost_next_to_zeros_at_the_end_is_read() -> None:
    result = read({"prompt_tokens": 50, "completion_tokens": 7}, {**ZEROS, "cost": 0.5})
    assert result is not None
    assert (result.output_tokens, result.cost_usd) == (7, Decimal("0.5"))


@pytest.mark.parametrize(
    ("reported", "expected", "source"),
    [
        ({"completion_tokens": 7}, (50, 7, 57), "mixed"),
        ({"prompt_tokens": 7}, (7, 60, 67), "mixed"),
        ({"completion_tokens": 7, "total_tokens": 10}, (50, 7, 57), "mixed"),
        ({"prompt_tokens": "7", "completion_tokens": 7}, (50, 7, 57), "mixed"),
        ({"prompt_tokens": -7, "completion_tokens": 7}, (50, 7, 57), "mixed"),
    ],
)
def test_missing_side_is_estimated_and_marked(
    reported: dict[str, Any], expected: tuple[int, int, int], source: str
) -> None:
    result = read(reported)
    assert result is not None
    completed, graded = result.complete(50, 60)
    assert (completed.input_tokens, completed.output_tokens, completed.total_tokens) == expected
    assert graded == source


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"prompt_tokens": 8, "total_tokens": 8}, (8, 0, 8)),  # embeddings
        ({"total_tokens": 9}, (9, 0, 9)),
        ({"prompt_tokens": 8, "total_tokens": 11}, (8, 3, 11)),
        ({"prompt_tokens": 8, "total_tokens": 3}, (8, 0, 8)),
    ],
)
def test_missing_side_is_computed_from_the_total(reported: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert sides(reported) == expected


@pytest.mark.parametrize(
    "item",
    [
        None, 7, "usage", [], [{"prompt_tokens": 1}], {}, True, {"prompt_tokens": None}, {"requests": 4},
        {"prompt_tokens": "7"}, {"prompt_tokens": {"input_tokens": 7}}, {"prompt_tokens_details": {"cached_tokens": 7}},
        {"iterations": []}, {"iterations": "x"}, {"iterations": [None, 7]}, {"iterations": [{"model": "one"}]},
    ],
)  # fmt: skip
def test_usage_without_any_side_reports_nothing(item: object) -> None:
    assert read(item) is None


def test_invalid_details_are_ignored() -> None:
    result = usage(
        {
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "prompt_tokens_details": 7,
            "completion_tokens_details": {"a": "x"},
        }
    )
    assert result == Usage(1, 1, 2)


def test_message_start_has_the_input_and_a_placeholder_output() -> None:
    reader = UsageReader()
    reader.add({"input_tokens": 12, "output_tokens": 1}, input_side_only=True)
    started = reader.reported()
    assert started is not None
    assert (started.input_tokens, started.output_tokens) == (12, None)
    reader.add({"output_tokens": 30})
    ended = reader.reported()
    assert ended is not None
    assert (ended.input_tokens, ended.output_tokens) == (12, 30)


def test_message_start_input_counts_unless_all_zero() -> None:
    nothing = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1}
    for opening, expected in ((nothing, None), ({**nothing, "input_tokens": 12}, 12)):
        reader = UsageReader()
        reader.add(opening, input_side_only=True)
        reader.add({"output_tokens": 30})
        result = reader.reported()
        assert result is not None
        assert (result.input_tokens, result.output_tokens) == (expected, 30)


def test_billed_passes_are_added_up() -> None:
    passes = [
        {"input_tokens": 100, "output_tokens": 10, "cache_read_input_tokens": 5},
        None,
        {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 0},
    ]
    assert usage({"input_tokens": 1, "output_tokens": 2, "iterations": passes}) == Usage(106, 12, 118, 5)


def test_usage_of_each_named_model_is_reported() -> None:
    passes = [
        {"type": "message", "model": "one", "input_tokens": 100, "output_tokens": 10},
        {
            "type": "advisor_message",
            "model": "two",
            "input_tokens": 5,
            "output_tokens": 1,
            "cache_read_input_tokens": 20,
        },
        {"type": "advisor_message", "model": "two", "input_tokens": 6, "output_tokens": 2},
        {"type": "compaction", "input_tokens": 3, "output_tokens": 3},
        {"type": "message", "model": 7, "input_tokens": 1, "output_tokens": 1},
        {"type": "message", "model": "three"},
    ]
    result = read({"input_tokens": 1, "output_tokens": 2, "iterations": passes})
    assert result is not None
    assert result.by_model == (("one", Usage(100, 10, 110)), ("two", Usage(31, 3, 34, 20)))
    assert result.complete(0, 0)[0] == Usage(135, 17, 152, 20)
    one_sided = read({"iterations": [{"model": "in", "input_tokens": 4}, {"model": "out", "output_tokens": 5}]})
    assert one_sided is not None
    assert one_sided.by_model == (("in", Usage(4, 0, 4)), ("out", Usage(0, 5, 5)))
    last = read({"iterations": passes}, {"iterations": passes[:1]})
    assert last is not None
    assert last.by_model == (("one", Usage(100, 10, 110)),)


OWN = {"type": "message", "input_tokens": 1_128, "output_tokens": 110}
CACHED = {"type": "message", "input_tokens": 28, "cache_read_input_tokens": 1_100, "output_tokens": 110}
ADVICE = {"type": "advisor_message", "model": "two", "input_tokens": 2_518, "output_tokens": 22}
LAST = {"type": "message", "input_tokens": 1_262, "output_tokens": 11}
COMPACTION = {"type": "compaction", "input_tokens": 55_196, "output_tokens": 125}


@pytest.mark.parametrize(
    ("passes", "weight"),
    [
        ([OWN], 1_128),
        ([OWN, ADVICE, LAST], 1_128),
        ([CACHED, ADVICE, LAST], 1_128),
        ([ADVICE, OWN], 1_128),
        ([None, OWN, LAST], 1_128),
        ([ADVICE], 0),
        ([{}, OWN], 0),
        ([COMPACTION, LAST], 0),
        ([OWN, COMPACTION, LAST], 0),
        ([COMPACTION], 0),
        ([{"output_tokens": 3}], 0),
        ([None, 7], None),
        ([{"type": "compaction"}], None),
    ],
)
def test_first_billed_pass_gives_the_request_size_unless_compacted(passes: list[object], weight: int | None) -> None:
    result = read({"input_tokens": 1, "output_tokens": 2, "iterations": passes})
    assert result is not None
    assert result.request_tokens == weight


def test_compaction_missing_at_the_top_level_is_counted() -> None:
    reader = UsageReader()
    reader.add({"input_tokens": 0, "output_tokens": 0}, input_side_only=True)
    reader.add({"input_tokens": 0, "output_tokens": 0, "iterations": [COMPACTION]})
    result = reader.reported()
    assert result is not None
    assert result.complete(0, 0)[0] == Usage(55_196, 125, 55_321)


def test_fallback_pass_does_not_give_the_request_size() -> None:
    served = {"type": "fallback_message", "model": "two", "input_tokens": 900, "output_tokens": 9}
    for passes, weight in (([served], 0), ([{**OWN, "model": "one"}, served], 1_128)):
        result = read({"iterations": passes})
        assert result is not None
        assert result.request_tokens == weight


def test_last_list_of_passes_gives_the_request_size() -> None:
    result = read({"iterations": [OWN]}, {"output_tokens": 3}, {"iterations": [CACHED, LAST]}, {"output_tokens": 9})
    assert result is not None
    assert result.request_tokens == 1_128
    without = read({"input_tokens": 5, "output_tokens": 3})
    assert without is not None
    assert without.request_tokens is None


@pytest.mark.parametrize("passes", [[None, 7], [{}], [{"type": "compaction"}]])
def test_empty_passes_do_not_hide_the_top_level(passes: list[object]) -> None:
    assert usage({"input_tokens": 1, "output_tokens": 2, "iterations": passes}) == Usage(1, 2, 3)


def test_fields_only_at_the_top_level_are_read() -> None:
    passes = [{"input_tokens": 10}, {"input_tokens": 1}]
    assert usage({"input_tokens": 1, "output_tokens": 2, "iterations": passes}) == Usage(11, 2, 13)


def test_passes_of_message_start_give_the_input() -> None:
    reader = UsageReader()
    reader.add({"iterations": [{"input_tokens": 12, "output_tokens": 1}]}, input_side_only=True)
    started = reader.reported()
    assert started is not None
    assert (started.input_tokens, started.output_tokens) == (12, None)


@pytest.mark.parametrize(
    "hostile",
    [
        {"iterations": [{"input_tokens": 2**53, "output_tokens": 2**53}] * 2_000},
        {"input_tokens": 2**53, "cache_read_input_tokens": 2**53, "cache_creation_input_tokens": 2**53, "output_tokens": 1},
        {
            "prompt_tokens": 2**53 - 1, "completion_tokens": 0, "total_tokens": 2**53,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        {"prompt_tokens": 10**400, "completion_tokens": 10**400, "total_tokens": 10**400},
    ],
    ids=["passes", "cached parts", "left-out part", "all"],
)  # fmt: skip
def test_no_side_exceeds_the_maximum(hostile: dict[str, Any]) -> None:
    result = usage(hostile)
    assert max(result.input_tokens, result.output_tokens) <= MAX_TOKENS
    assert result.total_tokens <= 2 * MAX_TOKENS


def test_usage_objects_with_new_names_do_not_fill_the_memory() -> None:
    reader = UsageReader()
    tracemalloc.start()
    try:
        for number in range(20_000):
            reader.add({f"tokens_{number}_{name}": number for name in "abcd"})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2**20


# --- what it costs ------------------------------------------------------------------------------------------------


def cost(*objects: object) -> Decimal | None:
    result = read({"prompt_tokens": 10, "completion_tokens": 5}, *objects)
    assert result is not None
    return result.cost_usd


@pytest.mark.parametrize(
    ("said", "usd"),
    [
        # Recorded from OpenRouter: the upstream cost is a part of the charge, ...
        ({"cost": 0.0009056, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.0009056}}, "0.0009056"),
        # ... but with the caller's own key (BYOK) both are paid.
        ({"cost": 0.0012, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.0345}}, "0.0357"),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.00123}}, "0.00123"),
        # From its documentation: if a part is larger than the whole, the call used such a key.
        ({"cost": 0.95, "cost_details": {"upstream_inference_cost": 19}}, "19.95"),
        *(({"cost": 0.95, "cost_details": {"upstream_inference_cost": part}}, "0.95") for part in (0.9, 0.95)),
        ({"cost": 0.95, "is_byok": False, "cost_details": {"upstream_inference_cost": 19}}, "0.95"),
        ({"cost": 0.95, "cost_details": {"upstream_inference_cost": None}}, "0.95"),
        ({"cost": 0}, "0"),
        ({"cost": -0.0}, "0"),
        # xAI's ticks, and Perplexity's parts, of which the request fee is the largest.
        ({"cost_in_usd_ticks": 8702400}, "0.00087024"),
        ({"cost": None, "cost_in_usd_ticks": 37756000}, "0.0037756"),
        ({"cost": {"input_tokens_cost": 1e-05, "request_cost": 0.005, "total_cost": 0.00507}}, "0.00507"),
    ],
)
def test_cost_is_the_sum_of_all_charges(said: dict[str, object], usd: str) -> None:
    result = cost(said)
    assert result == Decimal(usd)
    assert not f"{result}".startswith("-")


@pytest.mark.parametrize("value", [None, True, "0.5", -1, {"usd": 1}, [1], float("nan"), float("inf"), 1e300])
def test_invalid_cost_is_none(value: object) -> None:
    assert cost({"cost": value}) is None
    assert cost({"cost": value, "is_byok": True, "cost_details": {"upstream_inference_cost": 5}}) is None
    assert cost({"cost": {"total_cost": value}}) is None
    assert cost({"cost_in_usd_ticks": value}) is None


def test_last_cost_counts_and_null_does_not_replace() -> None:
    assert cost({"cost": 0.5}, {"cost": 0.75}, {"cost": None}, {"completion_tokens": 5}) == Decimal("0.75")


def test_ticks_on_every_chunk_are_not_added_up_or_replaced_by_zero() -> None:
    said = [{"cost_in_usd_ticks": number} for number in (10**9, 2 * 10**9, None)]
    assert cost(*said, {**ZEROS, "cost_in_usd_ticks": 0}) == Decimal("0.2")


def test_cost_in_message_start_is_ignored() -> None:
    reader = UsageReader()
    reader.add({"input_tokens": 10, "output_tokens": 1, "cost": 0}, input_side_only=True)
    result = reader.reported()
    assert result is not None
    assert result.cost_usd is None


def test_cost_without_tokens_is_reported() -> None:
    result = read({"cost": 0.5})
    assert result is not None
    assert (result.cost_usd, result.has_tokens) == (Decimal("0.5"), False)


@pytest.mark.parametrize(
    ("said", "has_tokens", "is_billed"),
    [
        ({"prompt_tokens": 3}, True, True),
        ({"completion_tokens": 3}, True, True),
        ({"cost": 0.5}, False, True),
        ({"prompt_tokens": 0, "completion_tokens": 0, "cost": 0}, True, False),
        ({"cost": 0}, False, False),
    ],
)
def test_report_has_tokens_and_billed_flags(said: dict[str, object], has_tokens: bool, is_billed: bool) -> None:
    result = read(said)
    assert result is not None
    assert (result.has_tokens, result.is_billed, result.searches) == (has_tokens, is_billed, 0)
