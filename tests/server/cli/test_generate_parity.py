"""The command a new user types first, against transformers on the same dequantized weights."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from octavo.models.packaged import PACKAGED_MODELS

MAX_TOKENS = 32


def generated(*options: str) -> dict[str, Any]:
    """What `octavo generate --json` prints."""
    command = [sys.executable, "-m", "octavo.server.cli.main", "generate", "--quiet", "--json"]
    command += ["--prompt", "The capital of France is", "--max-tokens", str(MAX_TOKENS)]
    done = subprocess.run(
        [*command, "--temperature", "0", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    ("name", "options"),
    [("smollm2-135m", ()), ("gemma3-270m", ("--model", "gemma3-270m"))],
    ids=["no model named", "gemma3-270m"],
)
def test_generate_gives_the_tokens_of_transformers(name: str, options: tuple[str, ...]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")  # transformers reads GGUF files with it
    transformers = pytest.importorskip("transformers")
    if not PACKAGED_MODELS[name].is_installed():
        pytest.skip(f"{name} is not installed")
    answer = generated(*options)

    path = PACKAGED_MODELS[name].path()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompt = torch.tensor([answer["prompt_token_ids"]])
    whole = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        # As the command's defaults: nothing but the largest logit decides.
        generation_config=transformers.GenerationConfig(
            eos_token_id=model.generation_config.eos_token_id or model.config.eos_token_id
        ),
    )
    assert answer["token_ids"] == whole[0, prompt.shape[1] :].tolist()
    assert len(set(answer["token_ids"])) > 5
