"""Import litellm late, and turn off its network access, retries, callbacks and logs.

Importing it takes seconds and over 100 MB, so that only a configuration with such a provider does, in a thread. All
that is used of it is named here. A call is always a chat call in the middle: litellm's own entries for messages and
responses need packages of its proxy, their translations do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import threading
import warnings
from contextvars import ContextVar
from typing import Any, Final

from gateway.core.values import dataclass

#: read by litellm while it is imported: its tables are those of its wheel, and no .env file is read
_ENVIRONMENT: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",
}
_SETTINGS: Final = {
    "suppress_debug_info": True,
    "set_verbose": False,
    "telemetry": False,
    "turn_off_message_logging": True,
    "disable_streaming_logging": True,
    "disable_hf_tokenizer_download": True,
    # The other transport leaves connections open that nobody closes.
    "disable_aiohttp_transport": True,
    "drop_params": False,
    "modify_params": False,
    "num_retries": 0,
    "cache": None,
}
_CALLBACKS: Final = (
    "callbacks", "input_callback", "success_callback", "failure_callback", "service_callback",
    "_async_input_callback", "_async_success_callback", "_async_failure_callback",
)  # fmt: skip
#: its own, and those of its clients, which write addresses that may hold a key
_LOGGERS: Final = ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router", "httpx", "httpcore", "openai", "botocore")
#: what pydantic says of litellm's types when it first meets one
_UNHEARD: Final = (".*`ReadOnly` qualifier.*", ".*conflict with protected namespace.*", ".*Accessing the.*attribute on")
#: where its translation of Messages is, from 1.109 on and before
_ADAPTER: Final = "litellm.llms.anthropic.messages.adapters.transformation"
_ADAPTER_BEFORE: Final = "litellm.llms.anthropic.pass_through.adapters.transformation"
_lock: Final = threading.Lock()
#: event loop -> how many providers use its clients
_users: Final[dict[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Library:
    """What is used of litellm.

    `chat`, `text` and `embed` call a provider. `messages` and `responses` translate requests and answers of these
    formats, `ResponsesStream` streams. `supported` says what a model takes, `options` what it is sent for that, `sees`
    whether it takes pictures; `Timeout` holds the time to connect and that for all else; `clients` are its connections,
    `providers` the names it knows.
    """

    chat: Any
    text: Any
    embed: Any
    supported: Any
    options: Any
    sees: Any
    messages: Any
    responses: Any
    ResponsesStream: Any
    Timeout: Any
    clients: Any
    providers: frozenset[str]
    _is_internal: ContextVar[bool]

    def keep_quiet(self) -> None:
        """What is called in this task is not handed to litellm's log of successes and failures."""
        self._is_internal.set(True)


def load() -> Library:
    """litellm, ready to use. Takes seconds the first time: call it in a thread.

    Raises:
        ImportError: it is not there, or not one that we know.
    """
    with _lock:
        for name, text in _ENVIRONMENT.items():
            os.environ.setdefault(name, text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = _imported()
        for words in _UNHEARD:
            warnings.filterwarnings("ignore", message=words)
        return loaded


def _imported() -> Library:
    import httpx  # noqa: PLC0415
    import litellm  # noqa: PLC0415
    from litellm._internal_context import is_internal_call  # noqa: PLC0415
    from litellm.litellm_core_utils.get_supported_openai_params import get_supported_openai_params  # noqa: PLC0415
    from litellm.responses.litellm_completion_transformation import (  # noqa: PLC0415
        streaming_iterator,
        transformation,
    )

    for name, value in _SETTINGS.items():
        setattr(litellm, name, value)
    for name in _CALLBACKS:
        setattr(litellm, name, [])
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # What was imported stays; a full collection need not look at it again and again.
    gc.freeze()
    return Library(
        chat=litellm.acompletion,
        text=litellm.atext_completion,
        embed=litellm.aembedding,
        supported=get_supported_openai_params,
        options=litellm.utils.get_optional_params,
        sees=litellm.supports_vision,
        messages=_anthropic_adapter(),
        responses=transformation.LiteLLMCompletionResponsesConfig,
        ResponsesStream=streaming_iterator.LiteLLMCompletionStreamingIterator,
        Timeout=httpx.Timeout,
        clients=litellm.in_memory_llm_clients_cache,
        providers=frozenset(provider.value for provider in litellm.LlmProviders)
        | frozenset(map(str, litellm.openai_compatible_providers)),
        _is_internal=is_internal_call,
    )


def _anthropic_adapter() -> Any:
    """What writes Messages as chat and back.

    Raises:
        ImportError: it is in neither of its places.
    """
    try:
        module = importlib.import_module(_ADAPTER)
    except ModuleNotFoundError as error:
        if error.name is None or not _ADAPTER.startswith(error.name):
            raise
        module = importlib.import_module(_ADAPTER_BEFORE)
    return module.AnthropicAdapter()


def use() -> None:
    """One provider more uses litellm's connections on this event loop."""
    loop = id(asyncio.get_running_loop())
    with _lock:
        _users[loop] = _users.get(loop, 0) + 1


async def leave(library: Library | None) -> None:
    """One less; with the last one they are closed. litellm shares them between all that talk alike."""
    loop = id(asyncio.get_running_loop())
    with _lock:
        _users[loop] -= 1
        if _users[loop]:
            return
        del _users[loop]
    if library is None:
        return
    kept = library.clients.cache_dict
    # How litellm marks those of a loop has changed between its releases; it still says so itself.
    mark = library.clients.update_cache_key_with_event_loop("")
    for key in [key for key in kept if str(key).endswith(mark)]:
        client = kept.pop(key, None)
        client = getattr(client, "client", client)
        close = getattr(client, "aclose", None) or getattr(client, "close", None)
        with contextlib.suppress(Exception):
            closing = close() if close is not None else None
            if closing is not None:
                await closing
