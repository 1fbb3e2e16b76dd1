#!/usr/bin/env bash
# Runs servers on a local Ray cluster behind a front, and kills some of them while streams run. Ray gets an
# environment of its own (requirements-ray.txt), whose packages are put beside Octavo's; where it cannot be
# installed, one line says so and nothing is checked.
#
# Usage: check_fleet.sh PYTHON [PYTEST_ARGS…]     PYTHON has Octavo and its tests' packages and, if it can be had, uv
set -euo pipefail
python=$1
shift
dir=${OCTAVO_RAY_VENV:-.venv-ray}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! tools/outside_venv.sh "$python" "$dir" requirements-ray.txt; then
  echo "SKIPPED: Ray could not be installed here, so no fleet was run"
  exit 0
fi
beside=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export OCTAVO_FLEET=1 PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$beside"
exec "$python" -m pytest tests/server/ray/test_fleet.py "$@"
