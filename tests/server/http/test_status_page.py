"""The page that a person looks at."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

NAMES = ("chromium", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def test_the_page_loads_nothing_from_anywhere(live):
    answer = httpx.get(live.http + "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)\S+""", answer.text)
    assert "http" not in answer.text.replace("http-equiv", "")
    assert "innerHTML" not in answer.text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_the_load(live):
    body = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True, "priority": "high"}
    for _ in range(3):
        httpx.post(f"{live.http}/v1/completions", json=body, timeout=60)
    done = _chromium(live, "--virtual-time-budget=7000", "--dump-dom")
    page = done.stdout
    assert 'id="state" class="ready">ready<' in page
    assert 'id="model">tiny<' in page
    assert 'id="running">0<' in page
    assert "of 159 held" in page
    for word in ("realtime", "first token", "each token", "again"):
        assert f"{word}<" in page
    assert re.search(r"<td>length</td><td>\d+</td>", page)
    assert re.search(r"<td>refused: overloaded</td><td>\d+</td>", page)
    for name in ("rates", "busies", "step-times"):
        assert re.search(rf'<polyline id="{name}"[^>]* points="[\d., ]+"', page)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_draws_the_page(live, tmp_path):
    picture = tmp_path / "page.png"

    def ask(number: int) -> None:
        body = {"prompt": f"{number} ", "max_tokens": 200, "ignore_eos": True, "user": "someone"}
        body["priority"] = ("realtime", "high", "normal", "low")[number % 4]
        httpx.post(f"{live.http}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(12)]
        _chromium(
            live, "--virtual-time-budget=20000", f"--screenshot={picture}", "--window-size=1060,900"
        )
        for future in asked:
            future.cancel()
    raw = picture.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", raw[16:24]) == (1060, 900)
    assert len(raw) > 20_000, "hardly anything was drawn"


def _chromium(live, *options: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--enable-logging=stderr", *options, live.http + "/"),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    return done
