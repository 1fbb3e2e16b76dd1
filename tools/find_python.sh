#!/usr/bin/env bash
# Prints the path of the newest supported Python interpreter that really runs and can make a
# virtual environment. With arguments (e.g. `find_python.sh 3.11`), considers those versions only.
#
# A candidate counts only after it has run: a version manager's shim may stand on PATH for a
# version that is not active, and some distributions ship Python without venv's ensurepip.
set -euo pipefail

supported=("$@")
if [ ${#supported[@]} -eq 0 ]; then
  # 3.14 comes last: newer than what is tested, better than nothing.
  supported=(3.13 3.12 3.11 3.14)
fi

probe='import ensurepip, sys, sysconfig, venv
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
print("%d.%d" % sys.version_info[:2], sys.executable)'

candidates() {
  local version=$1 root name
  type -aP "python$version" || true
  root=${PYENV_ROOT:-$HOME/.pyenv}/versions
  for name in $(ls "$root" 2>/dev/null | grep -E "^${version//./\\.}\.[0-9]+$" | sort -t. -k3,3nr); do
    echo "$root/$name/bin/python3"
  done
  type -aP python3 || true
  type -aP python || true
}

for version in "${supported[@]}"; do
  while IFS= read -r candidate; do
    found=$("$candidate" -c "$probe" 2>/dev/null) || continue
    if [ "${found%% *}" = "$version" ]; then
      echo "${found#* }" # the interpreter itself, not a shim that may answer otherwise elsewhere
      exit 0
    fi
  done < <(candidates "$version")
done

echo "no usable Python among: ${supported[*]} (looked on PATH and in pyenv's versions; a candidate" \
  "must run and have venv). Install one, or name it: make PYTHON=/path/to/python3.13" >&2
exit 1
