"""Draws docs/status-page.png: the status page of a live server under load, in headless Chromium.

    PYTHONPATH=src:. python tools/status_page_screenshot.py docs/status-page.png

The page runs in real time (Chromium is driven over its debugging pipe), so that its rates are true.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.tiny_server import serving, write_tiny_model
from tests.browser import Browser

WATCH_S = 40.0
TARGETS = {"x-slo-ttft-ms": "600", "x-slo-tpot-ms": "60"}
SIZE = {"width": 1060, "height": 1160}


@contextlib.contextmanager
def load(url: str, clients: int = 22) -> Iterator[None]:
    """Requests of every class meanwhile."""
    ended = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=url, timeout=120) as http:
            while not ended.is_set():
                body = {
                    "prompt": "".join(chr(rng.randrange(97, 123)) for _ in range(60)),
                    "max_tokens": rng.randrange(40, 250), "ignore_eos": True, "stream": True,
                    "priority": ("realtime", "high", "normal", "low")[number % 4],
                }  # fmt: skip
                with http.stream("POST", "/v1/completions", json=body, headers=TARGETS) as answer:
                    for _ in answer.iter_raw():
                        pass
                ended.wait(rng.expovariate(2.0))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def main(out: Path) -> None:
    """Draws the picture."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as profile:
        model = write_tiny_model(Path(folder))
        program = ("benchmarks.faulty_server",)
        with serving(model, ("--paced",), program) as server, load(server.http):
            browser = Browser(profile)
            page = browser.open(f"{server.http}/", **SIZE)
            time.sleep(WATCH_S)
            picture = page.picture()
            browser.close()
    out.write_bytes(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
