#!/usr/bin/env bash
# Installs what the live comparisons with transformers need (requirements-parity.txt) where a CPU
# build of torch is what pip would choose, and does nothing elsewhere: on most Linux machines pip
# would fetch gigabytes of CUDA libraries, and the tests that want torch skip without it.
#
# Usage: install_parity.sh PYTHON
set -euo pipefail
python=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pip=("$python" -m pip --disable-pip-version-check)
if "$python" -c "import torch, accelerate" 2>/dev/null; then
  exit 0
fi
torch=$(grep '^torch==' requirements-parity.txt)
chosen=$("${pip[@]}" install --dry-run --ignore-installed --no-deps -qq --report - "$torch" 2>/dev/null |
  "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null) || chosen=none
case $chosen in
  *+cpu) "${pip[@]}" install -qq -c constraints.txt -r requirements-parity.txt && echo "installed torch $chosen" ;;
  *) echo "no CPU build of torch for this Python (pip would choose: $chosen): parity tests will skip" ;;
esac
