"""A reranker's scores are its odds of "yes" against "no", in the words it was trained on."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError, InvalidRequestError
from octavo.engine.input.tokenization import Tokenization

EMBEDS = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "warm_up": "coarse", "fail_on_compile": True,
    "progress": False,
}  # fmt: skip
QUERY, DOCUMENTS = "a query", ["one", "another document", "a query"]
PUBLISHED = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(
    request: pytest.FixtureRequest,
    family_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A Qwen 3 under a reranker's name, whose tokenizer knows both words."""
    made = family_model("qwen3", tie_word_embeddings=request.param)
    directory = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny"
    shutil.copytree(made, directory)
    tokenizer = directory / "tokenizer.json"
    text = tokenizer.read_text().replace("<reserved0>", "yes").replace("<reserved1>", "no")
    tokenizer.write_text(text)
    return directory


def test_scores_are_the_odds_of_yes(model: Path, plain: Callable[..., Any]) -> None:
    from safetensors.numpy import load_file

    from octavo import LLM

    llm = LLM(str(model), **EMBEDS)
    tensors = load_file(model / "model.safetensors")
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(float)
    [yes], [no] = (llm.tokenizer.encode(word) for word in ("yes", "no"))
    hidden = plain(model)

    def odds(instruction: str, document: str) -> float:
        prompt = PUBLISHED.format(instruction, QUERY, document)
        logits = head @ hidden(llm.tokenizer.encode(prompt, add_special_tokens=False))[-1]
        return 1 / (1 + math.exp(logits[no] - logits[yes]))

    found = [item.outputs.score for item in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    np.testing.assert_allclose(found, [odds(INSTRUCTION, d) for d in DOCUMENTS], rtol=0, atol=1e-5)
    [other] = llm.score(QUERY, DOCUMENTS[0], instruction="Find it.", use_tqdm=False)
    assert other.outputs.score == pytest.approx(odds("Find it.", DOCUMENTS[0]), abs=1e-5)
    with pytest.raises(InvalidRequestError, match="text_2 = \\[20, 30\\]"):
        llm.score(QUERY, [[20, 30]], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
        llm.score(QUERY, DOCUMENTS, tokenization=Tokenization(truncate_prompt_tokens=8))
    llm.close()


def test_a_model_without_the_words_is_refused_when_it_is_to_judge(
    family_model: Callable[..., Path],
) -> None:
    from octavo import LLM

    with pytest.raises(InvalidConfigError, match='no tokens "yes" and "no"'):
        LLM(str(family_model("qwen3")), reranker="qwen3", task="embed", **EMBEDS)
