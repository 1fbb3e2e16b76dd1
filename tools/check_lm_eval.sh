#!/usr/bin/env bash
# Has lm-evaluation-harness, which nobody here wrote, score texts by a live server, and compares what
# it finds with the Python API's numbers. It gets an environment of its own
# (requirements-lm-eval.txt); where that cannot be installed, one line says so and nothing is checked.
#
# Usage: check_lm_eval.sh PYTHON [DIR]     PYTHON has Octavo and, if it can be had, uv
set -euo pipefail
python=$1
dir=${2:-.venv-lm-eval}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! tools/outside_venv.sh "$python" "$dir" requirements-lm-eval.txt; then
  echo "SKIPPED: lm-evaluation-harness could not be installed here, so nothing was scored by it"
  exit 0
fi
"$python" -m benchmarks.lm_eval_client --lm-eval "$dir/bin/lm-eval"
