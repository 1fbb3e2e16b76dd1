#!/usr/bin/env bash
# Installs torch for the parity tests where a CPU build of it is what pip would choose, and does
# nothing elsewhere: on most Linux machines pip would fetch gigabytes of CUDA libraries, and the
# tests that want torch skip without it.
#
# Usage: install_torch_cpu.sh PYTHON
set -euo pipefail
python=$1 torch=torch==2.13.0
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pip=("$python" -m pip --disable-pip-version-check)
if "$python" -c "import torch" 2>/dev/null; then
  exit 0
fi
chosen=$("${pip[@]}" install --dry-run --no-deps -qq --report - "$torch" 2>/dev/null |
  "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null) || chosen=none
case $chosen in
  *+cpu) "${pip[@]}" install -qq -c constraints.txt "$torch" && echo "installed torch $chosen" ;;
  *) echo "no CPU build of torch for this Python (pip would choose: $chosen): parity tests will skip" ;;
esac
