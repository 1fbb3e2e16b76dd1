"""Examples of the documents, as tests run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def examples(page: str, language: str = "python") -> list[str]:
    """A page's blocks in a language."""
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_example(code: str, server: Any) -> str:
    """What an example prints that a Python of its own runs against this server process."""
    code = code.replace("http://127.0.0.1:8000", server.http)
    code = code.replace("127.0.0.1:50051", server.grpc)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
