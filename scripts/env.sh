# Sourced by train.sh and test.sh: makes .venv from the lock file when it is missing or out of date, then
# activates it. Needs Python 3.11 or 3.12 with venv; no root, no GPU, no compiler, no account.
#
# HEADWAY_PYTHON  the interpreter to build .venv with (default: the first of python3.11, python3.12, python3)
# HEADWAY_LOCK    cpu or gpu (default: gpu where `nvidia-smi` lists a device)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # an engine start without bytecode takes 47 s, with it 22 s
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\033[1m[headway]\033[0m %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${HEADWAY_PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "Headway needs Python 3.11 or 3.12 with the venv module; looked for: ${HEADWAY_PYTHON:-python3.11 python3.12 python3}"
    return 1
}

ensure_env() {
    local lock=${HEADWAY_LOCK:-} stamp=.venv/headway.stamp want python log=.venv/install.log
    if [ -z "$lock" ]; then
        if nvidia-smi -L 2>/dev/null | grep -q GPU; then lock=gpu; else lock=cpu; fi
    fi
    [ -f "requirements/$lock.txt" ] || { say "HEADWAY_LOCK must be cpu or gpu, not '$lock'"; return 1; }
    # The folder is part of the stamp: a moved .venv points at another checkout.
    want=$(cat "requirements/$lock.txt" pyproject.toml <(pwd) | sha256sum | cut -d' ' -f1)
    if [ "$(cat $stamp 2>/dev/null)" != "$want" ]; then
        python=$(find_python)
        say "setting up .venv from requirements/$lock.txt (about 2.5 minutes, 4.5 GB; details in $log)"
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        rm -f $stamp
        say "1/3 torch, with what its wheel needs"
        install "$(grep '^torch==' "requirements/$lock.txt")"
        say "2/3 $(grep -c == "requirements/$lock.txt") locked packages"
        DS_BUILD_OPS=0 install --no-deps -r "requirements/$lock.txt"
        say "3/3 headway itself"
        install --no-deps --no-build-isolation -e .
        echo "$want" > $stamp
        say "environment ready"
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
}

install() {
    if ! .venv/bin/python -m pip install "$@" >> .venv/install.log 2>&1; then
        say "pip install $* failed:"
        tail -15 .venv/install.log >&2
        return 1
    fi
}

ensure_env
