"""The log of requests: what a line holds, and what only a server that was told to writes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import SamplingParams
from octavo.server.front import Front
from octavo.server.logs import JsonFormatter, TextFormatter

PROMPT = "what was said in confidence"


async def answer(front: Front, engine: Any, request_id: str, prompt: Any = PROMPT) -> None:
    front.engine = engine
    async for _ in front.generate(prompt, SamplingParams(max_tokens=2), request_id):
        pass


def lines(caplog: pytest.LogCaptureFixture, formatter: logging.Formatter) -> list[str]:
    return [
        formatter.format(record) for record in caplog.records if record.name == "octavo.request"
    ]


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_and_errors_that_quote_them_are_logged_only_if_asked_for(
    caplog, counting_engine, log_prompts
):
    caplog.set_level(logging.INFO, "octavo.request")
    front = Front(log_prompts=log_prompts)
    asyncio.run(answer(front, counting_engine, "good"))
    asyncio.run(answer(front, counting_engine, "by tokens", [71, 72]))
    counting_engine.failure = InvalidRequestError("prompt", PROMPT, "anything else")
    with pytest.raises(InvalidRequestError):
        asyncio.run(answer(front, counting_engine, "bad"))
    good, by_tokens, bad = map(json.loads, lines(caplog, JsonFormatter()))
    assert (good["request_id"], good["finish_reason"]) == ("good", "length")
    assert (good["generation_tokens"], good["logger"]) == (2, "octavo.request")
    if log_prompts:
        assert (good["prompt"], by_tokens["prompt"]) == (PROMPT, [71, 72])
        assert PROMPT in bad["error"]
    else:
        assert bad["error"] == "InvalidRequestError"
        assert PROMPT not in json.dumps([good, by_tokens, bad])
        assert "prompt" not in good | by_tokens | bad


def test_a_name_of_several_lines_stays_one_line(caplog, counting_engine):
    caplog.set_level(logging.INFO, "octavo.request")
    asyncio.run(answer(Front(), counting_engine, "a\n2026-01-01 CRITICAL forged"))
    for formatter in (TextFormatter(), JsonFormatter()):
        [line] = lines(caplog, formatter)
        assert len(line.splitlines()) == 1
        assert "forged" in line


@pytest.mark.parametrize(("level", "told"), [("info", False), ("warning", False), ("debug", True)])
def test_devices_that_are_not_there_are_told_of_at_debug_alone(level: str, told: bool) -> None:
    program = (
        "import logging, sys; from octavo.server.logs import LogConfig, start_logging; "
        "start_logging(LogConfig(log_level=sys.argv[1])); import jax; "
        "logging.getLogger('octavo.request').info('ours'); jax.devices()"
    )
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", program, level], capture_output=True, text=True, check=True,
        env=environ,
    )  # fmt: skip
    assert ("xla_bridge" in done.stderr) == told
    assert ("ours" in done.stderr) == (level != "warning")
