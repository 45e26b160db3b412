"""A fake LLM provider that really speaks the wire formats, with faults on demand and a ledger of what it billed."""

from gateway.mock.app import create_app
from gateway.mock.provider import Billed, Provider, RecordedCall
from gateway.mock.server import MockServer
from gateway.mock.turns import Behaviour, ToolCall, Turn, UsagePlacement

__all__ = [
    "Behaviour",
    "Billed",
    "MockServer",
    "Provider",
    "RecordedCall",
    "ToolCall",
    "Turn",
    "UsagePlacement",
    "create_app",
]
