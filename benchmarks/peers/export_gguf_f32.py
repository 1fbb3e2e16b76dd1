"""Write a GGUF model again with its tensors dequantized to float32, for llama.cpp."""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np


def export(source: Path, target: Path) -> None:
    """Copy `source`'s metadata and dequantized tensors to `target` (overwritten)."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE:
            continue
        value = entry.contents()
        if name == gguf.Keys.General.FILE_TYPE:
            value = int(gguf.LlamaFileType.ALL_F32)
        kind = entry.types[0]
        inner = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        # The reader already gives rows in NumPy's order, quantized blocks along the last axis.
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(weights, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the packaged SmolLM2)")
    args = parser.parse_args()
    if args.gguf is None:
        from export_hf import packaged_gguf

        args.gguf = packaged_gguf()
    export(args.gguf, args.target)


if __name__ == "__main__":
    main()
