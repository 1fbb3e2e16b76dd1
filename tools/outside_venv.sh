#!/usr/bin/env bash
# Builds or refreshes an environment for programs that nobody here wrote, beside Octavo's own. A
# second call is quick: the environment is stamped with what it was built from. Fails where the
# programs cannot be installed.
#
# Usage: outside_venv.sh PYTHON DIR REQUIREMENTS     PYTHON has uv, if it can be had
set -euo pipefail
python=$1 dir=$2 requirements=$3

wanted=$(cksum <"$requirements")
if [ "$(cat "$dir/.stamp" 2>/dev/null)" = "$wanted" ] && "$dir/bin/python" -c "" 2>/dev/null; then
  exit 0
fi
rm -rf "$dir"
"$python" -m venv "$dir"
if "$python" -m uv --version >/dev/null 2>&1; then
  install=("$python" -m uv pip install --quiet --python "$dir/bin/python")
else
  install=("$dir/bin/python" -m pip --disable-pip-version-check install --quiet)
fi
if ! timeout 600 "${install[@]}" -r "$requirements"; then
  rm -rf "$dir"
  exit 1
fi
echo "$wanted" >"$dir/.stamp"
