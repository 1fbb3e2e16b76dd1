"""How a family of models writes calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo.engine.text.assistant.events import AssistantParser
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice

NO_SPECIALS: Mapping[str, int] = MappingProxyType({})
"""The special tokens of a vocabulary that has none."""


@dataclass(frozen=True, slots=True)
class ToolFormat(ABC):
    """One way of writing calls: reads it, and says what a constrained model may write.

    Attributes:
        name: as `--tool-call-parser` takes it; vLLM's name where it has one.
        fits: whether a model of a template and a family (`model_type` of its config) writes calls
            like this.
    """

    name: str
    fits: Callable[[str, str], bool]

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Special tokens that a call is made of: the detokenizer must not leave them out."""

    @abstractmethod
    def parser(self, tools: Sequence[FunctionTool]) -> AssistantParser:
        """A parser of one turn.

        Args:
            tools: of the request; formats without types in their text read them from the schemas.
        """

    def can_name(self, key: str) -> bool:
        """Whether a call can have an argument of a name: JSON has all."""
        return True

    @abstractmethod
    def grammar(
        self,
        tools: Sequence[FunctionTool],
        choice: ToolChoice,
        specials: Mapping[str, int] = NO_SPECIALS,
    ) -> str | None:
        """A grammar in Lark's syntax, as llguidance extends it (`%json`, special tokens as
        `<[id]>`), of all turns that the choice allows.

        With "required", calls of the tools that are left and nothing else; with "auto", any text,
        and from the moment a call begins a call that is valid. None if the format has no grammar.

        Args:
            tools: of the request.
            choice: of the request; not "none".
            specials: ids of the vocabulary's special tokens, by their text. A marker among them is
                written as that token: no text matches it.
        """


def special_tokens(*marks: str) -> tuple[str, ...]:
    """The marks that are written like special tokens, as the others are plain text everywhere."""
    return tuple(mark for mark in marks if mark[:1] in ("<", "[", "｜") and mark[-1] in ">]｜")
