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

wanted=$(cksum <requirements-guidellm.txt)
if [ "$(cat "$dir/.stamp" 2>/dev/null)" != "$wanted" ] || ! "$dir/bin/python" -c "" 2>/dev/null; then
  rm -rf "$dir"
  "$python" -m venv "$dir"
  if "$python" -m uv --version >/dev/null 2>&1; then
    install=("$python" -m uv pip install --quiet --python "$dir/bin/python")
  else
    install=("$dir/bin/python" -m pip --disable-pip-version-check install --quiet)
  fi
  if ! timeout 600 "${install[@]}" -r requirements-guidellm.txt; then
    rm -rf "$dir"
    echo "SKIPPED: GuideLLM could not be installed here, so no outside benchmark client was run"
    exit 0
  fi
  echo "$wanted" >"$dir/.stamp"
fi
"$python" -m benchmarks.guidellm_client --guidellm "$dir/bin/guidellm"
