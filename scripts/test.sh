#!/usr/bin/env bash
# Tests. `fast` leaves out what starts engines or takes long; further arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
if [ "${1:-}" = fast ]; then
    shift
    exec pytest -q -m "not engine and not thorough" "$@"
fi
exec pytest -q "$@"
