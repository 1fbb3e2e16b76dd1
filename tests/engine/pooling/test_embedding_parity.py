"""Embeddings of every family and pooling, against a plain computation and against transformers.

Cosine ≥ 0.99999 in float32: what remains is the order of sums.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError, InvalidRequestError

LEAST_COSINE = 0.99999
FAMILIES = ("gemma2", "gemma3", "llama3", "mistral", "qwen2", "qwen3", "smollm2")
POOLINGS = ("last", "mean", "cls")
TEXTS = ["a", "A text of some length.", "Others are longer, and take chunks of their own. " * 5]
EMBEDS = {
    "task": "embed", "max_num_seqs": 8, "max_num_batched_tokens": 64, "warm_up": "coarse",
    "fail_on_compile": True, "progress": False,
}  # fmt: skip


def cosine(one: Any, other: Any) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def vectors(llm: Any, texts: list[str], **options: Any) -> list[Any]:
    return [each.outputs.data for each in llm.embed(texts, use_tqdm=False, **options)]


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_the_whole_text_at_once(
    name: str,
    family_model: Callable[..., Path],
    plain: Callable[..., Any],
    pooled: Callable[..., Any],
) -> None:
    from octavo import LLM

    model = family_model(name)
    hidden, llm = plain(model), LLM(str(model), **EMBEDS)
    tokenize = llm.tokenizer.encode
    for pooling in POOLINGS:
        found = vectors(llm, TEXTS, pooling=pooling)
        for text, vector in zip(TEXTS, found, strict=True):
            want = pooled(hidden(tokenize(text)), pooling)
            assert cosine(vector, want) >= LEAST_COSINE, (pooling, text)
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    llm.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_transformers(name: str, family_model: Callable[..., Path]) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    from octavo import LLM

    model = family_model(name)
    llm = LLM(str(model), **EMBEDS)
    reference = transformers.AutoModel.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for text in TEXTS:
        ids = torch.tensor([llm.tokenizer.encode(text)])
        with torch.no_grad():
            hidden = reference(ids).last_hidden_state[0].numpy()
        wanted = {"last": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}
        for pooling in POOLINGS:
            [vector] = vectors(llm, [text], pooling=pooling)
            assert cosine(vector, wanted[pooling]) >= LEAST_COSINE, (pooling, text)
    llm.close()


PROMPTS = {"query": "Find: ", "document": ""}


@pytest.fixture(scope="module")
def declared(family_model: Callable[..., Path]) -> Path:
    """An embedding model as one is published: without an output layer, with modules and prompts."""
    from safetensors.numpy import load_file, save_file

    model = family_model("qwen3", architectures=["Qwen3Model"])
    tensors = load_file(model / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        model / "model.safetensors",
    )
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "path": f"{i}_{kind}" * (i > 0), "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    mode = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    named = {"prompts": PROMPTS, "default_prompt_name": "document"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(named))
    return model


def test_a_published_embedding_model_needs_no_settings(
    declared: Path, plain: Callable[..., Any], pooled: Callable[..., Any]
) -> None:
    from octavo import LLM

    llm = LLM(str(declared), **(EMBEDS | {"task": "auto"}))
    hidden, encode = plain(declared), llm.tokenizer.encode
    [vector] = vectors(llm, ["some text"])
    assert cosine(vector, pooled(hidden(encode("some text")), "mean")) >= LEAST_COSINE
    [asked] = vectors(llm, ["some text"], prompt_name="query")
    assert cosine(asked, pooled(hidden(encode("Find: some text")), "mean")) >= LEAST_COSINE
    with pytest.raises(InvalidRequestError, match="prompt_name = 'other'"):
        llm.embed("some text", prompt_name="other")
    with pytest.raises(InvalidRequestError, match="prompt_name"):
        llm.embed([[20, 30]], prompt_name="query")
    with pytest.raises(InvalidRequestError, match="task = 'embed'"):
        llm.generate("some text")
    llm.close()


@pytest.mark.parametrize("task", ["generate", "both"])
def test_a_model_without_an_output_layer_does_not_generate(declared: Path, task: str) -> None:
    from octavo import LLM

    with pytest.raises(InvalidConfigError, match="no output layer"):
        LLM(str(declared), **(EMBEDS | {"task": task}))
