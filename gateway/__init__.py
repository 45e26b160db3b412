"""An OpenAI-compatible gateway that meters every session of a long-running agent."""

__version__ = "0.1.0"
