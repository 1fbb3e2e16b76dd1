#!/usr/bin/env bash
# Has GuideLLM, a benchmark client that nobody here wrote, measure a live server, and checks what it
# reports. It gets an environment of its own (requirements-guidellm.txt); where that cannot be
# installed, one line says so and nothing is checked.
#
# Usage: check_guidellm.sh PYTHON [DIR]     PYTHON has Octavo and, if it can be had, uv
set -euo pipefail
python=$1
dir=${2:-.venv-guidellm}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! tools/outside_venv.sh "$python" "$dir" requirements-guidellm.txt; then
  echo "SKIPPED: GuideLLM could not be installed here, so no outside benchmark client was run"
  exit 0
fi
"$python" -m benchmarks.guidellm_client --guidellm "$dir/bin/guidellm"
