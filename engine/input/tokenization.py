"""How a prompt becomes tokens, where a request says so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.tokenizer import SHORT_TEXT_CHARS, Tokenizer

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenization:
    """How a prompt becomes tokens. Checked on construction; immutable.

    Attributes:
        add_special_tokens: put BOS and EOS where the model wants them around a text.
        truncate_prompt_tokens: most tokens of the prompt that are kept; -1 is as many as the
            context has beside those to be generated; None refuses a prompt that does not fit.
        truncation_side: where a longer prompt is cut: "left" keeps its end, "right" its beginning.
        num_last: with "right", tokens at the prompt's end that are kept all the same; see
            `num_tokens_behind`.

    Raises:
        InvalidRequestError: a value is out of its range; names the field.
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "left"
    num_last: int = 0

    def __post_init__(self) -> None:
        most = self.truncate_prompt_tokens
        is_integer = isinstance(most, int) and not isinstance(most, bool)
        if most is not None and not (is_integer and (most == -1 or most >= 1)):
            raise InvalidRequestError("truncate_prompt_tokens", most, "an integer from 1, or -1")
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequestError("truncation_side", self.truncation_side, "left or right")

    def most_tokens(self, max_model_len: int, max_tokens: int | None) -> int | None:
        """Tokens of a prompt that are kept; None for all of them.

        Args:
            max_model_len: most tokens of prompt and output together.
            max_tokens: most tokens to generate; None is as many as there is room for.

        Raises:
            InvalidRequestError: more than the context has.
        """
        most = self.truncate_prompt_tokens
        if most == -1:
            return max(1, max_model_len - (max_tokens or 1))
        if most is not None and most >= max_model_len:
            allowed = f"at most {max_model_len - 1}, one less than the context, or -1"
            raise InvalidRequestError("truncate_prompt_tokens", most, allowed)
        return most

    def shortened(self, text: str, most: int | None, tokenizer: Tokenizer) -> str:
        """A text of millions of characters without what is cut off for certain, so that nobody
        tokenizes it. Twice as much as may be kept is left, so that no token at the cut is.

        Args:
            most: as `most_tokens` says.
        """
        sizes = tokenizer.token_sizes
        if most is None or sizes is None or len(text) <= SHORT_TEXT_CHARS:
            return text
        num_chars = 2 * most * sizes.most_bytes
        kept = text[-num_chars:] if self.truncation_side == "left" else text[:num_chars]
        return kept if sizes.least_tokens(kept) >= most else text

    def cut_as_trained(self, most: int, tokenizer: Tokenizer) -> Tokenization:
        """The same, but that a text is cut as an embedding model's limit wants it, unless it is
        cut already: its beginning is kept, and what the model puts behind each text.

        Args:
            most: tokens that are kept.
            tokenizer: of the model.
        """
        if self.truncate_prompt_tokens is not None:
            return self
        num_last = num_tokens_behind(tokenizer) if self.add_special_tokens else 0
        return dataclasses.replace(
            self, truncate_prompt_tokens=most, truncation_side="right", num_last=num_last
        )

    def cut(self, token_ids: list[int], most: int | None) -> list[int]:
        """The tokens that are kept.

        Args:
            most: as `most_tokens` says.
        """
        if most is None or len(token_ids) <= most:
            return token_ids
        if self.truncation_side == "left":
            return token_ids[-most:]
        num_last = min(self.num_last, most)
        return token_ids[: most - num_last] + token_ids[len(token_ids) - num_last :]


AS_THE_MODEL_WANTS = Tokenization()


def num_tokens_behind(tokenizer: Tokenizer) -> int:
    """Special tokens that a model puts behind each text, such as EOS: embeddings may be read off
    the last one."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    spare = len(whole) - len(plain)
    return next((n for n in range(spare) if whole[spare - n : len(whole) - n] == plain), spare)
