"""A process that compiles an engine's programs, so that all that compiling took ends with it.

Compiling a program of thirty layers in the server's own process leaves some 16 MB of heap in pieces
that nothing larger fits into, and tracing it holds the interpreter that steps wait for. The process
is told what the engine's executor is made of, makes one without weights or state, and leaves each
program that it is asked for in the program store, from where the server loads it, as a later start
would. It says so if its programs would be other ones: it then answers nothing, and the server
compiles for itself.

The process ends with the server, whose end of the socket closes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax

import octavo
from octavo.engine.execution.host_memory import give_back_freed_memory
from octavo.engine.execution.programs.compile_manager import CompileManager, Left
from octavo.engine.execution.step_spec import StepShape
from octavo.pallas_kernels.compat import jax_settings

logger = logging.getLogger(__name__)

BOOT = """\
import sys
sys.path.append(sys.argv[1])
from octavo.engine.execution.programs.program_maker import main
main(int(sys.argv[2]))
"""
"""What the process runs: it finds this package wherever this process did."""
NICENESS = 10
CLOSE_S = 5.0
"""For the process to finish writing a program down, before it is killed."""


class ProgramMaker:
    """The process, as its server sees it; started when first asked. `make` is for one thread.

    Args:
        arguments: of the `DeviceExecutor` to make there; weights as `jax.ShapeDtypeStruct`s.
        identity: of the program store that it must have (`ProgramStore.identity`).
    """

    def __init__(self, arguments: Mapping[str, Any], identity: str) -> None:
        self._arguments = arguments
        self._identity = identity
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_over = False

    def make(self, shape: StepShape) -> Left | None:
        """Has a program compiled and left in the store; None if the process did not do it."""
        try:
            connection = self._opened()
            if connection is None:
                return None
            connection.send(shape)
            left, why = connection.recv()
        except Exception as error:  # of pickling, of the system, of a process that died
            if not self._is_over:
                logger.warning("programs are compiled in the server's own process: %r", error)
            self.close()
            return None
        if why:
            logger.info("%s is not compiled apart: %s", shape, why)
        assert left is None or isinstance(left, Left)
        return left

    @property
    def process_id(self) -> int | None:
        """Of its process; None while there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Ends the process, whatever it is compiling; nothing is made any more."""
        with self._lock:
            self._is_over = True
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is None or connection is None:
            return
        # Closing it would not wake up who reads it.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _opened(self) -> Connection | None:
        """The way to the process, which is started if need be; None once it is over."""
        with self._lock:
            if self._is_over or self._connection is not None:
                return self._connection
            # The settings come first: what follows names devices, which they decide.
            setup = pickle.dumps((_settings(), self._identity, dump(dict(self._arguments))))
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-c", BOOT),
                        *(str(Path(octavo.__file__).parent.parent), str(theirs.fileno())),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            connection = self._connection = Connection(ours.detach())
        connection.send_bytes(setup)
        why = connection.recv()
        if why:
            raise ValueError(why)
        return connection


def _settings() -> dict[str, Any]:
    """JAX's settings that are plain values; whether others differ, the store's identity tells."""
    plain = (bool, int, float, str)
    return {
        name: value
        for name, value in jax_settings().items()
        if value is None or isinstance(value, plain)
    }


def dump(value: Any) -> bytes:
    """Pickles what may name devices of this process; they are named by their place."""
    places = {device: place for place, device in enumerate(jax.devices())}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return places.get(obj) if isinstance(obj, jax.Device) else None

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def load(data: bytes) -> Any:
    """What `dump` made, with this process's devices; trusted, as it is code."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> jax.Device:
            return jax.devices()[pid]

    return Unpickler(io.BytesIO(data)).load()


def main(descriptor: int) -> None:
    """Makes programs until the server closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the server's to act on
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    connection, shapes, writing = Connection(descriptor), SimpleQueue[StepShape](), threading.Lock()
    setup = connection.recv_bytes()

    def listen() -> None:
        try:
            while True:
                shapes.put(connection.recv())
        except (EOFError, OSError):
            with writing:
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(OSError):  # the server may leave at any time
        try:
            programs = _programs(setup)
        except Exception as error:
            connection.send(str(error) or repr(error))
            return
        connection.send("")
        while True:
            left, why = None, ""
            try:
                left = programs.leave(shapes.get(), writing)
            except Exception as error:
                why = repr(error)
            connection.send((left, why))
            give_back_freed_memory()


def _programs(setup: bytes) -> CompileManager:
    """What compiles the server's programs.

    Raises:
        ValueError: here they would be other ones.
    """
    settings, identity, rest = pickle.loads(setup)
    for name, value in settings.items():
        if getattr(jax.config, name, None) != value:
            with contextlib.suppress(Exception):  # what it then is, the identity tells
                jax.config.update(name, value)
    from octavo.engine.execution.executor import DeviceExecutor

    executor = DeviceExecutor(**load(rest))
    if executor.store is None or executor.store.identity != identity:
        raise ValueError("the process for them would compile other ones")
    return executor.programs
