from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.errors import InvalidRequestError, ModelLoadError
from octavo.engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize("text", [b"bytes", None, "half \ud83d pair"])
def test_what_is_not_unicode_text_is_refused(smollm2: Tokenizer, text: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        smollm2.encode(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[-1], [5, 2**32]])
def test_impossible_token_ids_are_refused(smollm2: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="token_ids"):
        smollm2.decode(ids)


def test_ids_beyond_the_vocabulary_have_no_text(packaged: Tokenizer) -> None:
    """A model's output may be padded to more columns than there are tokens."""
    beyond = packaged.vocab_size
    hello = packaged.encode("Hello", add_special_tokens=False)
    assert packaged.decode([*hello, beyond]) == "Hello"
    assert packaged.id_to_token(beyond) is None
    assert packaged.id_to_token(-1) is None


def test_smollm2_writes_its_chat_format(smollm2: Tokenizer) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = smollm2.apply_chat_template(messages)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode_chat(messages)
    assert ids.count(1) == 3
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert not smollm2.apply_chat_template(messages, add_generation_prompt=False).endswith(
        "assistant\n"
    )


def test_a_model_without_a_template_says_so(gemma3: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        gemma3.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        Tokenizer.from_source(tmp_path / "model.gguf")


def test_importing_it_imports_neither_jax_nor_transformers() -> None:
    names = ("tokenizer", "detokenizer", "chat_template", "stops", "bad_words")
    code = (
        "import sys; sys.path[:0] = " + repr([path for path in sys.path if path]) + "\n"
        + "".join(f"import octavo.engine.text.{name}\n" for name in names)
        + "print(sorted({'jax', 'transformers', 'torch'} & sys.modules.keys()))"
    )  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
