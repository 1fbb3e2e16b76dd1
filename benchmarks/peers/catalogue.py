"""The peers that can be run: where each lives and how it is started."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from octavo.models.packaged import PACKAGED_MODELS

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        name: what the table calls it.
        script: file beside this one.
        python: interpreter of its environment.
        model: what its `--model` gets.
        arguments: its own further arguments.
        preload: shared libraries loaded before it, each left out where it is not installed.
        small_batch_only: too slow for the whole batch; it is given the small one.
    """

    name: str
    script: str
    python: Path
    model: Path | str
    arguments: tuple[str, ...] = ()
    preload: tuple[Path, ...] = field(default=())
    small_batch_only: bool = False

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if not self.python.exists():
            return f"no environment at {self.python.parent.parent}: run setup.sh"
        if isinstance(self.model, Path) and not self.model.exists():
            return f"no model at {self.model}: run setup.sh"
        return None

    def command(self, workload: Path, out: Path) -> list[str]:
        """Its process's arguments."""
        return [
            str(self.python),
            str(HERE / self.script),
            f"--workload={workload}",
            f"--out={out}",
            f"--model={self.model}",
            *self.arguments,
        ]

    def preload_variable(self) -> str:
        """The value of LD_PRELOAD: those libraries that are installed."""
        return ":".join(str(path) for path in self.preload if path.exists())


INT8 = ("--engine-arg=quantization=int8", "--engine-arg=kv_cache_dtype=int8")


def catalogue(
    envs: Path, octavo_model: str, octavo_arguments: tuple[str, ...], num_cores: int = 1
) -> dict[str, Peer]:
    """Every known peer by its short name.

    Args:
        envs: folder that setup.sh filled: one environment and one form of the model a peer.
        octavo_model: model that Octavo opens.
        octavo_arguments: further arguments of octavo_peer.py.
        num_cores: that each peer gets; Octavo's replicas take one each.

    Raises:
        ModelLoadError: the packaged model, which all of them run, is not installed.
    """
    hf_model = envs / "smollm2-f32"
    vllm = envs / "vllm"
    allocators = sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))
    vllm_preload = (*allocators, vllm / "lib" / "libiomp5.so")
    vllm_python = vllm / "bin" / "python"
    llama_python = envs / "llama_cpp" / "bin" / "python"
    replicas = f"--engine-arg=data_parallel_size={num_cores}"

    def octavo(name: str, *arguments: str) -> Peer:
        more = (*octavo_arguments, *arguments)
        return Peer(name, "octavo_peer.py", Path(sys.executable), octavo_model, more)

    return {
        "octavo": octavo("Octavo"),
        "octavo-int8": octavo("Octavo int8", *INT8),
        "octavo-replicas": octavo("Octavo, an engine a core", replicas),
        "octavo-int8-replicas": octavo("Octavo int8, an engine a core", replicas, *INT8),
        "vllm": Peer("vLLM compiled", "vllm_peer.py", vllm_python, hf_model, preload=vllm_preload),
        "vllm-eager": Peer(
            "vLLM eager", "vllm_peer.py", vllm_python, hf_model, ("--eager",), vllm_preload
        ),
        "llama.cpp": Peer(
            "llama.cpp F32, 32 slots",
            "llama_cpp_peer.py",
            llama_python,
            envs / "smollm2-f32.gguf",
            small_batch_only=True,
        ),
        "llama.cpp-q4_1": Peer(
            "llama.cpp Q4_1, 32 slots",
            "llama_cpp_peer.py",
            llama_python,
            PACKAGED_MODELS["smollm2-135m"].path(),
            ("--plain-buffers",),
            small_batch_only=True,
        ),
        "transformers": Peer(
            "transformers, batch 32",
            "transformers_peer.py",
            envs / "transformers" / "bin" / "python",
            hf_model,
            small_batch_only=True,
        ),
    }
