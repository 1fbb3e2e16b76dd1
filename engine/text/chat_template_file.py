"""The chat template that a user sets in place of the model's own."""

from __future__ import annotations

from pathlib import Path

from octavo.engine.errors import InvalidConfigError, ModelLoadError
from octavo.engine.text.chat_template import ChatTemplate

MAX_TEMPLATE_BYTES = 1 << 20
_FIELD = "chat_template"


def read_chat_template(value: str) -> str:
    """The template's source.

    Args:
        value: a file that holds it, or, if it has a brace, the source itself.

    Raises:
        InvalidConfigError: no such file, or no template.
    """
    source = value if "{" in value else _read(Path(value))
    try:
        ChatTemplate(source, {})
    except ModelLoadError as error:
        allowed = f"a Jinja template ({error.__cause__})"
        raise InvalidConfigError(_FIELD, value, allowed) from error
    return source


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            allowed = f"a file of at most {MAX_TEMPLATE_BYTES} bytes"
            raise InvalidConfigError(_FIELD, path, allowed)
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        allowed = f"a file that can be read, or a template ({error})"
        raise InvalidConfigError(_FIELD, path, allowed) from error
