"""Agents of frameworks from PyPI, which know an endpoint alone."""

import asyncio
from typing import Any


async def with_agents(endpoint: Any) -> object:
    """Run an agent of openai-agents."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(**endpoint.openai) as client:
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        return (await agents.Runner.run(agents.Agent(name="guesser", model=model), "Guess.")).final_output


async def with_smolagents(endpoint: Any) -> object:
    """Run an agent of smolagents that writes code."""
    import smolagents

    url, key = str(endpoint.openai["base_url"]), endpoint.openai["api_key"]
    model = smolagents.OpenAIServerModel("policy", api_base=url, api_key=key, max_tokens=20)
    coder = smolagents.CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
    return await asyncio.to_thread(coder.run, "Guess.")


FRAMEWORKS = {"agents": with_agents, "smolagents": with_smolagents}
"""By the module that a test needs."""
