"""What the docs tell users to run, run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo.server.cli.settings import read_settings

DOCS = Path(__file__).parents[3] / "docs"


def snippets(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def test_the_python_snippets_run(live):
    for code in snippets("http.md", "python"):
        code = code.replace("http://127.0.0.1:8000", live.http)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith("tokens)")


def test_the_grpc_clients_snippet_runs(live):
    [code] = snippets("grpc.md", "python")
    code = code.replace("127.0.0.1:50051", live.grpc)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_shell_snippets_run(live):
    for code in (*snippets("http.md", "sh"), *snippets("structured_output.md", "sh")):
        code = code.replace("http://127.0.0.1:8000", live.http)
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
        assert '"object":"text_completion"' in done.stdout, done.stderr


def test_the_example_file_is_a_good_one(tmp_path):
    [text] = snippets("operating.md", "yaml")
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
