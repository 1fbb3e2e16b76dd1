"""A real server process over two replicas: its clients notice nothing, whichever process dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from octavo.client import OctavoClient, SamplingParams
from tests.waiting import until

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
WAIT_S = 60.0
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

pytestmark = pytest.mark.skipif(NUM_CORES < 2, reason="replicas want a core each")
Start = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def served(
    server_process: Start, tiny_model: Path, tiny_args: tuple[str, ...], tmp_path: Path
) -> Iterator[Any]:
    args = ("--model", str(tiny_model), *tiny_args, "--data-parallel-size", "2")
    with server_process(*args, log=tmp_path / "stderr") as process:
        yield process


def replicas_of(process_id: int) -> list[int]:
    """Processes of replicas that this one started; what renders its chats is none."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
            command = entry.with_name("cmdline").read_bytes()
        except OSError:
            continue  # it ended
        is_replica = b"octavo.engine.replicas.worker" in command
        if int(fields[1]) == process_id and fields[0] != "Z" and is_replica:
            found.append(int(entry.parent.name))
    return sorted(found)


def streams(address: str, count: int, on_first: Callable[[], None] = lambda: None) -> list[str]:
    """Texts of so many streams at once; `on_first` is called when the first of them has begun."""
    texts, begun = [""] * count, threading.Event()

    def read(index: int) -> None:
        with OctavoClient(address) as client:
            for output in client.stream(f"prompt {index}", LONG):
                texts[index] += output.outputs[0].text
                begun.set()

    threads = [threading.Thread(target=read, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    assert begun.wait(WAIT_S)
    on_first()
    for thread in threads:
        thread.join(WAIT_S)
    return texts


def test_clients_notice_nothing_of_a_replica_that_dies(served: Any, live: Any) -> None:
    expected = streams(live.grpc, 4)  # of a server with one engine
    replicas = replicas_of(served.popen.pid)
    assert len(replicas) == 2
    assert streams(served.grpc, 4) == expected
    assert streams(served.grpc, 4, lambda: os.kill(replicas[0], signal.SIGKILL)) == expected
    until(
        lambda: (
            len(replicas_of(served.popen.pid)) == 2
            and replicas[0] not in replicas_of(served.popen.pid)
        )
    )
    died = r"replica [01] died \(its process was ended by SIGKILL\): starting it again"
    assert len(re.findall(died, served.stderr.read_text())) == 1

    body = {
        "model": "tiny",
        "prompt": "prompt 1",
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{served.http}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["choices"][0]["text"] == expected[1]

    def num_running() -> float:
        with urllib.request.urlopen(f"{served.http}/metrics") as answer:
            found = re.search(
                r"^octavo:num_requests_running\S* (\S+)$", answer.read().decode(), re.M
            )
        assert found is not None
        return float(found[1])

    until(lambda: num_running() == 0)
    with OctavoClient(served.grpc) as client:
        load = client.load()
        assert load.num_total_pages == 2 * 159  # of each, all but the trash page
        info = client.server_info()
        assert (info.platform, info.engine_args["data_parallel_size"]) == ("cpu", "2")


def test_a_signal_to_all_processes_drains(served: Any) -> None:
    replicas = replicas_of(served.popen.pid)

    def end_all() -> None:  # as a service manager does, or a terminal's Ctrl-C
        for process_id in (*replicas, served.popen.pid):
            os.kill(process_id, signal.SIGTERM)

    texts = streams(served.grpc, 4, end_all)
    assert all(len(text) > 100 for text in texts)
    assert served.ended() == 0
    until(lambda: not any(Path(f"/proc/{replica}").exists() for replica in replicas))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--record", "log.jsonl"), "record = 'log.jsonl' is not allowed: given with"),
        (("--otlp-traces-endpoint", "http://127.0.0.1:9"), "otlp_traces_endpoint = "),
        (("--profile-dir", "profiles"), "profile_dir = 'profiles' is not allowed: given with"),
    ],
)
def test_what_watches_steps_is_refused(
    tiny_model: Path, tiny_args: tuple[str, ...], arguments: tuple[str, ...], message: str
) -> None:
    command = [
        *(sys.executable, "-m", "octavo.server.cli.main", "serve", "--quiet", "--grpc-port", "0"),
        *("--model", str(tiny_model), *tiny_args, "--data-parallel-size", "2", *arguments),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
