#!/usr/bin/env bash
# Has clients and frameworks that nobody here wrote use a live server: chats, tools, structured
# output, Responses, Messages, embeddings. They get environments of their own
# (requirements-http-clients.txt; with --all also requirements-http-clients-more.txt, and npm's packages
# in benchmarks/clients/npm); where one cannot be made, a line says so and its clients are not run.
#
# Usage: check_clients.sh PYTHON [--all] [OPTION…]     PYTHON has Octavo and, if it can be had, uv;
#   options are those of benchmarks/clients/run.py
set -euo pipefail
python=$1
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-http-clients more=.venv-http-clients-more npm=.venv-npm-clients
if ! tools/outside_venv.sh "$python" "$venv" requirements-http-clients.txt; then
  echo "SKIPPED: the clients could not be installed here, so none was run"
  exit 0
fi
options=(--python "$venv/bin/python")
case " $* " in
  *" --all "*)
    if tools/outside_venv.sh "$python" "$more" requirements-http-clients-more.txt; then
      options+=(--more-python "$more/bin/python")
    else
      echo "SKIPPED: further clients could not be installed here"
    fi
    if ! command -v npm >/dev/null || ! command -v node >/dev/null; then
      echo "SKIPPED: there is no npm here, so none of its clients was run"
    else
      mkdir -p "$npm"
      cp benchmarks/clients/npm/* "$npm"
      if npm --prefix "$npm" ci --no-audit --no-fund --loglevel error; then
        options+=(--npm "$npm")
      else
        echo "SKIPPED: npm's clients could not be installed here"
      fi
    fi
    ;;
esac
"$python" -m benchmarks.clients.run "${options[@]}" "$@"
