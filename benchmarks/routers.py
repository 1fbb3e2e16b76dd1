"""Routers that nobody here wrote, each in front of two live servers of ours.

    python -m benchmarks.routers --bin .venv-routers/bin

A small random model is served by two `octavo serve`. `smg`, `sglang-router` and `vllm-router`, in
an environment of their own, spread chats and completions over them, whole and as streams. What a
client gets through a router must be what it gets from a server directly: the same text, the same
reason to end, the same usage. Both servers must have had requests.

`smg` speaks to the servers over HTTP and, in a second round, over gRPC. There it renders, tokenizes
and makes text itself, with the tokenizer that a server gives it; so its token ids are compared,
too. A request whose client has left must end at the server. With its policy `cache_aware` a prompt
must go to the server whose prefix cache holds it, though it came there another way.
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
from typing import Any, NamedTuple

from benchmarks.tiny_server import Server, serving, write_tiny_model
from octavo.client import OctavoClient, SamplingParams


class Router(NamedTuple):
    """How one is started, and what it speaks to its servers."""

    command: tuple[str, ...]
    is_grpc: bool = False


# By its module: sglang-router's package has a command `smg`, too, and the last one installed stays.
SMG = ("python", "-m", "smg", "launch")
ROUTERS = {
    "smg": Router(SMG),
    "smg-grpc": Router(SMG, is_grpc=True),
    "sglang-router": Router(("sglang-router", "launch")),
    "vllm-router": Router(("vllm-router",)),
}
START_TIMEOUT_S = 60.0
"""Until a router takes requests for both of its servers."""
STOP_TIMEOUT_S = 10.0
NUM_PROMPTS = 4
"""Of each kind; their beginnings differ, so that a router that looks at them spreads them too."""
CACHE_NEWS_S = 1.0
"""In which a router must know what came into a server's prefix cache."""
ABORT_TIMEOUT_S = 10.0
"""In which a server must have ended what nobody reads any more."""


def asks(number: int) -> dict[str, dict[str, Any]]:
    """Bodies by route; every other one is sampled."""
    temperature = 0.8 * (number % 2)
    common = {"model": "tiny", "temperature": temperature, "max_tokens": 12, "seed": number}
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


def requests_of(server: Server, reason: str = "") -> int:
    """Requests that a server has ended; with a reason, those that ended so."""
    with urllib.request.urlopen(f"{server.http}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        round(float(line.split()[-1]))
        for line in lines
        if line.startswith("octavo:request_success_total") and reason in line
    )


def problems(router: str, servers: list[Server], *, is_grpc: bool) -> list[str]:
    """What differs through a router, and from servers that had nothing to do."""
    before = [requests_of(server) for server in servers]
    first, found = servers[0], []
    for number in range(NUM_PROMPTS):
        for route, body in asks(number).items():
            for stream in (False, True):
                kind = f"{route}{' (stream)' if stream else ''}, prompt {number}"
                try:
                    through = said(router + route, body, stream)
                except (RuntimeError, OSError, ValueError, AssertionError, KeyError) as error:
                    found.append(f"{kind}: {type(error).__name__}: {error}")
                    continue
                direct = said(first.http + route, body, stream)
                if is_grpc:  # smg leaves a character out that a text ends within
                    through, direct = (
                        (text.rstrip("\ufffd"), *rest) for text, *rest in (through, direct)
                    )
                if through != direct:
                    found.append(f"{kind}: {through!r}, directly {direct!r}")
    direct_to = [NUM_PROMPTS * 4 if server is first else 0 for server in servers]
    for server, had, own in zip(servers, before, direct_to, strict=True):
        if not found and requests_of(server) - had <= own:
            found.append(f"nothing came to {server.http}")
    return found


def token_problems(router: str, server: Server) -> list[str]:
    """What differs in token ids through a router that tells them (`/generate`)."""
    found = []
    with OctavoClient(server.grpc) as client:
        for number in range(NUM_PROMPTS):
            text = f"{number} times {number} is"
            params = {"temperature": 0, "max_new_tokens": 16}
            body = {"model": "tiny", "text": text, "sampling_params": params}
            [answer] = json.loads(post(f"{router}/generate", body))
            direct = client.generate(text, SamplingParams(temperature=0, max_tokens=16)).outputs[0]
            if answer["output_ids"] != direct.token_ids:
                ids = f"{answer['output_ids']}, directly {direct.token_ids}"
                found.append(f"/generate, prompt {number}: {ids}")
    return found


PRINT_FIELDS = """
import json
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
def fields(message):
    label = lambda field: (field.number, field.type, field.is_repeated, field.has_presence)
    return {field.name: label(field) for field in message.fields}
found = {}
for file in (common_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR):
    found |= {each.full_name: fields(each) for each in file.message_types_by_name.values()}
    for service in file.services_by_name.values():
        for method in service.methods:
            names = method.input_type.full_name, method.output_type.full_name
            streams = method.client_streaming, method.server_streaming
            found[method.full_name] = {"types": [*names, *streams]}
print(json.dumps(found))
"""
"""Prints messages and methods as smg has them; for the router's Python."""


def proto_problems(bin_folder: Path) -> list[str]:
    """Messages and methods of ours that are not smg's own."""
    script = PRINT_FIELDS
    theirs = json.loads(
        subprocess.run(
            [bin_folder / "python", "-c", script], capture_output=True, check=True
        ).stdout
    )
    module = "octavo.server.proto.smg"
    script = script.replace("smg_grpc_proto.generated", module)
    ours = json.loads(
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    )
    found = []
    for name, fields in ours.items():
        for field, facts in fields.items():
            if (known := theirs.get(name, {}).get(field)) != facts:
                found.append(f"{name}.{field}: {facts}, of smg {known}")
    return found


def cache_problems(router: str, servers: list[Server]) -> list[str]:
    """Prompts that go elsewhere than to the server that holds them."""
    found = []
    for number in range(2 * NUM_PROMPTS):
        owner = servers[number % 2]
        text = f"{number} times {number} is a number. " * 8
        with OctavoClient(owner.grpc) as client:
            client.generate(text, SamplingParams(temperature=0, max_tokens=1))
        time.sleep(CACHE_NEWS_S)
        before = requests_of(owner)
        post(f"{router}/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 1})
        if requests_of(owner) == before:
            found.append(f"prompt {number} did not go to {owner.grpc}, which holds it")
    return found


def abort_problems(router: str, servers: list[Server]) -> list[str]:
    """Whether a server goes on with what a client asked for that has left."""
    before = sum(requests_of(server, "cancelled") for server in servers)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"{router}/v1/completions", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
    end_s = time.monotonic() + ABORT_TIMEOUT_S
    while time.monotonic() < end_s:
        if sum(requests_of(server, "cancelled") for server in servers) > before:
            return []
        time.sleep(0.1)
    return [f"a request whose client had left ran on for {ABORT_TIMEOUT_S:g} s, or to its end"]


@contextlib.contextmanager
def routing(
    command: list[str], workers: list[str], log: Path, policy: str = "round_robin"
) -> Iterator[str]:
    """A router's URL, from when it takes requests until the block's end.

    Raises:
        RuntimeError: it did not start; carries the end of its log.
    """
    port, metrics_port = free_port(), free_port()
    command = list(command)
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
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
        workers: list[Server] = []
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = write_tiny_model(Path(folder))
            workers.append(
                stack.enter_context(serving(model, ("--warm-up", "coarse", "--kv-events")))
            )
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, ((program, *first), is_grpc) in ROUTERS.items():
            if args.only not in (None, name):
                continue
            begun_s = time.monotonic()
            urls = [f"grpc://{each.grpc}" if is_grpc else each.http for each in workers]
            try:
                command = [str(args.bin / program), *first]
                with routing(command, urls, scratch / f"{name}.log") as url:
                    found = problems(url, workers, is_grpc=is_grpc)
                    if is_grpc:
                        found += proto_problems(args.bin)
                        found += token_problems(url, workers[0])
                        found += abort_problems(url, workers)
                if is_grpc:
                    log = scratch / f"{name}-cache.log"
                    with routing(command, urls, log, "cache_aware") as url:
                        found += cache_problems(url, workers)
            except RuntimeError as error:
                found = [str(error)]
            told = "\n  ".join(found) or "the same tokens as directly, from both servers"
            print(f"{name}: {told} ({time.monotonic() - begun_s:.0f} s)", flush=True)
            wrong += found
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
