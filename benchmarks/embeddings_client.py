"""Sentence Transformers and BEIR, which nobody here wrote, against a live server's embeddings.

    python -m benchmarks.embeddings_client --torch-python PYTHON

PYTHON has torch and sentence-transformers (and beir, or that part is left out), and no Octavo. In
it Sentence Transformers writes a small random model with each pooling, normalized and not, and
embeds texts; `octavo serve` then serves the same folder. Each vector must be the same, whatever the
form of the request: texts, token ids, numbers, base64, fewer dimensions, a prompt by name. BEIR's
exact search over the paragraphs of the documentation must rank as it does with Sentence
Transformers' own vectors.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.tiny_server import serving, write_tiny_model

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ["a", "Paris is the capital of France.", "Ein häßlicher Käse 漢 🙂", "word " * 90]
PROMPTS = {"query": "Find: ", "document": ""}
POOLINGS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
TOLERANCE = 2e-5
"""Of a number, in lengths of the whole vector, in float32."""
LEAST_COSINE = 0.99999
TIMEOUT_S = 900


def documents(most: int = 120) -> tuple[dict[str, str], dict[str, str]]:
    """Paragraphs of the documentation by an id, and the headings that they stand under."""
    texts, headings = {}, {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        parts = re.split(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
        for heading, body in zip(parts[1::2], parts[2::2], strict=True):
            if len(body.strip()) > 80 and len(texts) < most:
                key = f"d{len(texts)}"
                texts[key], headings[key] = body.strip()[:300], heading
    return texts, headings


def faults_of(url: str, wanted: dict[str, Any], *, is_declared: bool) -> list[str]:
    """What differs from Sentence Transformers' vectors.

    Args:
        wanted: what the peer wrote of one pooling.
        is_declared: whether requests leave the pooling to the folder; else they name it.
    """
    own = {"pooling": POOLINGS[wanted["pooling"]], "normalize": wanted["normalize"]}
    found = []

    def compare(label: str, vectors: list[str], **fields: Any) -> None:
        body = ({} if is_declared else own) | {"model": "tiny", "input": TEXTS} | fields
        answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60)
        if answer.status_code != 200:
            found.append(f"{wanted['pooling']}, {label}: {answer.text[:200]}")
            return
        given = [item["embedding"] for item in answer.json()["data"]]
        if fields.get("encoding_format") == "base64":
            given = [np.frombuffer(base64.b64decode(each), "<f4") for each in given]
        wholes = np.linalg.norm(wanted["plain"], axis=1)
        rows = zip(TEXTS, np.array(given), np.array(vectors), wholes, strict=True)
        for text, one, other, scale in rows:
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            apart = float(abs(one - other).max() / scale)
            if apart > TOLERANCE or cosine < LEAST_COSINE:
                found.append(f"{own}, {label}, {text[:20]!r}: {apart}, cosine {cosine}")

    ids = [httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    compare("texts", wanted["plain"])
    compare("token ids", wanted["plain"], input=ids)
    compare("base64", wanted["plain"], encoding_format="base64")
    compare("a prompt by name", wanted["query"], prompt_name="query")
    for size, vectors in wanted["dimensions"].items():
        compare(f"{size} dimensions", vectors, dimensions=int(size))
    return found


def check(python: Path) -> list[str]:
    """What is not as it is with Sentence Transformers."""
    found: list[str] = []
    peer = [str(python), str(ROOT / "benchmarks" / "embeddings_peer.py")]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "base").mkdir()
        base = write_tiny_model(root / "base")
        (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        texts, headings = documents()
        task = {"texts": TEXTS, "prompts": PROMPTS, "corpus": texts, "queries": headings}
        (root / "task.json").write_text(json.dumps(task))
        _run([*peer, "write", str(base), str(root)])
        wanted = json.loads((root / "wanted.json").read_text())
        for index, each in enumerate(wanted):
            folder = root / each["folder"]
            with serving(folder, ("--task", "embed")) as server:
                found += faults_of(server.http, each, is_declared=True)
                if index == 0:
                    for other in wanted:
                        found += faults_of(server.http, other, is_declared=False)
                    print(_run([*peer, "beir", str(folder), str(root), server.http]).strip())
                    ranks = json.loads((root / "beir.json").read_text())
                    if ranks.get("octavo") != ranks.get("sentence-transformers"):
                        found.append(f"BEIR: {ranks}")
            print(f"{each['pooling']}, normalized {each['normalize']}: {len(found)} faults so far")
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return done.stdout


def main() -> int:
    """Checks from the command line; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", type=Path, required=True)
    found = check(parser.parse_args().torch_python)
    print("\n".join(found) or "all vectors and ranks are the same")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
