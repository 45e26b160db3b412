"""An OpenAI-compatible gateway that meters the usage of long-running agents and enforces their budgets."""

__version__ = "0.1.0"
