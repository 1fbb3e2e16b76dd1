"""Routers that nobody here wrote, each in front of two live servers of ours.

    python -m benchmarks.routers --bin .venv-routers/bin

A small random model is served by two `octavo serve`. `smg`, `sglang-router` and `vllm-router`, in
an environment of their own, spread chats and completions over them, whole and as streams. What a
client gets through a router must be what it gets from a server directly: the same text, the same
reason to end, the same usage. Both servers must have had requests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tiny_server import serving, write_tiny_model

ROUTERS = {
    "smg": ("smg", "launch"),
    "sglang-router": ("sglang-router", "launch"),
    "vllm-router": ("vllm-router",),
}
START_TIMEOUT_S = 60.0
"""Until a router takes requests for both of its servers."""
STOP_TIMEOUT_S = 10.0
NUM_PROMPTS = 4
"""Of each kind; their beginnings differ, so that a router that looks at them spreads them too."""


def asks(number: int) -> dict[str, dict[str, Any]]:
    """Bodies by route."""
    common = {"model": "tiny", "temperature": 0, "max_tokens": 12, "seed": number}
    text = f"{number} times {number} is"
    return {
        "/v1/completions": common | {"prompt": text},
        "/v1/chat/completions": common | {"messages": [{"role": "user", "content": text}]},
    }


def post(url: str, body: dict[str, Any]) -> bytes:
    """The answer's body.

    Raises:
        RuntimeError: a status other than 200; carries what was answered.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read()[:500]!r}") from None


def said(url: str, body: dict[str, Any], stream: bool) -> tuple[str, str, int]:
    """Text, reason to end and generated tokens of one answer."""
    if not stream:
        answer = json.loads(post(url, body))
        [choice] = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return text, choice["finish_reason"], answer["usage"]["completion_tokens"]
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    lines = [line[6:] for line in post(url, body).splitlines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]", lines[-1:]
    parts = [json.loads(line) for line in lines[:-1]]
    choices = [choice for part in parts for choice in part["choices"]]
    text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    [usage] = [part["usage"] for part in parts if part.get("usage")]
    return text, choices[-1]["finish_reason"], usage["completion_tokens"]


def requests_of(url: str) -> int:
    """Requests that a server has ended."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        round(float(line.split()[-1]))
        for line in lines
        if line.startswith("octavo:request_success_total")
    )


def problems(router: str, workers: list[str]) -> list[str]:
    """What differs through a router, and from servers that had nothing to do."""
    before = [requests_of(url) for url in workers]
    found = []
    for number in range(NUM_PROMPTS):
        for route, body in asks(number).items():
            for stream in (False, True):
                kind = f"{route}{' (stream)' if stream else ''}, prompt {number}"
                try:
                    through = said(router + route, body, stream)
                except (RuntimeError, OSError, ValueError, AssertionError, KeyError) as error:
                    found.append(f"{kind}: {type(error).__name__}: {error}")
                    continue
                if through != (direct := said(workers[0] + route, body, stream)):
                    found.append(f"{kind}: {through!r}, directly {direct!r}")
    direct_to = [NUM_PROMPTS * 4 if url == workers[0] else 0 for url in workers]
    for url, had, own in zip(workers, before, direct_to, strict=True):
        if not found and requests_of(url) - had <= own:
            found.append(f"nothing came to {url}")
    return found


@contextlib.contextmanager
def routing(command: list[str], workers: list[str], log: Path) -> Iterator[str]:
    """A router's URL, from when it takes requests until the block's end.

    Raises:
        RuntimeError: it did not start; carries the end of its log.
    """
    port, metrics_port = free_port(), free_port()
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", *workers]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        )
    try:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not takes_requests(url):
            if popen.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"it did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield url
    finally:
        popen.terminate()
        try:
            popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


def takes_requests(url: str) -> bool:
    """Whether a router answers a completion."""
    try:
        post(f"{url}/v1/completions", asks(0)["/v1/completions"] | {"max_tokens": 1})
    except (RuntimeError, OSError):
        return False
    return True


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    """Runs from the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, required=True, help="folder of the routers' commands")
    parser.add_argument("--only", choices=ROUTERS, help="one of them")
    args = parser.parse_args()
    wrong = []
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = write_tiny_model(Path(folder))
            workers.append(stack.enter_context(serving(model, ("--warm-up", "coarse"))).http)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, (program, *first) in ROUTERS.items():
            if args.only not in (None, name):
                continue
            begun_s = time.monotonic()
            try:
                command = [str(args.bin / program), *first]
                with routing(command, workers, scratch / f"{name}.log") as url:
                    found = problems(url, workers)
            except RuntimeError as error:
                found = [str(error)]
            told = "\n  ".join(found) or "the same tokens as directly, from both servers"
            print(f"{name}: {told} ({time.monotonic() - begun_s:.0f} s)", flush=True)
            wrong += found
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
