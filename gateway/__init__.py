"""An OpenAI-compatible gateway that meters the usage of long-running agents and enforces their budgets.

The names in `__all__` are a library for programs that keep a token budget themselves (docs/guides/library.md). They are
imported when they are first used, so that `import gateway` stays fast.
"""

#: true for type checkers, which know this name; to import `typing` for it would take 5 ms
TYPE_CHECKING = False

if TYPE_CHECKING:
    from gateway.library.budget_manager import Allocation, BudgetExhausted, BudgetManager
    from gateway.library.counters import CharacterCounter, TokenCounter, model_counter, tiktoken_counter
    from gateway.library.results import RenderedResult, ResponseMode, render_result

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "BudgetExhausted",
    "BudgetManager",
    "CharacterCounter",
    "RenderedResult",
    "ResponseMode",
    "TokenCounter",
    "model_counter",
    "render_result",
    "tiktoken_counter",
]

if not TYPE_CHECKING:  # a type checker shall know which names exist

    def __getattr__(name: str) -> object:
        """Import a name of the library when it is first used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gateway.library import budget_manager, counters, results  # noqa: PLC0415

        modules = (budget_manager, counters, results)
        globals().update({name: getattr(module, name) for module in modules for name in module.__all__})
        return globals()[name]

    def __dir__() -> list[str]:
        """Return the names of the module, with those that are not imported yet."""
        return sorted({*globals(), *__all__})
