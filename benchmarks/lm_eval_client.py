"""lm-evaluation-harness, which nobody here wrote, against a live server of ours.

    python -m benchmarks.lm_eval_client --lm-eval .venv-lm-eval/bin/lm-eval

A small random model is served by `octavo serve`. The harness, in an environment of its own, scores
texts with its `local-completions` client: continuations of contexts and whole texts. Each sum of
log-probabilities must be the one that the Python API's `prompt_logprobs` give.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.tiny_server import serving, write_tiny_model
from octavo import LLM, SamplingParams

DOCS = [
    {"context": "The capital of France is", "continuation": " Paris"},
    {"context": "Two and two are", "continuation": " four, as everybody knows"},
    {"context": "Ein häßlicher", "continuation": " Käse 漢"},
]
KINDS = ("loglikelihood", "loglikelihood_rolling")
TOLERANCE = 1e-3
"""Of a sum of log-probabilities of some thirty tokens in float32, computed in another batch."""
TIMEOUT_S = 180


def task_of(kind: str, data: Path) -> dict[str, Any]:
    """The harness's description of a task over the texts."""
    is_rolling = kind == "loglikelihood_rolling"
    return {
        "task": f"octavo_{kind}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "" if is_rolling else "{{context}}",
        "doc_to_target": "{{context}}{{continuation}}" if is_rolling else "{{continuation}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "bits_per_byte" if is_rolling else "acc"}],
    }


def scored(lm_eval: str, url: str, folder: Path) -> dict[str, list[float]]:
    """Sums of log-probabilities by kind of task, as the harness logs them.

    Raises:
        subprocess.CalledProcessError: it ended in an error, which is printed.
    """
    data, tasks, out = folder / "docs.json", folder / "tasks", folder / "out"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    tasks.mkdir()
    for kind in KINDS:
        (tasks / f"{kind}.yaml").write_text(json.dumps(task_of(kind, data)))
    model = f"base_url={url}/v1/completions,model=tiny,num_concurrent=2,max_length=256"
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", ",".join(f"octavo_{kind}" for kind in KINDS)]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    # Only its own packages, and no look for anything on a hub.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    run = subprocess.run(
        command, env=environ, text=True, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    if run.returncode:
        print(run.stdout[-4000:], run.stderr[-4000:], sep="\n", file=sys.stderr)
        run.check_returncode()
    found = {}
    for kind in KINDS:
        [path] = out.rglob(f"samples_octavo_{kind}_2*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        samples.sort(key=lambda sample: sample["doc_id"])
        firsts = [sample["resps"][0][0] for sample in samples]
        found[kind] = [float(each[0] if isinstance(each, list) else each) for each in firsts]
    return found


def computed(model: Path) -> dict[str, list[float]]:
    """The same sums by the Python API."""
    llm = LLM(str(model), progress=False, max_num_seqs=4, max_model_len=512, warm_up="coarse")
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for doc in DOCS:
        context = llm.tokenizer.encode(doc["context"], add_special_tokens=False)
        ids = llm.tokenizer.encode(doc["context"] + doc["continuation"], add_special_tokens=False)
        # The harness puts BOS before a whole text, or EOS where BOS has the number 0.
        whole = [llm.tokenizer.bos_token_id or llm.tokenizer.eos_token_ids[0], *ids]
        for kind, prompt, begin in ((KINDS[0], ids, len(context)), (KINDS[1], whole, 1)):
            [output] = llm.generate([prompt], params, use_tqdm=False)
            entries = zip(prompt, output.prompt_logprobs or (), strict=True)
            scores = [entry[token].logprob for token, entry in entries if entry is not None]
            found[kind].append(sum(scores[begin - 1 :]))
    llm.close()
    return found


def main() -> int:
    """Runs from the command line; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm-eval", required=True, help="its command")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        model = write_tiny_model(Path(name))
        with serving(model, ("--warm-up", "coarse")) as server:
            by_harness = scored(args.lm_eval, server.http, model)
        by_python = computed(model)
    for kind in KINDS:
        pairs = list(zip(by_harness[kind], by_python[kind], strict=True))
        worst = max(abs(one - other) for one, other in pairs)
        wrong += worst > TOLERANCE
        told = "the Python API's numbers" if worst <= TOLERANCE else f"{pairs}"
        print(f"lm-eval, {kind}: {told} (largest difference {worst:.1e})", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
