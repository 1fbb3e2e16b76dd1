"""What a chat looks like: plain text in a file or a pipe, Markdown and dim thoughts in a terminal.

Markdown is shown block by block. The block that is being written is drawn again as it grows; one
that is whole is never touched again, so that a long answer scrolls as any other text.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
_REFRESHES_PER_SECOND = 8


class Screen(Protocol):
    """Shows one answer at a time."""

    def think(self, text: str) -> None:
        """A further piece of a thought."""

    def write(self, text: str) -> None:
        """A further piece of the words for the user."""

    def call(self, name: str, arguments: str) -> None:
        """A call of a tool, whole."""

    def end(self) -> None:
        """The answer is over, or the model waits for results of its calls."""


class PlainScreen:
    """Words and calls go to the standard output as they come, thoughts to the standard error."""

    def __init__(self) -> None:
        self._is_within_line = False

    def think(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        print(text, end="", flush=True)
        if text:
            self._is_within_line = not text.endswith("\n")

    def call(self, name: str, arguments: str) -> None:
        print("\n" * self._is_within_line + f"{name}({arguments})", flush=True)
        self._is_within_line = False

    def end(self) -> None:
        print(flush=True)
        self._is_within_line = False


class RichScreen:
    """A terminal.

    Args:
        console: of the standard output.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._block = ""
        self._thinks = False

    def think(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style="dim italic"), end="")
        self._thinks = True

    def write(self, text: str) -> None:
        self._end_thought()
        whole, self._block = split_blocks(self._block + text)
        for block in whole:
            self._draw(block, is_whole=True)
        if self._block.strip():
            self._draw(self._block)

    def call(self, name: str, arguments: str) -> None:
        from rich.text import Text

        self._end_thought()
        self._finish_block()
        self._console.print(Text.assemble("→ ", (name, "bold cyan"), f"({arguments})"))

    def end(self) -> None:
        self._end_thought()
        self._finish_block()
        self._console.print()

    def _end_thought(self) -> None:
        if self._thinks:
            self._console.print("\n")
        self._thinks = False

    def _finish_block(self) -> None:
        if self._block.strip():
            self._draw(self._block, is_whole=True)
        self._block = ""

    def _draw(self, block: str, *, is_whole: bool = False) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        shown = Markdown(block)
        if is_whole and self._live is None:
            self._console.print(shown)
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=_REFRESHES_PER_SECOND)
            self._live.start()
        self._live.update(shown, refresh=is_whole)
        if is_whole:
            self._live.stop()
            self._live = None


def open_screen(*, is_plain: bool) -> Screen:
    """The screen of the standard output.

    Args:
        is_plain: show plain text in a terminal, too.
    """
    if is_plain or not sys.stdout.isatty():
        return PlainScreen()
    from rich.console import Console

    return RichScreen(Console())


def split_blocks(text: str) -> tuple[list[str], str]:
    """Blocks of Markdown that nothing which follows can change, and the rest of the text.

    A block ends at an empty line, but for one between fences of code.
    """
    whole: list[str] = []
    begin = 0
    for match in re.finditer(r"\n[ \t]*\n", text):
        block = text[begin : match.end()]
        if not _is_open(block):
            if block.strip():
                whole.append(block)
            begin = match.end()
    return whole, text[begin:]


def _is_open(block: str) -> bool:
    """Whether a block ends between fences."""
    fence = ""
    for match in _FENCE.finditer(block):
        mark = match[1]
        if not fence:
            fence = mark
        elif mark[0] == fence[0] and len(mark) >= len(fence):
            fence = ""
    return bool(fence)
