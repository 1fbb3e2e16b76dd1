"""Draws docs/chat-page.png: the chat page of a live server of the packaged model.

PYTHONPATH=src:. python tools/chat_page_screenshot.py docs/chat-page.png
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.tiny_server import serving
from tests.browser import Browser

SIZE = {"width": 820, "height": 620}
WORDS = ("Write a Python function that adds two numbers.", "And what is the capital of France?")


def main(out: Path) -> None:
    """Draws the picture."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as profile:
        args = ["--model", "smollm2-135m", "--max-model-len", "2048", "--num-kv-pages", "500"]
        with serving(Path(folder), args) as server:
            browser = Browser(profile)
            page = browser.open(f"{server.http}/chat", **SIZE)
            page.ask("$('temperature').value = '0'; $('max_tokens').value = '120'")
            for words in WORDS:
                page.ask(f"$('words').value = {json.dumps(words)}; $('ask').requestSubmit()")
                page.wait("$('send').textContent === 'Send'")
            out.write_bytes(page.picture())
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
