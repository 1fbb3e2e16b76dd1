#!/usr/bin/env bash
# Checks deploy/kubernetes/ against the schemas of Kubernetes' own kinds, in an environment that has
# them (requirements-manifests.txt); where that cannot be installed, one line says so and nothing is
# checked.
#
# Usage: check_manifests.sh PYTHON [ARGS...]     PYTHON has Octavo and, if it can be had, uv; ARGS as
#                                                of check_manifests.py
set -euo pipefail
python=$1 dir=.venv-manifests
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! tools/outside_venv.sh "$python" "$dir" requirements-manifests.txt; then
  echo "SKIPPED: Kubernetes' schemas could not be installed here, so no manifest was checked"
  exit 0
fi
"$dir/bin/python" tools/check_manifests.py "$@"
