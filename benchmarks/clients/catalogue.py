"""Which clients there are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """A client that nobody here wrote.

    Attributes:
        name: in the table, and on the command line.
        module: beside this one; its functions `check_…` each try one thing.
        packages: whose versions the table tells.
        is_short: whether it is one of those that CI runs.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    is_short: bool = True


CLIENTS = (
    Client("openai", "openai_sdk", ("openai",)),
    Client("anthropic", "anthropic_sdk", ("anthropic",)),
    Client(
        "LangChain", "langchain_client",
        ("langchain", "langchain-openai", "langchain-anthropic", "langgraph"),
    ),
    Client("Pydantic AI", "pydantic_ai_client", ("pydantic-ai-slim",)),
    Client("Instructor", "instructor_client", ("instructor",)),
    Client("LiteLLM", "litellm_client", ("litellm",)),
    Client(
        "LlamaIndex", "llama_index_client",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    ),
    Client("OpenAI Agents", "openai_agents_client", ("openai-agents",), False),
    Client("smolagents", "smolagents_client", ("smolagents",), False),
    Client("DSPy", "dspy_client", ("dspy",), False),
    Client("Haystack", "haystack_client", ("haystack-ai",), False),
    Client("Semantic Kernel", "semantic_kernel_client", ("semantic-kernel",), False),
    Client("AutoGen", "autogen_client", ("autogen-ext", "autogen-core"), False),
    Client("CrewAI", "crewai_client", ("crewai",), False),
    Client("Outlines", "outlines_client", ("outlines",), False),
    Client("Cohere", "cohere_client", ("cohere",), False),
)  # fmt: skip
