#!/usr/bin/env bash
# Has routers that nobody here wrote (smg, sglang-router, vllm-router) spread requests over two live
# servers, and checks that clients get the same tokens through them. They get an environment of their
# own (requirements-routers.txt); where that cannot be installed, one line says so and nothing is
# checked.
#
# Usage: check_routers.sh PYTHON [DIR]     PYTHON has Octavo and, if it can be had, uv
set -euo pipefail
python=$1
dir=${2:-.venv-routers}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! tools/outside_venv.sh "$python" "$dir" requirements-routers.txt; then
  echo "SKIPPED: the routers could not be installed here, so none was run"
  exit 0
fi
"$python" -m benchmarks.routers --bin "$dir/bin"
