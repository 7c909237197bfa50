#!/usr/bin/env bash
# Trains. Without arguments: the CPU quickstart. Arguments are Hydra overrides, as for `headway train`.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec headway train "$@"
