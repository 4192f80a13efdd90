#!/bin/sh
# Everything that needs a GPU, in one call of less than ten minutes (six on an H100): parity, limits, benchmarks, the
# cluster, memory checks, a profile.
# Usage: bench/gpu.sh [PYTHON [WHEELS]]; WHEELS is a folder of packages that PYTHON lacks, installed beside it. With
# flashinfer-python among them (and apache-tvm-ffi), its attention is checked and measured too.
# BUDGET is the time for all of it in seconds; the limits of all parts but FlashInfer's add up to it. A part that fails,
# or finds no time left, does not stop the others; the last line says which, and the exit status is 1 then.
set -u
cd "$(dirname "$0")/.."
python=${1:-python3}
out=${OUT:-$(mktemp -d)}
started=$(date +%s)
budget=${BUDGET:-590}
failed=""
export FLASHINFER_CUDA_ARCH_LIST="${FLASHINFER_CUDA_ARCH_LIST:-9.0a}"
if [ -n "${2:-}" ]; then
    if timeout 60 "$python" -m pip install -q --no-index --no-deps --no-compile --target "$out/site" "$2"/*.whl; then
        export PYTHONPATH="$out/site${PYTHONPATH:+:$PYTHONPATH}"
    else
        failed="${failed:+$failed, }packages of $2"
    fi
fi
needed() { # by whom, and the modules
    find='import importlib.util as u, sys; print(*(n for n in sys.argv[2:] if not u.find_spec(n)))'
    missing=$("$python" -c "$find" "$@")
    [ -z "$missing" ] || echo "== missing, needed by $1: $missing"
}
part() {
    limit=$1 name=$2
    shift 2
    begun=$(date +%s)
    left=$((budget - begun + started))
    if [ "$left" -lt 5 ]; then
        echo "== $name: NOT RUN, the time is over"
        failed="${failed:+$failed, }$name (not run)"
        return
    fi
    [ "$limit" -lt "$left" ] || limit=$left
    echo "== $name"
    timeout -k 5 "$limit" "$@" || {
        code=$?
        echo "== $name: FAILED ($code)"
        failed="${failed:+$failed, }$name ($code)"
    }
    echo "== $name: $(($(date +%s) - begun)) s"
}
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader || exit 1
needed "every part" torch triton numpy click msgpack safetensors
needed "the unit tests" pytest pytest_timeout xdist hypothesis tokenizers transformers
needed "profiles of the worker and of compilation" llguidance
needed "clusters" zmq llguidance uvloop jinja2 tokenizers transformers tqdm
# eight processes compile side by side; of products with codes, those in bfloat16 and whole models
part 125 "parity: kernels, decoder, graphs, draws" "$python" -m pytest -q -p no:cacheprovider -n 8 --dist worksteal \
    tests/worker/test_cuda_attention.py tests/worker/test_shared_pages.py tests/worker/test_cuda_decoder.py \
    tests/worker/test_cuda_draws.py tests/worker/test_cuda_sampling.py tests/worker/test_host_pages.py \
    tests/worker/test_cuda_few_rows.py tests/worker/test_cuda_linear.py -k "not (test_cuda_linear and (torch.float or any_shape))"
part 75 "parity in bfloat16" "$python" -m bench.gpu.parity
part 25 "attention: Triton, shared pages, int8" "$python" -m bench.gpu.attention --backend triton
part 70 "quantized weights" "$python" -m bench.gpu.quantized
part 15 "sampling" "$python" -m bench.gpu.sampling
part 25 "no compilation while serving" "$python" -m bench.gpu.compiles
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("flashinfer") is None)'; then
    # its compiler takes most of this; what it made is kept for the cluster
    part 120 "attention: FlashInfer" "$python" -m bench.gpu.attention --backend flashinfer
else
    echo "== attention: FlashInfer is not installed"
fi
part 50 "worker beside the machine's limits, profiles" "$python" -m bench.gpu.worker
model="$out/model"
part 15 "checkpoint" "$python" -m bench.gpu.checkpoint --shape qwen3-0.6b --out "$model"
part 50 "cluster: offline benchmark" "$python" -m bench.gpu.offline --model "$model" --repeats 3
part 45 "cluster beside a bare loop" "$python" -m bench.hidden --model "$model" --batch 1 --batch 256 --repeats 1
if command -v compute-sanitizer >/dev/null; then
    # errors that CUDA's functions return are torch's to handle, which asks for what may not be there
    sanitizer="compute-sanitizer --error-exitcode 1 --report-api-errors no"
    part 35 "compute-sanitizer: decoder" $sanitizer "$python" -m bench.gpu.parity --small
    # every tensor has memory of its own, whose end can be seen; graphs need torch's allocator
    own="env PYTORCH_NO_CUDA_MEMORY_CACHING=1 $sanitizer"
    part 15 "compute-sanitizer: attention, shared pages" $own "$python" -m bench.gpu.attention --backend triton --small
    part 25 "compute-sanitizer: sampling" $own "$python" -m bench.gpu.sampling --small
    part 18 "compute-sanitizer: quantized weights" $own "$python" -m bench.gpu.quantized --small
else
    echo "== compute-sanitizer: not installed"
fi
rm -rf "$model" "$out/site"
echo "== $(($(date +%s) - started)) s in all, failed: ${failed:-none}"
[ -z "$failed" ]
