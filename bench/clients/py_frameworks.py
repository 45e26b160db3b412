"""Check agent frameworks: AutoGen, smolagents, LlamaIndex, Haystack, Agno, Strands. One environment for all of them."""

from __future__ import annotations

import asyncio
import os
from typing import Any

# Some frameworks report their usage by default.
os.environ.update(HAYSTACK_TELEMETRY_ENABLED="False", AGNO_TELEMETRY="false", OPENAI_API_KEY="none")

import openai
from agno.agent import Agent as AgnoAgent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from anthropic import Anthropic
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import GATEWAY, KEY, MODEL, NO_BUDGET, failure, get, run, settled
from haystack.components.agents import Agent as HaystackAgent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage as HaystackMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from smolagents import OpenAIServerModel, ToolCallingAgent
from smolagents import tool as smol_tool
from smolagents.utils import AgentGenerationError
from strands import Agent as StrandsAgent
from strands import tool as strands_tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

ASK = "What is the weather?"
ANSWER = "The tool answered: sunny in sample city"
#: what AutoGen requires for a model with an unknown name
MODEL_INFO: Any = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown",
}  # fmt: skip


def base(session: str, *, openai_style: bool = True) -> str:
    return f"{GATEWAY}/s/{session}/v1" if openai_style else f"{GATEWAY}/s/{session}"


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: the name of the city
    """
    return f"sunny in {city}"


def calls(session: str) -> int:
    """Return the number of settled calls of a session, once all are settled."""
    settled()
    found: int = get(f"{GATEWAY}/api/sessions/{session}", KEY)["calls"]
    return found


def autogen(session: str, **headers: str) -> Any:
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=base(session), api_key=KEY, default_headers=headers, model_info=MODEL_INFO
    )


async def autogen_tools() -> None:
    done = await AssistantAgent("a", autogen("autogen"), tools=[weather], reflect_on_tool_use=True).run(task=ASK)
    assert done.messages[-1].content == ANSWER
    assert calls("autogen") == 2


async def autogen_stream() -> None:
    agent = AssistantAgent("a", autogen("autogen-stream"), model_client_stream=True)
    parts = [part async for part in agent.run_stream(task=ASK)]
    assert parts[-1].messages[-1].content == f"You said: {ASK}"
    assert calls("autogen-stream") == 1


def autogen_errors() -> None:
    agent = AssistantAgent("a", autogen("autogen-poor", **NO_BUDGET))
    assert failure(lambda: asyncio.run(agent.run(task=ASK)), openai.BadRequestError).code == "budget_exhausted"


def smolagents(session: str, **headers: str) -> Any:
    options = {"default_headers": headers}
    return OpenAIServerModel(model_id=MODEL, api_base=base(session), api_key=KEY, client_kwargs=options)


def smolagents_tools() -> None:
    agent = ToolCallingAgent(tools=[smol_tool(weather)], model=smolagents("smolagents"), max_steps=2, verbosity_level=0)
    agent.run(ASK)
    steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert [step.observations for step in steps] == ["sunny in sample city"] * 2
    assert calls("smolagents") == 3  # the built-in provider never signals the end, so it is called once more


def smolagents_stream() -> None:
    parts = list(smolagents("smolagents-stream").generate_stream([{"role": "user", "content": "hello"}]))
    assert "".join(part.content or "" for part in parts) == "You said: hello"
    assert parts[-1].token_usage.input_tokens > 0


def smolagents_errors() -> None:
    agent = ToolCallingAgent(tools=[], model=smolagents("smolagents-poor", **NO_BUDGET), verbosity_level=0)
    error = failure(lambda: agent.run(ASK), AgentGenerationError)
    assert error.__cause__.code == "budget_exhausted"


def llama_index(session: str, **headers: str) -> Any:
    return OpenAILike(
        model=MODEL, api_base=base(session), api_key=KEY, default_headers=headers, max_retries=0,
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip


def llama_index_tools() -> None:
    found = llama_index("llama").predict_and_call([FunctionTool.from_defaults(weather)], user_msg=ASK)
    assert str(found) == "sunny in sample city"
    assert calls("llama") == 1


def llama_index_stream() -> None:
    parts = list(llama_index("llama-stream").stream_chat([ChatMessage(role="user", content="hello")]))
    assert parts[-1].message.content == "You said: hello"


def llama_index_errors() -> None:
    model = llama_index("llama-poor", **NO_BUDGET)
    ask = [ChatMessage(role="user", content="hello")]
    assert failure(lambda: model.chat(ask), openai.BadRequestError).code == "budget_exhausted"


def haystack(session: str, on_part: Any = None, **headers: str) -> Any:
    return OpenAIChatGenerator(
        model=MODEL, api_base_url=base(session), api_key=Secret.from_token(KEY), streaming_callback=on_part,
        generation_kwargs={"extra_headers": headers} if headers else {},
    )  # fmt: skip


def haystack_tools() -> None:
    agent = HaystackAgent(chat_generator=haystack("haystack"), tools=[create_tool_from_function(weather)])
    assert agent.run(messages=[HaystackMessage.from_user(ASK)])["messages"][-1].text == ANSWER
    assert calls("haystack") == 2


def haystack_stream() -> None:
    parts: list[str] = []
    generator = haystack("haystack-stream", lambda part: parts.append(part.content))
    assert generator.run([HaystackMessage.from_user("hello")])["replies"][0].text == "You said: hello"
    assert len(parts) > 1


def haystack_errors() -> None:
    generator = haystack("haystack-poor", **NO_BUDGET)
    ask = [HaystackMessage.from_user(ASK)]
    assert failure(lambda: generator.run(ask), openai.BadRequestError).code == "budget_exhausted"


def agno_tools() -> None:
    models: dict[str, Any] = {
        "agno": OpenAIChat(id=MODEL, base_url=base("agno"), api_key=KEY),
        "agno-responses": OpenAIResponses(id=MODEL, base_url=base("agno-responses"), api_key=KEY),
        "agno-messages": Claude(
            id=MODEL, client=Anthropic(base_url=base("agno-messages", openai_style=False), api_key=KEY)
        ),
    }
    for session, model in models.items():
        assert AgnoAgent(model=model, tools=[weather]).run(ASK).content == ANSWER, session
        assert calls(session) == 2, session


def agno_stream() -> None:
    model = OpenAIChat(id=MODEL, base_url=base("agno-stream"), api_key=KEY)
    parts = list(AgnoAgent(model=model).run("hello", stream=True))
    assert "".join(part.content or "" for part in parts if part.event == "RunContent") == "You said: hello"


def agno_errors() -> None:
    model = OpenAIChat(id=MODEL, base_url=base("agno-poor"), api_key=KEY, default_headers=NO_BUDGET)
    done = AgnoAgent(model=model).run(ASK)
    assert (done.status.value, "x-session-budget-tokens" in done.content) == ("ERROR", True)


def strands(session: str, **headers: str) -> Any:
    return OpenAIModel(
        client_args={"base_url": base(session), "api_key": KEY, "default_headers": headers}, model_id=MODEL
    )


def strands_tools() -> None:
    """Check streaming with tools; Strands streams all its calls."""
    claude = AnthropicModel(
        client_args={"base_url": base("strands-messages", openai_style=False), "api_key": KEY},
        model_id=MODEL,
        max_tokens=500,
    )
    for session, model in {"strands": strands("strands"), "strands-messages": claude}.items():
        agent = StrandsAgent(model=model, tools=[strands_tool(weather)], callback_handler=None)
        assert str(agent(ASK)).strip() == ANSWER, session
        assert calls(session) == 2, session


def strands_errors() -> None:
    agent = StrandsAgent(model=strands("strands-poor", **NO_BUDGET), callback_handler=None)
    assert failure(lambda: agent(ASK), openai.BadRequestError).code == "budget_exhausted"


run(
    autogen_tools,
    autogen_stream,
    autogen_errors,
    smolagents_tools,
    smolagents_stream,
    smolagents_errors,
    llama_index_tools,
    llama_index_stream,
    llama_index_errors,
    haystack_tools,
    haystack_stream,
    haystack_errors,
    agno_tools,
    agno_stream,
    agno_errors,
    strands_tools,
    strands_errors,
)
