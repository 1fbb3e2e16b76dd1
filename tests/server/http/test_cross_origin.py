"""Pages of other origins: no leave unless it is given, as a browser asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator

import httpx
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.server.serve_config import ServeConfig

NAMES = ("chromium", "google-chrome", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
TOKEN = "token-0123456789"
OURS, OTHER = "https://chat.example", "https://elsewhere.example"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
PAGE = """<!doctype html><title>page</title><p id="said">nothing</p><script>
fetch("URL/v1/completions", {
  method: "POST",
  headers: {"content-type": "application/json", "authorization": "Bearer TOKEN"},
  body: JSON.stringify({prompt: "x", max_tokens: 3}),
}).then(async (answer) => {
  const text = answer.ok ? (await answer.json()).choices[0].text : (await answer.json()).error.code
  document.getElementById("said").textContent = answer.status + " " + text
}).catch((error) => { document.getElementById("said").textContent = "blocked" })
</script>"""


def test_off_by_default(on_stand):
    async def scenario(stand):
        async with httpx.AsyncClient(base_url=stand.http, timeout=20) as client:
            asked = await client.options("/v1/completions", headers=PREFLIGHT | {"origin": OURS})
            assert asked.status_code == 405
            answer = await client.get("/v1/models", headers={"origin": OURS})
        for headers in (asked.headers, answer.headers):
            assert not [name for name in headers if name.startswith("access-control")]

    on_stand(scenario, http_port=0)


@pytest.mark.parametrize("origins", [f'["{OURS}"]', OURS, '["*"]'])
def test_a_preflight_needs_no_token_and_names_who_may(on_stand, tmp_path, origins):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        async with httpx.AsyncClient(base_url=stand.http, timeout=20) as client:
            for origin in (OURS, OTHER):
                asked = await client.options(
                    "/v1/completions", headers=PREFLIGHT | {"origin": origin}
                )
                may = origin == OURS or "*" in origins
                assert asked.status_code == (200 if may else 400)
                granted = asked.headers.get("access-control-allow-origin")
                assert (granted in (origin, "*")) is may
                assert "access-control-allow-credentials" not in asked.headers
                # A refusal can be read by the page, or it could not tell why.
                refused = await client.post(
                    "/v1/completions", json={"prompt": "x"}, headers={"origin": origin}
                )
                assert refused.status_code == 401
                assert ("access-control-allow-origin" in refused.headers) is may

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"), allowed_origins=origins)


def test_methods_headers_and_credentials_are_as_told(on_stand):
    async def scenario(stand):
        async with httpx.AsyncClient(base_url=stand.http, timeout=20) as client:
            asked = await client.options("/v1/models", headers=PREFLIGHT | {"origin": OURS})
            assert asked.status_code == 400  # POST and Authorization were not allowed
            good = {"origin": OURS, "access-control-request-method": "GET"}
            asked = await client.options("/v1/models", headers=good)
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == OURS
            assert asked.headers["access-control-allow-credentials"] == "true"

    on_stand(
        scenario, http_port=0, allowed_origins=f'["{OURS}"]', allowed_methods='["GET"]',
        allowed_headers='["x-request-id"]', allow_credentials=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("allowed_origins", {"allowed_origins": "[1]"}),
        ("allowed_origins", {"allowed_origins": '{"a": 1}'}),
        ("allowed_origins", {"allowed_origins": '["a"'}),
        ("allowed_methods", {"allowed_methods": '[""]'}),
        ("allow_credentials", {"allowed_origins": '["*"]', "allow_credentials": True}),
    ],
)
def test_what_is_no_list_is_refused(field, values):
    with pytest.raises(InvalidConfigError) as caught:
        ServeConfig(**values)
    assert caught.value.field == field


@contextlib.contextmanager
def site(page: str) -> Iterator[str]:
    """A web site of one page, on an origin of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(
    ("origins", "token", "said"),
    [
        ('["*"]', TOKEN, "200 1 2 3 "),
        ('["*"]', "x" * 16, "401 invalid_api_key"),
        (json.dumps([OTHER]), TOKEN, "blocked"),
        (None, TOKEN, "blocked"),
    ],
)
def test_a_page_in_a_browser_is_answered_where_it_may_ask(on_stand, tmp_path, origins, token, said):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        with site(PAGE.replace("URL", stand.http).replace("TOKEN", token)) as url:
            browser = await asyncio.create_subprocess_exec(
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--virtual-time-budget=10000", "--dump-dom", url),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            text = (await browser.communicate())[0].decode()
        found = re.search(r'<p id="said">(.*?)</p>', text)
        assert found is not None
        assert found[1] == said

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"), allowed_origins=origins)
