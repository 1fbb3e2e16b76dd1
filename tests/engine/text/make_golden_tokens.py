"""Writes golden/*.json: what `transformers` makes of the sample texts with the packaged models.

Run it where torch is installed (its GGUF reader wants it), in the repository's root:

    python tests/engine/text/make_golden_tokens.py

`transformers` knows nothing of the pre-tokenizer "smollm" and cuts words as GPT-2 does. The
tokenizer.json published with SmolLM2 cuts out single digits first, and that is put in here; it
only shows where two spaces or more, or a wide numeral, stand before a digit.
"""

from __future__ import annotations

import json
from pathlib import Path

from sample_texts import sample_texts
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from octavo.models.packaged import PACKAGED_MODELS


def main() -> None:
    for name in ("smollm2-135m", "gemma3-270m"):
        path = PACKAGED_MODELS[name].path()
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        if name == "smollm2-135m":
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        rows = []
        for text in sample_texts():
            ids = tokenizer.encode(text)
            rows.append(
                {
                    "text": text,
                    "ids": ids,
                    "decoded": tokenizer.decode(ids, skip_special_tokens=True),
                    "decoded_with_special": tokenizer.decode(ids, skip_special_tokens=False),
                }
            )
            for key in ("decoded", "decoded_with_special"):
                if rows[-1][key] == text:
                    del rows[-1][key]  # the usual case
        lines = ",\n".join(json.dumps(row) for row in rows)
        target = Path(__file__).parent / "golden" / f"{name}.json"
        target.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
