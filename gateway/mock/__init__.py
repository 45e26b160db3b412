"""A fake LLM provider that really speaks the wire formats, with faults on demand and a ledger of what it billed."""

from gateway.mock.app import create_app
from gateway.mock.provider import Billed, Provider, RecordedCall
from gateway.mock.server import MockServer
from gateway.mock.turns import Behaviour, ToolCall, Turn, UsagePlacement
from gateway.mock.windows import MODEL_WINDOWS

__all__ = [
    "MODEL_WINDOWS",
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
