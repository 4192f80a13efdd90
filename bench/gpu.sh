#!/bin/sh
# Everything that needs a GPU, in one call of some minutes: parity, limits, benchmarks, the cluster, memory checks.
# Usage: bench/gpu.sh [PYTHON [WHEELS]]; WHEELS is a folder of packages that PYTHON lacks, installed beside it.
# A part that fails does not stop the others; the exit status says whether any did.
set -u
cd "$(dirname "$0")/.."
python=${1:-python3}
out=${OUT:-$(mktemp -d)}
failed=0
if [ -n "${2:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$out/site" "$2"/*.whl || exit 1
    export PYTHONPATH="$out/site"
fi
part() {
    limit=$1 name=$2
    shift 2
    echo "== $name"
    timeout "$limit" "$@" || { echo "== $name: FAILED ($?)"; failed=1; }
}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || exit 1
part 150 "parity: kernels, decoder, graphs" "$python" -m pytest -q -p no:cacheprovider \
    tests/unit/test_cuda_attention.py tests/unit/test_cuda_decoder.py tests/unit/test_cuda_sampling.py \
    tests/unit/test_host_pages.py
part 120 "parity in bfloat16" "$python" -m bench.gpu.parity
part 200 "worker beside the machine's limits" "$python" -m bench.gpu.worker
model="$out/model"
part 60 "checkpoint" "$python" -m bench.gpu.checkpoint --shape qwen3-0.6b --out "$model"
part 150 "cluster: offline benchmark" "$python" -m bench.gpu.offline --model "$model" --repeats 2
part 120 "cluster beside a bare loop" "$python" -m bench.hidden --model "$model" --batch 1 --batch 64 --batch 256
if command -v compute-sanitizer >/dev/null; then
    part 120 "compute-sanitizer" compute-sanitizer --error-exitcode 1 "$python" -m bench.gpu.parity --small
fi
rm -rf "$model" "$out/site"
exit "$failed"
