"""A front over two servers: the answers of one, and no stream lost when a server dies or hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.client import OctavoClient
from octavo.engine.errors import InvalidRequestError, OctavoError, OverloadedError
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.structured.turn_grammar import TurnGrammar
from octavo.models.loading.load import load_config
from octavo.models.loading.locate import locate
from octavo.server.route.routed_engine import _read_model
from tests.server.conftest import TINY_ARGS, Process, listening
from tests.waiting import until

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=400, output_kind=RequestOutputKind.DELTA)
PROMPTS = [[20 + n] * (5 + 7 * n) for n in range(6)]
TIMEOUT_S = 4.0
WAIT_S = 60.0

ServerProcess = Callable[..., contextlib.AbstractContextManager[Process]]


@pytest.fixture(scope="module")
def servers(
    tiny_model: Path, server_process: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Process]]:
    """Two servers; tests leave both serving."""
    folder = tmp_path_factory.mktemp("servers")
    args = ("--model", str(tiny_model), *TINY_ARGS)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(server_process(*args, log=folder / f"{index}"))
            for index in range(2)
        ]


@contextlib.contextmanager
def front_process(tiny_model: Path, log: Path, targets: list[str]) -> Iterator[Process]:
    """`octavo route`, from ready until the block's end."""
    backends = [word for target in targets for word in ("--backend", target)]
    options = ("--backend-timeout-s", str(TIMEOUT_S), "--log-level", "info")
    arguments = ("route", "--model", str(tiny_model), *backends, *options)
    with listening(*arguments, log=log) as process:
        yield process


@pytest.fixture(scope="module")
def front(
    tiny_model: Path, servers: list[Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("front") / "log"
    with front_process(tiny_model, log, [server.grpc for server in servers]) as process:
        yield process
    assert "Traceback" not in log.read_text()


def answers(target: str, params: SamplingParams = GREEDY) -> list[tuple[Any, ...]]:
    with OctavoClient(target) as client:
        outputs = [client.generate(prompt, params) for prompt in PROMPTS]
    return [
        tuple((each.token_ids, each.text, each.finish_reason) for each in output.outputs)
        for output in outputs
    ]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, seed=7, n=2, max_tokens=15, logprobs=1, stop=["AB"]),
        SamplingParams(
            temperature=0.0,
            max_tokens=None,
            structured_outputs=StructuredOutputsParams(regex="[a-c]{5,9}"),
        ),
        SamplingParams(
            temperature=0.0,
            max_tokens=30,
            structured_outputs=StructuredOutputsParams(
                regex="[a-c]{5,9}", turn=TurnGrammar(root='start: "ab" | "ba" @content')
            ),
        ),
        GREEDY.replace(prompt_logprobs=1, frequency_penalty=0.4),
    ],
)  # fmt: skip
def test_answers_are_those_of_one_server(
    front: Process, servers: list[Process], params: SamplingParams
) -> None:
    assert answers(front.grpc, params) == answers(servers[0].grpc, params)


def test_a_turn_that_no_text_matches_is_refused_by_a_server(servers: list[Process]) -> None:
    turn = TurnGrammar(root="start: B a\nB: /\\n*/\na: a")
    params = SamplingParams(structured_outputs=StructuredOutputsParams(turn=turn))
    with OctavoClient(servers[0].grpc) as client, pytest.raises(InvalidRequestError) as refused:
        client.generate([5], params)
    assert "no text matches rule" in str(refused.value)


def test_completions_over_http_go_the_same_way(front: Process, servers: list[Process]) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 12, "temperature": 0.0}
    told: list[Any] = [
        httpx.post(f"{process.http}/v1/completions", json=body, timeout=WAIT_S).json()
        for process in (front, servers[0])
    ]
    assert told[0]["choices"] == told[1]["choices"]
    assert told[0]["usage"] == told[1]["usage"]


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models", "/v1/schedule", "/"])
def test_its_own_pages_are_there(front: Process, path: str) -> None:
    assert httpx.get(f"{front.http}{path}", timeout=WAIT_S).status_code == 200


def test_a_refusal_of_a_server_is_the_fronts(front: Process) -> None:
    with OctavoClient(front.grpc) as client, pytest.raises(InvalidRequestError) as refused:
        client.generate([5] * 10, GREEDY.replace(max_tokens=10_000))
    assert refused.value.field == "max_tokens"


def stream_all(target: str, hurt: Callable[[], None]) -> list[tuple[list[int], str]]:
    """What readers of long streams have, of servers that are hurt while all are under way."""
    told: list[tuple[list[int], str]] = [([], "") for _ in PROMPTS]
    begun = threading.Barrier(len(PROMPTS) + 1)

    def read(index: int) -> None:
        token_ids: list[int] = []
        text = ""
        with OctavoClient(target) as client:
            for number, output in enumerate(client.stream(PROMPTS[index], LONG)):
                token_ids += output.outputs[0].token_ids
                text += output.outputs[0].text
                if number == 0:
                    begun.wait(WAIT_S)
        told[index] = token_ids, text

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    begun.wait(WAIT_S)
    hurt()
    for thread in threads:
        thread.join(WAIT_S)
    return told


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_streams_go_on_where_a_server_is_left(
    tiny_model: Path,
    servers: list[Process],
    server_process: ServerProcess,
    tmp_path: Path,
    how: signal.Signals,
) -> None:
    args = ("--model", str(tiny_model), *TINY_ARGS)
    with server_process(*args, log=tmp_path / "victim") as victim:
        targets = [victim.grpc, servers[0].grpc]
        expected = stream_all(servers[0].grpc, lambda: None)
        assert all(len(token_ids) == LONG.max_tokens for token_ids, _ in expected)
        with front_process(tiny_model, tmp_path / "front", targets) as front:
            until(lambda: (tmp_path / "front").read_text().count(" serves") >= 2)
            found = stream_all(front.grpc, lambda: os.kill(victim.popen.pid, how))
            if how is signal.SIGSTOP:
                os.kill(victim.popen.pid, signal.SIGCONT)
            assert found == expected
            assert answers(front.grpc) == answers(servers[0].grpc)
        assert "Traceback" not in (tmp_path / "front").read_text()


def test_without_any_server_clients_are_told_to_come_back(
    tiny_model: Path, server_process: ServerProcess, tmp_path: Path
) -> None:
    args = ("--model", str(tiny_model), *TINY_ARGS)
    with (
        server_process(*args, log=tmp_path / "only") as only,
        front_process(tiny_model, tmp_path / "front", [only.grpc]) as front,
        OctavoClient(front.grpc, retry=None) as client,
    ):
        assert client.generate(PROMPTS[0], GREEDY).finished
        only.popen.kill()

        def is_refused() -> bool:
            try:
                client.generate(PROMPTS[0], GREEDY, timeout_s=TIMEOUT_S)
            except OverloadedError:
                return True
            except OctavoError:
                return False
            return False

        until(is_refused)


@pytest.mark.parametrize("target", ["nowhere", "host:0", "host:99999", "x:1"])
def test_addresses_that_are_none_are_refused(target: str) -> None:
    from octavo.server.cli.main import main

    targets = [target, "x:1"] if target == "x:1" else [target]
    words = [word for each in targets for word in ("--backend", each)]
    assert main(["route", "--model", "m", *words]) == 2


def test_servers_come_and_go_by_a_file(
    tiny_model: Path, servers: list[Process], tmp_path: Path
) -> None:
    """Who is named no more ends what it has and takes nothing new; who is named anew takes part."""
    first, second = (server.grpc for server in servers)
    listed, log = tmp_path / "servers", tmp_path / "log"
    listed.write_text(f"# of this front\n{first}\n")
    told: list[int] = []
    with (
        front_process(tiny_model, log, [f"file:{listed}"]) as front,
        OctavoClient(front.grpc) as client,
        OctavoClient(first) as one,
        OctavoClient(second) as other,
    ):

        def read() -> None:
            for output in client.stream(PROMPTS[0], LONG):
                told.extend(output.outputs[0].token_ids)

        def tokens(of: OctavoClient) -> int:
            return of.load().generation_tokens

        reader = threading.Thread(target=read)
        reader.start()
        until(lambda: told)
        listed.write_text(f"{second}\n")
        until(lambda: f"{second} serves" in log.read_text())
        until(lambda: f"{first} is no server of this front" in log.read_text())
        before = tokens(other)
        client.generate(PROMPTS[1], GREEDY)
        assert tokens(other) == before + 40
        reader.join()
        assert len(told) == 400
        listed.write_text(f"{first}\n{second}\n")
        until(lambda: log.read_text().count(f"{first} serves") == 2)
        before = tokens(one)
        until(lambda: client.generate(PROMPTS[2], GREEDY) and tokens(one) > before)
        listed.write_text("nonsense\n")  # it says what it said last
        until(lambda: "is not allowed" in log.read_text())
        assert client.generate(PROMPTS[3], GREEDY).finished
    assert "Traceback" not in log.read_text()


def test_a_front_knows_a_folder_of_one_gguf_file_as_that_file(tmp_path: Path) -> None:
    file, kind = locate("smollm2-135m")
    (tmp_path / file.name).symlink_to(file)
    config, tokenizer = _read_model(str(tmp_path))
    assert kind == "gguf"
    assert (config, tokenizer.vocab_size) == (load_config(file), config.vocab_size)
