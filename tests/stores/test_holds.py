"""Values in a store keep the names that earlier versions wrote, so that these and newer ones can read them."""

from __future__ import annotations

import json
from decimal import Decimal

import msgspec
import pytest

from gateway.core.ledger.arithmetic import Amount, Claim, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import SessionState
from gateway.core.stored import OpenHold, StoredKey
from gateway.stores import holds, states

KEY = SessionKey("alice", "s")
#: a record as earlier versions wrote it, and an open hold with it
RECORD = (
    b'{"call_id":"c1","request_id":"r","session":{"namespace":"alice","id":"s"},"derived_session":false,'
    b'"started_at":1.5,"dialect":"openai","operation":"chat","provider":"p","model":"m","response_model":"m-1",'
    b'"stream":true,"status":499,"outcome":"worker_lost","error_code":"code","finish_reason":"stop","tools":["look"],'
    b'"charge":{"usage":{"input_tokens":7,"output_tokens":2,"total_tokens":9,"cache_read_tokens":1,'
    b'"cache_write_tokens":1,"reasoning_tokens":1,"audio_input_tokens":1,"audio_output_tokens":1,'
    b'"cache_write_1h_tokens":1},"source":"estimated","cost_usd":"0.5"},"overhead_s":0.1,"first_byte_s":0.2,'
    b'"duration_s":0.3,"request_bytes":1,"response_bytes":2,"notes":{"price":"unknown"},"context":{"tokens":5,'
    b'"original_tokens":9,"source":"learned","budget":100,"conversation_tokens":2,"tool_tokens":3,"key":"k",'
    b'"estimate":4,"frames":2,"before":{"key":"k","residual":3,"frames":1,"added":40,"over":4},"trimmed":{"drop":1},'
    b'"saved":{"drop":4},"shadow":false,"message_fates":{"names":["sent"],"roles":[0],"rules":[0],"before":[4],'
    b'"after":[4]},"tool_weights":{"look":[1,3]},"margin":1,"kept":1,"beyond":1,"thinking":{"received":2,"sent":1,'
    b'"reason":"trim"},"newest":1},"accounts":[["session","alice","s"]],"spent":[9,500000000,1],"mode":"table",'
    b'"step":"plan","kept":"x","answer":"a","unread_thinking":[{"blocks":1,"reason":"model","provider":"p",'
    b'"model":"m"}],"lesson":["k","v"],"error":{"message":"text","budget":{"scope":"key","limit":1}},'
    b'"declared":[1,null,3,2.5],"agent":{"id":"a1","parent":"main","type":"Explore","request_class":"subagent"},'
    b'"labels":{"tag":"x"}}'
)
HOLD_FORM = (
    b'{"hold":{"id":"c1","claims":[{"key":["session","alice","s"],"configured":[50,null,null,null],'
    b'"declared":[null,null,null,null]%b}],"fixed":[7,0,0],"unit":[1,0,0],"least":1,"most":9},"lost":%b,"units":0,'
    b'"noted":0,"unit_usd":"0.01","goes_on":true}'
)
#: the same, as this version and as earlier ones wrote it
HOLD = HOLD_FORM % (b',"closing_share":0.0,"is_closing":false', RECORD)
EARLIER_HOLD = HOLD_FORM % (b"", RECORD)


def test_records_are_read_and_written_as_before() -> None:
    assert msgspec.json.encode(msgspec.json.decode(RECORD, type=CallRecord)) == RECORD


def test_a_record_of_an_earlier_version_names_no_agent() -> None:
    earlier, _, _ = RECORD.partition(b',"agent"')
    record = msgspec.json.decode(earlier + b"}", type=CallRecord)
    assert (record.agent, record.step) == (None, "plan")


def test_open_holds_are_read_and_written_as_before() -> None:
    opened = holds.decode(EARLIER_HOLD, 0, 0)
    claim = Claim(KEY.account, Limits(tokens=50))
    record = msgspec.json.decode(RECORD, type=CallRecord)
    hold = Hold("c1", (claim,), Amount(7), Amount(1), 1, 9)
    assert opened == OpenHold(hold, record, unit_usd=Decimal("0.01"), goes_on=True)
    assert holds.encode(opened) == HOLD


def test_a_hold_is_read_with_its_current_units_and_delivered_tokens() -> None:
    opened = holds.decode(HOLD, 5, 3)
    assert (opened.units, opened.noted) == (5, 3)


def test_a_hold_of_another_form_cannot_be_read() -> None:
    with pytest.raises(msgspec.MsgspecError):
        holds.decode(b'{"hold":1}', 0, 0)


def test_states_and_client_keys_are_written_under_the_same_names_as_before() -> None:
    state, key = json.loads(states.written(SessionState())), json.loads(msgspec.json.encode(StoredKey("n", b"d", 1.0)))
    assert [*state] == [
        "epochs", "summaries", "parent", "steps", "sent_prefixes", "thinking", "tool_changes", "unread",
        "cheaper_model", "works",
    ]  # fmt: skip
    assert [*key] == ["name", "digest", "created_at", "models", "limits", "rpm", "expires_at", "replaced", "group"]
