"""docs/models.md, written from the table of families.

Run `python -m octavo.server.cli.models_reference > docs/models.md` after changing it.
"""

from __future__ import annotations

from octavo.server.cli.models import families, formats

_HEAD = """# Models

Octavo reads the families below from a Hugging Face directory with safetensors files, and some of
them from GGUF files, too. `octavo convert` writes any of them [anew](#converted-checkpoints).
`octavo models` prints the same list.

What was tested, and how:

- **Logits** of tiny models with random weights are those of `transformers`, within 1e-4 in
  float32, in prefill and in decode. This holds for every family. It shows that the mathematics
  are right, and nothing about a checkpoint's size, tokenizer or chat template.
- **Compiled**: a decode step in a real size compiles for as many TPU v6e as hold the model, or for
  a pod of v5p, in every family but two
  ([table](../benchmarks/results/aot-families-2026-11-27.md)). It copies at most 0.1 GB of weights,
  and weights and pages of 64 rows fit. None has run on a TPU.
- **Served** names a real checkpoint that was. Where there is none, nobody has tried a real one
  here.

GGUF files of Mistral and SmolLM2 say that they are `llama`, and are read so.
"""
_STORED = """## How weights may be stored

Files of floats are read as they are. Quantized ones are read as the numbers that they stand for, to
the last bit, by what `quantization_config` in config.json says
([more](quantization.md#quantized-checkpoints)):

| `quant_method` | what is read | checked against |
|---|---|---|
"""
_TAIL = """## Converted checkpoints

    octavo convert SRC DST

writes a directory that loads to the same weights, bit for bit, and is not larger than its source
but for headers and tokenizer files:

| source | what is written |
|---|---|
| quantized safetensors | the tensors that Octavo reads, byte for byte, and the files beside them |
| a GGUF file with quantized tensors | the file, and the tokenizer's files beside it |
| any other of bfloat16 | an Orbax checkpoint of bfloat16, laid out as the decoder wants it |
| any other | an Orbax checkpoint of float32; float16 takes twice the bytes there |

Vision towers and layers that guess further tokens are not read, and so left out.
A directory that holds one GGUF file and no config.json may be named in the file's place.
`--dtype float32` or `bfloat16` writes an Orbax checkpoint of what a quantized source stands for:
4 to 8 times the bytes, and decode steps on a CPU no longer read the stored blocks. A classification
head is kept where tensors are, and refused otherwise. Prompts and pooling of embedding models come
along.

## What a configuration may say
A field of config.json that changes the mathematics and is not implemented is refused by name, in
every family. So nothing is ignored silently.

| rotary embedding | read |
|---|---|
| `default`, `linear`, `llama3`, `yarn` | in every family, in the words of transformers 4 and 5 |
| `longrope` | in every family; the served context decides between its two sets of factors |
| `partial_rotary_factor` | in Phi, GLM and MiniMax |
| `proportional` | in every family; of those above, Gemma 4 has it |
| `dynamic` | refused |

Longrope's long factors are used if `max_model_len` is above the context that the model was first
trained on (`original_max_position_embeddings`), and its short ones if not, whatever a request's
length. `transformers` decides by the longest sequence of a call: a sequence that grows past the
original context then has keys of both kinds in its cache.

Checkpoints of a text model and encoders of images and sounds are served as their text model. Their
other tensors are not read.

Layers of Gemma 4 have caches of two shapes, which cannot take each other's pages: those with a
window keep all of theirs. A model with heads of 512 numbers runs on the XLA implementation of
attention, on every device.

A model that is not here: [add a family](walkthroughs/add-a-model-family.md).
"""


def render() -> str:
    """The page."""
    lines = [_HEAD, "## Families", "", "| models | architecture | GGUF | logits | served |"]
    lines.append("|---|---|---|---|---|")
    for family in families():
        names = ", ".join(f"`{name}`" for name in family["architectures"])
        gguf = f"`{family['gguf']}`" if family["gguf"] else "no"
        real = family["real"] or "none"
        lines.append(f"| {family['models']} | {names} | {gguf} | {family['parity']} | {real} |")
    stored = [f"| `{one['method']}` | {one['what']} | {one['checked']} |" for one in formats()]
    return "\n".join([*lines, "", _STORED + "\n".join(stored), "", _TAIL])


if __name__ == "__main__":
    print(render(), end="")
