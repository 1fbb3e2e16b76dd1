"""A headless Chromium to look at pages with."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from typing import Any

NAMES = ("chromium", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
WAIT_S = 30.0


class Browser:
    """Chromium, over its debugging pipe: one JSON message after another, each ended by a NUL."""

    def __init__(self, profile: str) -> None:
        assert CHROMIUM is not None, "Chromium is not installed"
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        command = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]
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
        self._write.close()
        self._read.close()

    def open(self, url: str, *, width: int, height: int, is_dark: bool = False) -> Page:
        """Opens a page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page


class Page:
    """An open page.

    Args:
        browser: whose.
        session: its name there.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the DevTools protocol."""
        return self._browser.call(method, self._session, **params)

    def ask(self, expression: str) -> Any:
        """The value of an expression of the page's."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Waits until an expression is true."""
        end_s = time.monotonic() + WAIT_S
        while not self.ask(expression):
            assert time.monotonic() < end_s, f"never true: {expression}"
            time.sleep(0.05)

    def picture(self) -> bytes:
        """What it looks like, as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
