"""Processes that render chat templates, so that no template costs more than its own answer.

A template is a program that came with a model, over words that a client chose: it may loop for
hours or ask for gigabytes. The program `python -m octavo.server.chat_workers FD` compiles one and
forks workers that render it, each with a limit of its processor time and its memory that the kernel
keeps. Who goes beyond ends, and with it the one answer that it worked on; another is forked in its
place; so it is if the server closes a call. They end with the server, whose end of the control
socket FD closes.

The server sends a setup over the control socket, then one socket for each chat: whichever worker is
free takes it, reads what to render, writes the text, and closes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import marshal
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.engine.errors import InvalidRequestError, ModelLoadError, shorten
from octavo.engine.text.chat_template import ChatTemplate, template_of_request

NUM_WORKERS = 4
CPU_S = 0.5
"""Processor time in which a chat must be rendered."""
WALL_S = 10.0
"""In which it must be however busy the machine is."""
MEMORY_BYTES = 256 * 1024 * 1024
"""Of address space that rendering may take."""
MAX_RENDERED_CHARS = 16 * 1024 * 1024
COMPILE_CPU_S = 2.0
"""For the model's own template, once."""
NICENESS = 5
LENGTH = struct.Struct("<Q")
TEXT, INVALID, BROKEN = b"T", b"I", b"B"
"""How an answer begins: the text; a request that the template refuses; a template that is none."""

BEYOND = f"what its chat template renders within {CPU_S:g} s and {MEMORY_BYTES >> 20} MiB"


def main() -> None:
    """Compiles and forks; ends when the server does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the server's to act on
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = marshal.loads(read_frame(control))
    template = _compiled(setup["source"], setup["named_tokens"])
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    while True:
        while len(workers) < NUM_WORKERS:
            pid = os.fork()
            if pid == 0:
                _work(control, template, setup["named_tokens"])
            workers.add(pid)
        pid, status = os.wait()
        workers.discard(pid)
        if status == 0:  # the server has closed its end
            return


def _compiled(source: str, named_tokens: Mapping[str, str]) -> ChatTemplate | ModelLoadError:
    """The template, compiled where it cannot do harm before it is compiled here."""
    pid = os.fork()
    if pid == 0:
        _limit(COMPILE_CPU_S)
        _try_compile(source, named_tokens)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        return ModelLoadError("the chat template does not compile within its limits")
    return _try_compile(source, named_tokens)


def _try_compile(source: str, named_tokens: Mapping[str, str]) -> ChatTemplate | ModelLoadError:
    try:
        return ChatTemplate(source, named_tokens)
    except ModelLoadError as error:
        return error


def _work(
    control: socket.socket, template: ChatTemplate | ModelLoadError, named_tokens: Mapping[str, str]
) -> None:
    """Renders one chat after another; never returns."""
    soft = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
    while True:
        token, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not token:
            os._exit(0)
        with socket.socket(fileno=sockets[0]) as call:
            try:
                request = marshal.loads(read_frame(call))
                _end_with(call)
            except EOFError:
                continue  # its client has left
            _limit(CPU_S)
            kind, answer, is_spent = _answer(template, named_tokens, request)
            fcntl.fcntl(call, fcntl.F_SETFL, 0)
            with contextlib.suppress(OSError):
                call.sendall(kind + LENGTH.pack(len(answer)) + answer)
        _limit(0)
        if is_spent:
            os._exit(1)


def _end_with(call: socket.socket) -> None:
    """Lets the kernel end the process (SIGIO) as soon as the server closes its end of the call.

    Raises:
        EOFError: it has done so.
    """
    fcntl.fcntl(call, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(call, fcntl.F_SETFL, os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not call.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            raise EOFError


def _limit(cpu_s: float) -> None:
    """Ends the process, by the kernel's hand, once it has computed for so long; 0 sets no limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_S if cpu_s else 0)


def _answer(
    template: ChatTemplate | ModelLoadError,
    named_tokens: Mapping[str, str],
    request: dict[str, Any],
) -> tuple[bytes, bytes, bool]:
    """How it begins, what follows, and whether the process had better end."""
    try:
        if request["template"] is not None:
            template = template_of_request(request["template"], named_tokens)
        if isinstance(template, ModelLoadError):
            return BROKEN, str(template).encode("utf-8", "replace"), False
        text = template.render(request["messages"], **request["names"])
        if len(text) > MAX_RENDERED_CHARS:
            given, allowed = f"{len(text)} characters", f"at most {MAX_RENDERED_CHARS}, rendered"
            raise InvalidRequestError("messages", given, allowed)
        return TEXT, text.encode("utf-8", "surrogatepass"), False
    except InvalidRequestError as error:
        allowed, is_spent = error.allowed, isinstance(error.__cause__, MemoryError)
        fields = [error.field, shorten(error.value), BEYOND if is_spent else allowed]
        return INVALID, json.dumps(fields).encode(), is_spent
    except MemoryError:
        return INVALID, json.dumps(["messages", "this", BEYOND]).encode(), True


def read_frame(connection: socket.socket) -> bytes:
    """What comes next, behind its length.

    Raises:
        EOFError: the other side has closed before its end.
    """
    return _read(connection, LENGTH.unpack(_read(connection, LENGTH.size))[0])


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _address_space() -> int:
    """Bytes of it that this process has now; where it is not told, what was resident at most."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
