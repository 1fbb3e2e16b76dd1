#!/usr/bin/env bash
# Runs a command of Python's with Ray. Ray gets an environment of its own (requirements-ray.txt), whose packages are
# put beside Octavo's; where it cannot be installed, one line says so and nothing is run.
#
# Usage: with_ray.sh PYTHON WORDS…     PYTHON has Octavo and, if it can be had, uv
set -euo pipefail
python=$1
dir=${OCTAVO_RAY_VENV:-.venv-ray}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! tools/outside_venv.sh "$python" "$dir" requirements-ray.txt; then
  echo "SKIPPED: Ray could not be installed here, so no fleet was run"
  exit 0
fi
beside=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export OCTAVO_FLEET=1 PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$beside"
exec "$@"
