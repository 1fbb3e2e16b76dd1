"""What the docs tell users to run, run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import yaml

from octavo.server.cli.settings import read_settings
from tests.examples import DOCS, examples, run_example


def test_the_python_snippets_run(live):
    for code in examples("http.md"):
        assert run_example(code, live).strip().endswith("tokens)")


def test_the_grpc_clients_snippet_runs(live):
    [code] = examples("grpc.md")
    assert len(run_example(code, live)) > 1


TARGET = re.compile(r"x-slo-(?:ttft|tpot|e2e)-ms|(?:ttft|tpot|e2e)_target_m?s=")


def examples_with_targets() -> list[tuple[str, str, str]]:
    """(page, language, code) of every block in README and docs that asks for a target."""
    found = []
    for path in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S):
            # Signatures and what is written of them, as in api.md, are no examples.
            if TARGET.search(code) and "None" not in code:
                found.append((path.name, language, code))
    return found


@pytest.mark.parametrize(
    ("page", "language", "code"), examples_with_targets(), ids=lambda value: value[:12]
)
def test_every_example_with_a_target_is_served_at_once(live, page, language, code):
    import httpx

    def num_refused() -> float:
        text = httpx.get(f"{live.http}/metrics").text
        return sum(
            map(float, re.findall(r"^octavo:requests_refused_total\{.*\} (.*)$", text, re.M))
        )

    assert language in ("python", "sh"), f"{page}: an example in a language that nobody runs here"
    code = code.replace("http://127.0.0.1:8000", live.http).replace("127.0.0.1:50051", live.grpc)
    command = [sys.executable, "-c"] if language == "python" else ["bash", "-c"]
    before = num_refused()
    done = subprocess.run(
        [*command, code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    # Clients ask again when they are refused: the server knows.
    assert num_refused() == before


def test_examples_with_targets_are_found():
    assert {page for page, _, _ in examples_with_targets()} >= {"http.md", "grpc.md"}


def test_a_target_that_no_idle_server_meets_is_refused_with_the_least_it_could(live):
    import httpx

    def ask(target_ms: float) -> httpx.Response:
        return httpx.post(
            f"{live.http}/v1/completions", json={"prompt": "x" * 200, "max_tokens": 8},
            headers={"x-slo-ttft-ms": str(target_ms)}, timeout=60,
        )  # fmt: skip

    for _ in range(8):  # steps by which the forecast is sound
        assert ask(60_000).status_code == 200
    # One in eight may be served as a probe, by an id that differs from run to run.
    answers = [ask(0.01) for _ in range(8)]
    assert {answer.status_code for answer in answers} <= {200, 422}
    refused = next(answer for answer in answers if answer.status_code == 422)
    assert "retry-after" not in refused.headers
    [least_s] = re.findall(r"at least ([0-9.e-]+) s", refused.json()["error"]["message"])
    assert 1e-5 < float(least_s) < 10
    assert ask(1e3 * float(least_s) * 10).status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_shell_snippets_run(live):
    for code in (*examples("http.md", "sh"), *examples("structured_output.md", "sh")):
        code = code.replace("http://127.0.0.1:8000", live.http)
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert '"object":"text_completion"' in done.stdout, done.stderr


def test_the_example_file_is_a_good_one(tmp_path):
    [text] = examples("operating.md", "yaml")
    path = tmp_path / "octavo.yaml"
    path.write_text(text)
    settings = read_settings({}, {}, str(path))
    assert settings.serve.http_port == yaml.safe_load(text)["http_port"]
    assert settings.engine.scheduling_policy == "slo"


def test_every_metric_of_the_table_is_there(live):
    import httpx

    page = httpx.get(f"{live.http}/metrics").text
    table = (DOCS / "operating.md").read_text().partition("## Metrics")[2].partition("## When")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    names = re.findall(r"`([a-z_0-9]+)", " ".join(rows))
    assert len(names) > 35
    missing = [name for name in names if f"\noctavo:{name}" not in "\n" + page]
    # Those with labels appear with the first request that has them.
    assert not set(missing) - {"slo_requests_total"}
    for name in set(re.findall(r"^octavo:([a-z_0-9]+?)(?:_bucket|_sum|_count)?[ {]", page, re.M)):
        known = name in table or name.removesuffix("_created") in table
        assert known or name.startswith("num_kv_pages_"), name
