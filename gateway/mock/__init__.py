"""Mock LLM provider: serves the OpenAI and Anthropic APIs locally, for tests and for trials without an API key."""

from gateway.mock.app import create_app
from gateway.mock.claude_rules import CLAUDE_RULES, ModelRules
from gateway.mock.provider import Billed, MockProvider, RecordedCall
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
    "MockProvider",
    "MockServer",
    "ModelRules",
    "RecordedCall",
    "StrictRules",
    "ToolCall",
    "Turn",
    "UsagePlacement",
    "create_app",
]
