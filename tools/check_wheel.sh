#!/usr/bin/env bash
# Builds the wheel through the sdist and tries it in a clean environment: every committed file of
# the packages must be in it, and it must import and answer from outside the checkout.
#
# Usage: check_wheel.sh PYTHON     PYTHON has `build` and, if it can be had, uv
set -euo pipefail
python=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

installer=pip
if "$python" -m uv --version >/dev/null 2>&1; then
  # Octavo is not to be built with what happens to be in the checkout's environment: both ways
  # build in an isolated one.
  installer=uv
fi
PATH="$(dirname "$python"):$PATH" "$python" -m build --installer "$installer" --outdir "$scratch/dist" . >"$scratch/build.log" 2>&1 ||
  { cat "$scratch/build.log" >&2; exit 1; }
wheel=$(ls "$scratch"/dist/*.whl)
"$python" tools/compare_wheel.py "$wheel"

"$python" -m venv "$scratch/venv"
if [ "$installer" = uv ]; then
  "$python" -m uv pip install --quiet --python "$scratch/venv/bin/python" -c constraints.txt "$wheel"
else
  "$scratch/venv/bin/python" -m pip install --quiet -c constraints.txt "$wheel"
fi
cd "$scratch"
venv/bin/python - <<'PY'
import importlib
import pathlib
import sys

import octavo

assert "jax" not in sys.modules, "importing octavo started JAX"
for name in octavo.__all__:
    getattr(octavo, name)
for folder in ("engine", "models", "pallas_kernels", "server", "sharding"):
    home = pathlib.Path(importlib.import_module(f"octavo.{folder}").__path__[0])
    assert home.is_dir() and not home.is_symlink(), home
    assert "site-packages" in home.parts, home
print(f"octavo {octavo.__version__} imports from {pathlib.Path(octavo.__file__).parent.name}/ of the wheel")
PY
venv/bin/octavo --help >help.txt
grep -q generate help.txt || { cat help.txt >&2; exit 1; }
echo "octavo --help answers"
