"""A fake LLM provider that really speaks the wire formats, with faults on demand and a ledger of what it billed."""

from gateway.mock.app import create_app
from gateway.mock.claude_rules import CLAUDE_RULES, ModelRules
from gateway.mock.provider import Billed, Provider, RecordedCall
from gateway.mock.server import MockServer
from gateway.mock.strict import STRICT_MODELS, StrictRules
from gateway.mock.turns import Behaviour, ToolCall, Turn, UsagePlacement
from gateway.mock.windows import MODEL_WINDOWS

__all__ = [
    "CLAUDE_RULES",
    "MODEL_WINDOWS",
    "STRICT_MODELS",
    "Behaviour",
    "Billed",
    "MockServer",
    "ModelRules",
    "Provider",
    "RecordedCall",
    "StrictRules",
    "ToolCall",
    "Turn",
    "UsagePlacement",
    "create_app",
]
