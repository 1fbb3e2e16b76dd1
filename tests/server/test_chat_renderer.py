"""Chats are rendered in processes with limits: a template costs its own answer and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psutil
import pytest

from octavo.engine.errors import EngineDeadError, InvalidRequestError, ModelLoadError
from octavo.engine.text.chat_template import ChatTemplate
from octavo.server.chat_renderer import ChatRenderer
from octavo.server.chat_workers import NUM_WORKERS

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ x }}"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOUND = "within 0.5 s and 256 MiB"


@contextlib.asynccontextmanager
async def rendering(source: str = TEMPLATE) -> AsyncIterator[ChatRenderer]:
    renderer = ChatRenderer(source, {"bos_token": "<s>"})
    try:
        await renderer.start()
        yield renderer
    finally:
        renderer.close()


def run(scenario: Callable[[ChatRenderer], Awaitable[None]], source: str = TEMPLATE) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), rendering(source) as renderer:
            await scenario(renderer)

    asyncio.run(main())


def workers_of(renderer: ChatRenderer) -> list[psutil.Process]:
    assert renderer._process is not None
    return psutil.Process(renderer._process.pid).children()


def test_it_renders_what_the_template_renders_here() -> None:
    messages = [
        {"role": "user", "content": "a\ud800é\U0001f600" * 1_000},
        {"role": "user", "content": [{"type": "text", "text": "x"}] * 3},
    ]
    names = {"x": [1, 2.5, None, {"y": True}], "self": 1, "add_generation_prompt": False}
    expected = ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(messages, **names)  # type: ignore[arg-type]

    async def scenario(renderer: ChatRenderer) -> None:
        answers = await asyncio.gather(*(renderer.render(messages, names) for _ in range(20)))
        assert answers == [expected] * 20

    run(scenario)


BEYOND_LIMITS = [
    ENDLESS,
    "{{ 'a' * 3 * 10**9 }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ messages | tojson(indent=2 * 10**9) }}",
    "{% set x = 9 %}{{ x ** (x ** x) }}",
    "{{ [0] * 10**10 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ lipsum(n=10**6) }}",
    "{{ 9 ** (9 ** 9) }}",  # while it compiles
    "{% for a in range(99999) %}{{ 'a' * 100 }}{{ 'b' * 100 }}{% endfor %}",
]


def test_templates_that_go_beyond_their_limits_cost_their_own_answers() -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        for template in BEYOND_LIMITS:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(renderer.render(HI, {})) for _ in range(8)]
                with pytest.raises(InvalidRequestError, match=rf"{BOUND}|at most \d+, rendered"):
                    await renderer.render(HI, {}, template)
            assert {other.result() for other in others} == {"<s>[user]hi"}

    run(scenario)


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{% if x %}" * 3_000 + "{% endif %}" * 3_000, "chat_template = .* in Jinja"),
        ("{{" + "(" * 3_000 + "1" + ")" * 3_000 + "}}", "chat_template = .* in Jinja"),
        ("{% for %}", "chat_template = .* in Jinja"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}{{ raise_exception('no') }}", "chat template accepts"),
    ],
)
def test_a_template_that_fails_says_why(template: str, wrong: str) -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        with pytest.raises(InvalidRequestError, match=wrong):
            await renderer.render(HI, {}, template)

    run(scenario)


@pytest.mark.parametrize(
    "source",
    ["{% if x %}" * 3_000 + "{% endif %}" * 3_000, "{% for %}", "{{ 9 ** (9 ** 9) }}"],
)
def test_a_model_whose_template_does_not_compile_is_a_bad_checkpoint(source: str) -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="chat template"):
                await renderer.render(HI, {})
        assert await renderer.render(HI, {}, "{{ messages[0].content }}") == "hi"

    run(scenario, source)


def test_errors_name_the_message() -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\.role = 7 is not allowed: "):
            await renderer.render([*HI, {"role": 7}], {})
        with pytest.raises(InvalidRequestError, match="plain values"):
            await renderer.render(HI, {"x": object()})

    run(scenario)


def test_processes_that_are_killed_are_replaced_and_no_chat_is_lost() -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        assert renderer._process is not None
        first = renderer._process.pid
        await renderer.render(HI, {})
        for worker in workers_of(renderer):
            worker.kill()
        assert await renderer.render(HI, {}) == "<s>[user]hi"
        old = workers_of(renderer)
        os.kill(first, signal.SIGKILL)
        answers = await asyncio.gather(*(renderer.render(HI, {}) for _ in range(20)))
        assert answers == ["<s>[user]hi"] * 20
        assert renderer._process.pid != first
        await asyncio.to_thread(psutil.wait_procs, old, 20)
        assert not any(worker.is_running() for worker in old)

    run(scenario)


def test_more_chats_than_workers_wait_for_one() -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_WORKERS):
                group.create_task(_refused(renderer))
            await asyncio.sleep(0.1)
            assert await renderer.render(HI, {}) == "<s>[user]hi"

    async def _refused(renderer: ChatRenderer) -> None:
        with pytest.raises(InvalidRequestError, match=BOUND):
            await renderer.render(HI, {}, ENDLESS)

    run(scenario)


def test_a_chat_whose_client_leaves_frees_its_place() -> None:
    async def scenario(renderer: ChatRenderer) -> None:
        for _ in range(10 * NUM_WORKERS):
            task = asyncio.create_task(renderer.render(HI, {}, ENDLESS))
            await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert await renderer.render(HI, {}) == "<s>[user]hi"

    run(scenario)


def test_nothing_is_left_once_it_is_closed() -> None:
    async def main() -> list[psutil.Process]:
        async with rendering() as renderer:
            await renderer.render(HI, {})
            assert renderer._process is not None
            tree = [psutil.Process(renderer._process.pid), *workers_of(renderer)]
        with pytest.raises(EngineDeadError, match="shutting down"):
            await renderer.render(HI, {})
        return tree

    _, alive = psutil.wait_procs(asyncio.run(main()), 20)
    assert not alive


def test_a_message_that_only_calls_tools_has_a_content_that_templates_can_take() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    joins = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}", {})
    assert joins.render([*HI, calls]) == "user:hi;assistant:;"
    asks = ChatTemplate("{% for m in messages %}{{ m.content is none }};{% endfor %}", {})
    assert asks.render([*HI, calls]) == "False;True;"
    with pytest.raises(InvalidRequestError, match="accepts"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(HI)
