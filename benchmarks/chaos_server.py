"""`octavo serve` that hurts its own replicas when told, also while pages move between them.

    python -m benchmarks.chaos_server SERVE'S OPTIONS

Each line of standard input is an order, and a line of standard output says that it was carried out,
or why not:

- `kill REPLICA`, `stop REPLICA SECONDS`: its process;
- `hold REPLICA SECONDS`: nothing passes between it and this process;
- `moving kill|stop REPLICA SECONDS`, `moving twice`, `moving lose`: as soon as pages of a request
  that moves come by, to that replica, or to those pages;
- `check`: that every page and row is accounted for, while nothing is under way.

A replica that was hurt serves again, in the same life or in another, when its order is done.

Steps are paced, as those of `faulty_server --paced`. Every prompt is
computed apart from decoding where there are roles, so that every request moves. Replicas are
started again however often they die.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.chaos_worker import pace
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.replicas import messages, replica
from octavo.engine.replicas.moves import MovePrices
from octavo.engine.replicas.placement import Placement
from octavo.engine.replicas.replica_group import ReplicaGroup
from octavo.server.cli.main import main

ORDER_S = 60.0
BOOT = replica.BOOT.replace(
    "main(int",
    f"sys.path.append({str(Path(__file__).parents[1])!r})\n"
    "from benchmarks.chaos_worker import pace_worker\npace_worker()\nmain(int",
)

gates: dict[str, threading.Event] = {}
"""Whether anything passes to and from a replica, by its index."""
waiting: deque[tuple[list[str], threading.Event]] = deque()
"""Orders for the next pages that come by, and what is set once they are carried out."""


class GatedConnection(Connection):
    """A connection to a replica, used in a thread whose name ends in its index."""

    def recv(self) -> Any:
        """A message, once it may pass."""
        message = super().recv()
        self._gate().wait()
        return message

    def send_bytes(self, *args: Any) -> None:
        """Sends once that may pass."""
        self._gate().wait()
        super().send_bytes(*args)

    def _gate(self) -> threading.Event:
        return gates[threading.current_thread().name.rpartition("-")[2]]


_whole_take_pages = Placement.take_pages


def take_pages(placement: Placement, given: messages.PagesGiven, where: tuple[int, int]) -> None:
    """As of `Placement`, but for what was ordered."""
    live = placement._live.get(given.request_id)
    is_moving = live is not None and live.move is not None and live.where == where
    if given.batch is None or not is_moving or not waiting:
        _whole_take_pages(placement, given, where)
        return
    (kind, *rest), done = waiting.popleft()
    if kind in ("kill", "stop"):
        hurt(placement._replicas, kind, *rest)
    for _ in range({"lose": 0, "twice": 2}.get(kind, 1)):
        _whole_take_pages(placement, given, where)
    done.set()


def hurt(replicas: Any, kind: str, index: str, seconds: str = "0") -> None:
    """Kills a replica's process, stops it for so long, or lets nothing pass for so long."""
    process = replicas[int(index)].process
    if kind == "hold":
        gates[index].clear()
        threading.Timer(float(seconds), gates[index].set).start()
    elif kind == "stop":
        process.send_signal(signal.SIGSTOP)
        threading.Timer(float(seconds), process.send_signal, (signal.SIGCONT,)).start()
    else:
        process.send_signal(signal.SIGKILL)


def obey(engine: Any, words: list[str]) -> None:
    """Carries out an order.

    Raises:
        TimeoutError: it could not be in time, or a replica does not serve again.
    """
    if words[0] == "check":
        engine.check_integrity()
        return
    lives = [each.life for each in engine.replicas]
    if is_moving := words[0] == "moving":
        waiting.append((words[1:], done := threading.Event()))
        if not done.wait(ORDER_S):
            waiting.clear()
            raise TimeoutError("no pages came by")
    else:
        hurt(engine.replicas, *words)
    kind, *rest = words[is_moving:]
    if not rest:
        return
    hurt_one, begun_s, for_s = engine.replicas[int(rest[0])], time.monotonic(), float(rest[-1])

    def is_over() -> bool:
        is_another = hurt_one.life > lives[hurt_one.index]
        return is_another or (kind != "kill" and time.monotonic() > begun_s + for_s)

    while not (is_over() and hurt_one.ready and not hurt_one.is_quiet):
        if time.monotonic() > begun_s + ORDER_S:
            raise TimeoutError(f"replica {hurt_one.index} did not come back")
        time.sleep(0.05)


def listen(engine: Any) -> None:
    """Takes orders until standard input ends."""
    # Unbuffered: a thread in a buffer of standard input would break the end of the process.
    for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115
        try:
            obey(engine, line.decode().split())
            print("done", flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


_whole_init = AsyncEngine.__init__


def init(self: AsyncEngine, *args: Any, **kwargs: Any) -> None:
    """As of `AsyncEngine`; then orders are taken."""
    _whole_init(self, *args, **kwargs)
    if not isinstance(self.engine, ReplicaGroup) and "--num-hosts" not in sys.argv:
        pace(self.engine)
    threading.Thread(target=listen, args=(self.engine,), daemon=True).start()


if __name__ == "__main__":
    for index in range(16):
        gates[str(index)] = threading.Event()
        gates[str(index)].set()
    replica.BOOT, replica.MAX_DEATHS = BOOT, 1_000_000
    replica.Connection = GatedConnection  # type: ignore[attr-defined]
    MovePrices.is_better_apart = lambda *_: True  # type: ignore[method-assign]
    Placement.take_pages = take_pages  # type: ignore[method-assign]
    AsyncEngine.__init__ = init  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
