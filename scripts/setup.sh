#!/usr/bin/env bash
# Make the virtual environment that `make demo` and `make test` run in: scripts/setup.sh .venv
#   PYTHON  interpreter to start from (python3)
#   TORCH   what pip is asked for as torch (torch==2.13.0)
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: scripts/setup.sh VENV}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "saccade needs Python 3.11 or later; $python is $("$python" --version). Choose one with PYTHON=..." >&2
    exit 1
}

pins=constraints.txt
venv_options=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    # torch, and the Triton, numpy and CUDA libraries that go with it, must fit the driver: a torch that already sees the
    # GPU stays, and none of them is pinned
    pins=$(mktemp)
    trap 'rm -f "$pins"' EXIT
    grep -vE '^(torch|triton|numpy|setuptools|cuda-bindings|nvidia-[a-z0-9-]+)==' constraints.txt >"$pins"
    if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        venv_options+=(--system-site-packages)
        torch=torch
    fi
fi

echo "making $venv with $("$python" --version): a minute or two"
"$python" -m venv "${venv_options[@]}" "$venv"
pip=("$venv/bin/python" -m pip install --quiet)
"${pip[@]}" --constraint "$pins" 'pip>=25.1' # the first that knows dependency groups
# torch first and alone: pip then takes the wheel that is on hand, and nothing later replaces it
"${pip[@]}" --constraint "$pins" "$torch"
# the compiler for CUDA C++: of torch's CUDA version, or of 12, which knows every architecture of ours; torch for CPUs brings none
cuda=$("$venv/bin/python" -c 'import torch; print("cu13" if (torch.version.cuda or "").startswith("13") else "cu12")')
"${pip[@]}" --constraint "$pins" --group dev --editable ".[demo,$cuda]"
# the loader of the kernels hub, without what it checks signatures with (15 packages), which a local folder does not need
if [ "$(uname -s)" = Linux ]; then
    "${pip[@]}" --constraint "$pins" --no-deps kernels
fi
# diffusers, whose blocks a test runs, with what it asks for at import: its other requirements are here or are not needed
"${pip[@]}" --constraint "$pins" --no-deps diffusers requests certifi charset-normalizer idna urllib3
# the Triton that the newest torch brings, in a folder of its own: tests compile every kernel under it too
if [ "$(uname -s)" = Linux ] && [ "$torch" != torch ]; then
    "${pip[@]}" --no-deps --upgrade --target "$venv/triton-newest" triton==3.9.0
fi
