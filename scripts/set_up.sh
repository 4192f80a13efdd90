#!/bin/sh
# Make .venv and install Rhizome into it, editable, with the exact versions of constraints.txt.
# Usage: scripts/set_up.sh PYTHON [EXTRAS], such as: scripts/set_up.sh python3 '[test]'
#
# Where PYTHON has a PyTorch built for CUDA, the environment uses that one and never installs another: the pins of
# PyTorch and of what must fit to it give way to what is there.
set -eu
cd "$(dirname "$0")/.."
python=$1
extras=${2:-}
has_cuda_torch='import sys, torch; sys.exit(torch.version.cuda is None)'

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "Python 3.11, 3.12 or 3.13 is needed; name one with: make PYTHON=python3.12" >&2
    exit 1
}
if [ ! -x .venv/bin/python ]; then
    if "$python" -c "$has_cuda_torch" 2>/dev/null; then
        "$python" -m venv --system-site-packages .venv
        # A virtual environment made inside another one sees the system's packages, not those of its parent.
        .venv/bin/python -c "$has_cuda_torch" 2>/dev/null || rm -rf .venv
    fi
    [ -x .venv/bin/python ] || "$python" -m venv .venv
fi

pins=constraints.txt
if grep -qi 'include-system-site-packages = true' .venv/pyvenv.cfg; then
    pins=.venv/constraints.txt
    grep -Ev '^(torch|triton|setuptools|transformers|tokenizers|safetensors|huggingface_hub|numpy|scipy)==' constraints.txt > "$pins"
    .venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> "$pins"
fi
install() {
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c "$pins" "$@" || {
        echo "Installing failed; $pins holds $(grep '^torch==' "$pins"), pyproject.toml what Rhizome works with." >&2
        exit 1
    }
}
# PyTorch first and by itself, so that nothing else decides which one it is.
install setuptools torch
install --no-build-isolation -e ".$extras"
# Kernels for CPUs are compiled at the first start; where nothing does that, a package with a compiler is installed.
if ! { command -v c++ || command -v g++ || command -v clang++; } >/dev/null; then
    (install --no-build-isolation -e ".[compiler]") || echo "Going on without a compiler: torch will compute, slower." >&2
fi

# Compiled here is what the processes import: the rest of PyTorch and transformers would take a minute more. Where
# PYTHONDONTWRITEBYTECODE is set, as in many containers, every start would compile it again.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c '
import client, gateway_proc.main, launch, scheduler_proc.event_loop, tokenizer_proc.detokenizer, tokenizer_proc.tokenizer
import worker_proc.main, worker_proc.startup, worker_proc.watch
'
