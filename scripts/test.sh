#!/usr/bin/env bash
# Tests. `fast` leaves out what starts engines or takes long; further arguments go to pytest, alone they choose the tests.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

say "ruff"
ruff check .
ruff format --check .
say "mypy"
mypy
say "pytest"
# What starts no engine runs on all cores; engines, and tests that count what is left, have the machine to themselves.
if [ "${1:-}" = fast ]; then
    shift
    exec pytest -q -n auto -m "not engine and not alone and not thorough" "$@"
fi
if [ $# -gt 0 ]; then
    exec pytest -q "$@"
fi
pytest -q -n auto -m "not engine and not alone"
exec pytest -q -m "engine or alone"
