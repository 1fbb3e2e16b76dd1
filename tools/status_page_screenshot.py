"""Draws docs/status-page.png: the status page of a live server under load, in headless Chromium.

    PYTHONPATH=src:. python tools/status_page_screenshot.py docs/status-page.png

The page runs in real time (Chromium is driven over its debugging pipe), so that its rates are true.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.tiny_server import serving, write_tiny_model

WATCH_S = 40.0
TARGETS = {"x-slo-ttft-ms": "600", "x-slo-tpot-ms": "60"}
SIZE = {"width": 1060, "height": 1160, "deviceScaleFactor": 1, "mobile": False}


class Browser:
    """Chromium, over its debugging pipe: one JSON message after another, each ended by a NUL."""

    def __init__(self, profile: str) -> None:
        names = ("chromium", "google-chrome", "chromium-headless-shell")
        path = next(filter(None, map(shutil.which, names)), None)
        assert path is not None, "Chromium is not installed"
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        redirect = f'exec "$@" 3<&{from_us} 4>&{to_us}'
        self._popen = subprocess.Popen(
            ["bash", "-c", redirect, "bash", *command], pass_fds=(from_us, to_us),
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(from_us)
        os.close(to_us)
        self._write, self._read = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb", 0)
        self._buffer = b""
        self._number = 0

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += self._read.read(1 << 16)
            raw, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == self._number:
                result: dict[str, Any] = answer["result"]
                return result

    def close(self) -> None:
        """Ends the process."""
        self._popen.kill()
        self._popen.wait()


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
            target = browser.call("Target.createTarget", url=f"{server.http}/")["targetId"]
            session = browser.call("Target.attachToTarget", targetId=target, flatten=True)
            name = session["sessionId"]
            browser.call("Emulation.setDeviceMetricsOverride", name, **SIZE)
            time.sleep(WATCH_S)
            picture = browser.call("Page.captureScreenshot", name, format="png")["data"]
            browser.close()
    out.write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
