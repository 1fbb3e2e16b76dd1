"""Functions' names in the text of calls."""

from __future__ import annotations

import re

from octavo.engine.text.assistant.turn import Broken, Steps, Turn

_NAME = re.compile(r"""[^\s<>{}()\[\]"'=,`]+""")


def read_name(turn: Turn) -> Steps[str]:
    """Reads a function's or a parameter's name, which stands without quotes.

    Args:
        turn: what it reads is held.

    Raises:
        Broken: no name stands there.
    """
    name = yield from turn.captured(turn.run(_NAME))
    if not name:
        raise Broken
    return name
