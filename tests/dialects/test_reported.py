"""What a provider says a call used: each rule as a recorded answer once needed it."""

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
    found = read(*objects)
    assert found is not None
    return found.complete(1_000_000, 1_000_000)[0]


def sides(*objects: object) -> tuple[int, int, int]:
    found = usage(*objects)
    return found.input_tokens, found.output_tokens, found.total_tokens


@pytest.mark.parametrize("value", [0, 1, 2**53, 3.0, 0.0, -0.0])
def test_a_whole_number_in_bounds_is_a_count(value: float) -> None:
    assert count(value) == value
    assert type(count(value)) is int


@pytest.mark.parametrize("value", [2**53 + 1, 10**400, 1e300])
def test_a_huge_number_is_cut(value: float) -> None:
    assert count(value) == MAX_TOKENS


@pytest.mark.parametrize(
    "value",
    [None, True, False, "7", "", [], [7], {}, -1, -(10**400), 1.5, -1.0, float("nan"), float("inf"), -float("inf")],
)
def test_anything_else_is_absent(value: object) -> None:
    assert count(value) is None


def test_chat_usage_with_its_details() -> None:
    found = usage(
        {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 40, "audio_tokens": 3, "cache_write_tokens": 9},
            "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 2},
        }
    )
    assert found == Usage(100, 50, 150, 40, 9, 20, 3, 2)


def test_responses_usage_with_its_details() -> None:
    found = usage(
        {
            "input_tokens": 100,
            "output_tokens": 50,
            "total_tokens": 150,
            "input_tokens_details": {"cached_tokens": 40},
            "output_tokens_details": {"reasoning_tokens": 20},
        }
    )
    assert found == Usage(100, 50, 150, 40, 0, 20)


def test_anthropics_cached_parts_stand_beside_the_input_and_are_added_to_it() -> None:
    found = usage(
        {"input_tokens": 10, "cache_read_input_tokens": 500, "cache_creation_input_tokens": 70, "output_tokens": 5}
    )
    assert found == Usage(580, 5, 585, 500, 70)


def test_what_is_written_to_the_cache_for_an_hour_is_told_apart() -> None:
    kinds = {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 50}
    start = {"input_tokens": 10, "cache_creation_input_tokens": 70, "cache_creation": kinds, "output_tokens": 1}
    assert usage(start, {"output_tokens": 5}) == Usage(80, 5, 85, 0, 70, cache_write_1h_tokens=50)
    assert usage({**start, "cache_creation": None}, {"output_tokens": 5}) == Usage(80, 5, 85, 0, 70)


def test_what_openai_keeps_for_twelve_hours_is_told_apart() -> None:
    lifetimes = {"ttl_30m_tokens": 20, "ttl_12h_tokens": 50}
    details = {"cached_tokens": 5, "cache_write_tokens": 70, "cache_write_tokens_details": lifetimes}
    said = {"input_tokens": 90, "input_tokens_details": details, "output_tokens": 1}
    assert usage(said) == Usage(90, 1, 91, 5, 70, cache_write_1h_tokens=50)
    details["cache_write_tokens_details"] = None
    assert usage(said) == Usage(90, 1, 91, 5, 70)


def test_the_searches_that_were_made_are_counted_once() -> None:
    start = {"input_tokens": 10, "server_tool_use": {"web_search_requests": 0}}
    end = {"output_tokens": 5, "server_tool_use": {"web_search_requests": 3, "web_fetch_requests": 1}}
    found = read(start, end, end, {"output_tokens": 6, "server_tool_use": None})
    assert found is not None
    assert (found.input_tokens, found.output_tokens, found.searches) == (10, 6, 3)


def test_what_openais_tools_did_is_read_beside_the_usage() -> None:
    reader = UsageReader()
    for number in (0, 2, None, "3"):
        reader.add_tools({"web_search": {"num_requests": number}, "image_gen": {"total_tokens": 70}, "other": {}})
    reader.add_tools("none")
    assert reader.reported() is None, "it is no usage by itself"
    reader.add({"input_tokens": 10, "output_tokens": 5, "total_tokens": 15})
    found = reader.reported()
    assert found is not None
    assert (found.total_tokens, found.searches, found.picture_tokens) == (15, 2, 70)


def test_anthropics_input_may_be_all_cached() -> None:
    assert sides({"cache_read_input_tokens": 500, "output_tokens": 5}) == (500, 5, 505)


@pytest.mark.parametrize("name", ["prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens"])
def test_other_names_for_cached_tokens_are_known(name: str) -> None:
    assert usage({"prompt_tokens": 10, "completion_tokens": 1, name: 4}).cache_read_tokens == 4


def test_a_cached_part_that_the_prompt_leaves_out_is_added_where_the_total_shows_it() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 40}}
    assert sides({"prompt_tokens": 60, "completion_tokens": 10, "total_tokens": 110, **details}) == (100, 10, 110)
    assert sides({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110, **details}) == (100, 10, 110)
    assert sides({"prompt_tokens": 60, "total_tokens": 100, **details}) == (100, 0, 100)


def test_the_last_word_counts_field_by_field_and_null_does_not_erase() -> None:
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


def test_a_total_larger_than_its_parts_is_the_providers_own() -> None:
    assert sides({"prompt_tokens": 291, "completion_tokens": 26, "total_tokens": 513}) == (291, 26, 513)


def test_reasoning_in_the_total_alone_is_no_cached_part_that_was_left_out() -> None:
    said = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 169}
    cached, thought = {"cached_tokens": 64}, {"reasoning_tokens": 64}
    assert sides({**said, "prompt_tokens_details": cached, "completion_tokens_details": thought}) == (100, 69, 169)


@pytest.mark.parametrize(
    ("total", "output"),
    # xAI; a total that has more, or less, than the reasoning beyond the sides; one that has it within the output.
    [(100 + 40 + 30, 70), (100 + 40 + 50, 70), (100 + 40 + 20, 60), (100 + 40, 40), (None, 40)],
)
def test_reasoning_that_only_the_total_has_is_output(total: int | None, output: int) -> None:
    said = {"prompt_tokens": 100, "completion_tokens": 40, "total_tokens": total}
    found = usage({**said, "completion_tokens_details": {"reasoning_tokens": 30}})
    assert (found.output_tokens, found.reasoning_tokens) == (output, 30)
    assert found.total_tokens == max(total or 0, 100 + output)


@pytest.mark.parametrize(
    ("output", "reasoning", "overhead"),
    # Gemini behind Vercel, which bills both; the next ones count reasoning again with another tokenizer.
    [(9, 84, 84), (10, 11, 0), (10, 20, 0), (2298, 2948, 0), (0, 5, 5)],
)
def test_reasoning_far_above_the_output_stands_beside_it(output: int, reasoning: int, overhead: int) -> None:
    said = {"prompt_tokens": 28, "completion_tokens": output, "total_tokens": 28 + output}
    found = usage({**said, "completion_tokens_details": {"reasoning_tokens": reasoning}})
    assert found == Usage(28, output + overhead, 28 + output + overhead, reasoning_tokens=reasoning)


@pytest.mark.parametrize(
    ("output", "reasoning", "overhead"), [(1_015, 1_935, 1_935), (2298, 2948, 0), (10, 15, 0), (10, 16, 16)]
)
@pytest.mark.parametrize("total", [None, 0])
def test_without_a_total_reasoning_that_cannot_be_a_part_of_the_output_stands_beside_it(
    output: int, reasoning: int, overhead: int, total: int | None
) -> None:
    said = {"prompt_tokens": 100, "completion_tokens": output, "total_tokens": total}
    found = usage({**said, "completion_tokens_details": {"reasoning_tokens": reasoning}})
    assert (found.output_tokens, found.total_tokens) == (output + overhead, 100 + output + overhead)


def test_the_sound_of_a_transcription_is_told_apart() -> None:
    details = {"text_tokens": 4, "audio_tokens": 10}
    found = usage({"type": "tokens", "input_tokens": 14, "input_token_details": details, "output_tokens": 45})
    assert found == Usage(14, 45, 59, audio_input_tokens=10)


@pytest.mark.parametrize("total", [0, 5, None, "x"])
def test_a_total_below_its_parts_is_no_total(total: object) -> None:
    assert sides({"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": total}) == (10, 5, 15)


def test_zero_is_zero() -> None:
    found = read({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
    assert found is not None
    assert found.complete(50, 60) == (Usage(), "provider")


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
def test_zeros_that_close_a_stream_erase_nothing(
    said: dict[str, int], expected: tuple[int, int, int], zeros: dict[str, Any]
) -> None:
    assert sides(said, zeros, zeros) == expected
    found = read({**said, "cost": 0.5}, zeros)
    assert found is not None
    assert found.cost_usd == Decimal("0.5")


def test_zeros_for_the_input_erase_none_where_more_is_said_at_the_end() -> None:
    assert sides({"input_tokens": 50, "output_tokens": 3}, {"input_tokens": 0, "output_tokens": 7}) == (50, 7, 57)
    assert sides({"output_tokens": 3}, {"input_tokens": 0, "output_tokens": 7}) == (0, 7, 7)
    last = {"input_tokens": 60, "cache_read_input_tokens": 0, "output_tokens": 7}
    assert sides({"input_tokens": 50, "output_tokens": 3}, last) == (60, 7, 67), "one of them is no zero"


def test_a_total_of_nothing_at_the_end_says_nothing_of_a_side_that_is_missing() -> None:
    assert sides({"input_tokens": 50}, {"total_tokens": 0}) == (50, 1_000_000, 1_000_050)


def test_a_zero_behind_parts_of_an_unknown_side_is_a_count() -> None:
    found = read({"prompt_tokens_details": {"cached_tokens": 7}}, {"completion_tokens": 0})
    assert found is not None
    assert (found.input_tokens, found.output_tokens) == (None, 0)


def test_zeros_at_the_beginning_are_the_first_word() -> None:
    said = {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57}
    assert sides(ZEROS, ZEROS, said, ZEROS) == (50, 7, 57)


def test_a_zero_of_the_side_that_is_missing_is_its_count() -> None:
    assert sides({"input_tokens": 50}, {"output_tokens": 0}) == (50, 0, 50)
    assert sides({"input_tokens": 50, "output_tokens": 7}, {"output_tokens": 0}) == (50, 7, 57)
    assert sides({"output_tokens": 7}, {"completion_tokens": 0}) == (1_000_000, 7, 1_000_007)


def test_a_cost_beside_zeros_at_the_end_is_read() -> None:
    found = read({"prompt_tokens": 50, "completion_tokens": 7}, {**ZEROS, "cost": 0.5})
    assert found is not None
    assert (found.output_tokens, found.cost_usd) == (7, Decimal("0.5"))


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
def test_a_side_that_is_missing_is_estimated_and_said_so(
    reported: dict[str, Any], expected: tuple[int, int, int], source: str
) -> None:
    found = read(reported)
    assert found is not None
    completed, graded = found.complete(50, 60)
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
def test_a_missing_side_follows_from_the_total(reported: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert sides(reported) == expected


@pytest.mark.parametrize(
    "item",
    [
        None, 7, "usage", [], [{"prompt_tokens": 1}], {}, True, {"prompt_tokens": None}, {"requests": 4},
        {"prompt_tokens": "7"}, {"prompt_tokens": {"input_tokens": 7}}, {"prompt_tokens_details": {"cached_tokens": 7}},
        {"iterations": []}, {"iterations": "x"}, {"iterations": [None, 7]}, {"iterations": [{"model": "one"}]},
    ],
)  # fmt: skip
def test_what_says_nothing_of_either_side_reports_nothing(item: object) -> None:
    assert read(item) is None


def test_details_that_are_no_object_or_hold_no_counts_are_ignored() -> None:
    found = usage(
        {
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "prompt_tokens_details": 7,
            "completion_tokens_details": {"a": "x"},
        }
    )
    assert found == Usage(1, 1, 2)


def test_an_opening_message_states_the_input_and_its_output_is_a_placeholder() -> None:
    reader = UsageReader()
    reader.add({"input_tokens": 12, "output_tokens": 1}, input_side_only=True)
    started = reader.reported()
    assert started is not None
    assert (started.input_tokens, started.output_tokens) == (12, None)
    reader.add({"output_tokens": 30})
    ended = reader.reported()
    assert ended is not None
    assert (ended.input_tokens, ended.output_tokens) == (12, 30)


def test_what_an_opening_message_says_of_the_input_counts_unless_it_is_nothing_at_all() -> None:
    nothing = {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 1}
    for opening, expected in ((nothing, None), ({**nothing, "input_tokens": 12}, 12)):
        reader = UsageReader()
        reader.add(opening, input_side_only=True)
        reader.add({"output_tokens": 30})
        found = reader.reported()
        assert found is not None
        assert (found.input_tokens, found.output_tokens) == (expected, 30)


def test_billed_passes_are_added_up() -> None:
    passes = [
        {"input_tokens": 100, "output_tokens": 10, "cache_read_input_tokens": 5},
        None,
        {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 0},
    ]
    assert usage({"input_tokens": 1, "output_tokens": 2, "iterations": passes}) == Usage(106, 12, 118, 5)


def test_what_each_named_model_used_is_a_part() -> None:
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
    found = read({"input_tokens": 1, "output_tokens": 2, "iterations": passes})
    assert found is not None
    assert found.named == (("one", Usage(100, 10, 110)), ("two", Usage(31, 3, 34, 20)))
    assert found.complete(0, 0)[0] == Usage(135, 17, 152, 20)
    one_sided = read({"iterations": [{"model": "in", "input_tokens": 4}, {"model": "out", "output_tokens": 5}]})
    assert one_sided is not None
    assert one_sided.named == (("in", Usage(4, 0, 4)), ("out", Usage(0, 5, 5)))
    last = read({"iterations": passes}, {"iterations": passes[:1]})
    assert last is not None
    assert last.named == (("one", Usage(100, 10, 110)),)


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
def test_of_billed_passes_the_first_one_weighs_the_request_unless_it_was_compacted(
    passes: list[object], weight: int | None
) -> None:
    found = read({"input_tokens": 1, "output_tokens": 2, "iterations": passes})
    assert found is not None
    assert found.request_tokens == weight


def test_a_compaction_that_the_top_level_leaves_out_is_counted() -> None:
    reader = UsageReader()
    reader.add({"input_tokens": 0, "output_tokens": 0}, input_side_only=True)
    reader.add({"input_tokens": 0, "output_tokens": 0, "iterations": [COMPACTION]})
    found = reader.reported()
    assert found is not None
    assert found.complete(0, 0)[0] == Usage(55_196, 125, 55_321)


def test_a_fallback_that_answered_at_once_tells_nothing_of_the_request_in_tokens_of_the_model_that_was_asked() -> None:
    served = {"type": "fallback_message", "model": "two", "input_tokens": 900, "output_tokens": 9}
    for passes, weight in (([served], 0), ([{**OWN, "model": "one"}, served], 1_128)):
        found = read({"iterations": passes})
        assert found is not None
        assert found.request_tokens == weight


def test_what_the_request_weighed_is_what_the_last_list_of_passes_says() -> None:
    found = read({"iterations": [OWN]}, {"output_tokens": 3}, {"iterations": [CACHED, LAST]}, {"output_tokens": 9})
    assert found is not None
    assert found.request_tokens == 1_128
    without = read({"input_tokens": 5, "output_tokens": 3})
    assert without is not None
    assert without.request_tokens is None


@pytest.mark.parametrize("passes", [[None, 7], [{}], [{"type": "compaction"}]])
def test_passes_that_say_nothing_do_not_hide_what_the_top_level_says(passes: list[object]) -> None:
    assert usage({"input_tokens": 1, "output_tokens": 2, "iterations": passes}) == Usage(1, 2, 3)


def test_what_only_the_top_level_says_is_taken_from_there() -> None:
    passes = [{"input_tokens": 10}, {"input_tokens": 1}]
    assert usage({"input_tokens": 1, "output_tokens": 2, "iterations": passes}) == Usage(11, 2, 13)


def test_the_passes_of_an_opening_message_state_the_input_too() -> None:
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
def test_no_side_passes_the_bound_however_a_provider_spreads_it(hostile: dict[str, Any]) -> None:
    found = usage(hostile)
    assert max(found.input_tokens, found.output_tokens) <= MAX_TOKENS
    assert found.total_tokens <= 2 * MAX_TOKENS


def test_usage_objects_of_ever_new_names_do_not_fill_the_memory() -> None:
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
    found = read({"prompt_tokens": 10, "completion_tokens": 5}, *objects)
    assert found is not None
    return found.cost_usd


@pytest.mark.parametrize(
    ("said", "usd"),
    [
        # As recorded of OpenRouter: what the call cost there is a part of what is charged, ...
        ({"cost": 0.0009056, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.0009056}}, "0.0009056"),
        # ... but with a key of one's own, where both are paid.
        ({"cost": 0.0012, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.0345}}, "0.0357"),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.00123}}, "0.00123"),
        # As its documents show it: of a part that is larger than the whole, the call was one with such a key.
        ({"cost": 0.95, "cost_details": {"upstream_inference_cost": 19}}, "19.95"),
        *(({"cost": 0.95, "cost_details": {"upstream_inference_cost": part}}, "0.95") for part in (0.9, 0.95)),
        ({"cost": 0.95, "is_byok": False, "cost_details": {"upstream_inference_cost": 19}}, "0.95"),
        ({"cost": 0.95, "cost_details": {"upstream_inference_cost": None}}, "0.95"),
        ({"cost": 0}, "0"),
        ({"cost": -0.0}, "0"),
        # xAI's ticks, and Perplexity's parts, whose fee for the request is most of it.
        ({"cost_in_usd_ticks": 8702400}, "0.00087024"),
        ({"cost": None, "cost_in_usd_ticks": 37756000}, "0.0037756"),
        ({"cost": {"input_tokens_cost": 1e-05, "request_cost": 0.005, "total_cost": 0.00507}}, "0.00507"),
    ],
)
def test_a_cost_is_what_is_paid_to_all(said: dict[str, object], usd: str) -> None:
    found = cost(said)
    assert found == Decimal(usd)
    assert not f"{found}".startswith("-")


@pytest.mark.parametrize("value", [None, True, "0.5", -1, {"usd": 1}, [1], float("nan"), float("inf"), 1e300])
def test_what_is_no_cost_is_none(value: object) -> None:
    assert cost({"cost": value}) is None
    assert cost({"cost": value, "is_byok": True, "cost_details": {"upstream_inference_cost": 5}}) is None
    assert cost({"cost": {"total_cost": value}}) is None
    assert cost({"cost_in_usd_ticks": value}) is None


def test_the_last_cost_counts_and_null_erases_none() -> None:
    assert cost({"cost": 0.5}, {"cost": 0.75}, {"cost": None}, {"completion_tokens": 5}) == Decimal("0.75")


def test_ticks_that_stand_on_every_chunk_are_not_added_up_nor_erased() -> None:
    said = [{"cost_in_usd_ticks": number} for number in (10**9, 2 * 10**9, None)]
    assert cost(*said, {**ZEROS, "cost_in_usd_ticks": 0}) == Decimal("0.2")


def test_the_cost_at_the_beginning_of_a_message_is_no_cost_yet() -> None:
    reader = UsageReader()
    reader.add({"input_tokens": 10, "output_tokens": 1, "cost": 0}, input_side_only=True)
    found = reader.reported()
    assert found is not None
    assert found.cost_usd is None


def test_a_cost_without_tokens_is_a_report_of_its_own() -> None:
    found = read({"cost": 0.5})
    assert found is not None
    assert (found.cost_usd, found.has_tokens) == (Decimal("0.5"), False)


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
def test_a_report_says_whether_it_has_tokens_and_whether_anything_is_paid(
    said: dict[str, object], has_tokens: bool, is_billed: bool
) -> None:
    found = read(said)
    assert found is not None
    assert (found.has_tokens, found.is_billed, found.searches) == (has_tokens, is_billed, 0)
