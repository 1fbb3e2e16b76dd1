"""The page that a person looks at."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

NAMES = ("chromium", "google-chrome", "chromium-headless-shell")
PAGE = Path(__file__).parents[3] / "server" / "http" / "status_page.html"
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


def test_the_page_loads_nothing_from_anywhere(live):
    answer = httpx.get(live.http + "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    other = answer.text.replace('href="/chat"', "")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)\S+""", other)
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


class SlowServer(http.server.BaseHTTPRequestHandler):
    """The page, over a server with steps of six seconds; its last request ended long ago."""

    looks = 0

    def do_GET(self) -> None:
        kind, body = "application/json", b"{}"
        if self.path == "/":
            kind, body = "text/html", PAGE.read_bytes()
        elif self.path == "/v1/models":
            body = b'{"data": [{"id": "slow"}]}'
        elif self.path == "/v1/load":
            names = "num_total_pages num_free_pages num_cached_pages num_projected_pages"
            names += " padding_waste device_idle_share host_s_per_step compiles_after_ready"
            load = dict.fromkeys(names.split(), 1) | {"num_running": 1, "num_waiting": 0}
            body = json.dumps(load | {"predicted_ttft_s": 6.0, "queues": {}}).encode()
        elif self.path == "/metrics":
            type(self).looks += 1
            kind, body = "text/plain", self.metrics(type(self).looks // 3).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def metrics(num_steps: int) -> str:
        first = "octavo:time_to_first_token_seconds"
        values = {
            "octavo:generation_tokens_total": 600 * num_steps,
            "octavo:engine_steps_total": num_steps,
            "octavo:device_busy_seconds_total": 6 * num_steps,
            f'{first}_bucket{{le="4.0"}}': 0,
            f'{first}_bucket{{le="8.0"}}': 5,
            f'{first}_bucket{{le="+Inf"}}': 5,
            f"{first}_count": 5,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("budget_ms", [23_000, 25_000, 27_000])
def test_steps_of_seconds_make_tokens_a_second(budget_ms):
    SlowServer.looks = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = SimpleNamespace(http=f"http://127.0.0.1:{server.server_port}")
        page = _chromium(url, f"--virtual-time-budget={budget_ms}", "--dump-dom").stdout
        server.shutdown()
    rate = float(re.search(r'id="rate">([\d.]+)<', page)[1])
    assert 50 <= rate <= 200  # 100, but for where the looks fall
    assert re.search(r'id="step">6\.00 s<', page)
    assert 'id="latency-when">since the start<' in page
    assert "<td>first token</td><td>6.00 s</td><td>7.80 s</td>" in page


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
