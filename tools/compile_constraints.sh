#!/usr/bin/env bash
# Writes constraints.txt: versions alone (no index, no hash, no path), for every supported Python
# at once. The [cuda] extra stays out of it: it does not resolve on Python 3.11.
set -euo pipefail
python=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$python" -m uv pip compile --quiet --upgrade --universal --python-version 3.11 \
  --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
  --extra test --extra http --extra check --extra plots --extra docs --extra otel --extra tpu pyproject.toml -o constraints.txt
echo "constraints.txt: $(wc -l <constraints.txt) pins; run \`make check test\` before committing it"
