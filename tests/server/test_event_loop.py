"""However many sockets are ready, a turn of the server's event loop handles a few of them."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading

import pytest

from octavo.server.event_loop import MOST_EVENTS, new_event_loop

NUM_SOCKETS = 200


@pytest.mark.skipif(sys.platform != "linux", reason="epoll is Linux's")
def test_sockets_that_are_ready_together_are_handled_a_few_a_turn_and_in_turns():
    async def scenario():
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(NUM_SOCKETS)]
        heard, turns = [], []
        for number, (ours, theirs) in enumerate(pairs):
            ours.setblocking(False)
            loop.add_reader(ours, heard.append, number)  # never read: ready in every turn
            theirs.send(b"x")
        while len(heard) < 3 * NUM_SOCKETS:
            before = len(heard)
            await asyncio.sleep(0)
            turns.append(len(heard) - before)
        for ours, theirs in pairs:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()
        assert 0 < max(turns) <= MOST_EVENTS
        assert set(heard[:NUM_SOCKETS]) == set(range(NUM_SOCKETS))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(scenario())


def test_the_loop_keeps_time_and_hears_other_threads():
    async def scenario():
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        threading.Thread(target=loop.call_soon_threadsafe, args=(told.set,)).start()
        async with asyncio.timeout(10):
            await told.wait()
        begun_s = loop.time()
        await asyncio.sleep(0.02)
        assert loop.time() - begun_s >= 0.02
        assert await loop.run_in_executor(None, sum, (1, 2)) == 3

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(scenario())
