#!/bin/sh
# Start a cluster on the demo model with two tensor-parallel workers, stream one answer, shut down.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
home=$(mktemp -d "${TMPDIR:-/tmp}/rhizome-demo.XXXXXX")
launcher=
clean_up() {
    if [ -n "$launcher" ]; then
        kill -TERM "$launcher" 2>/dev/null || true
        wait "$launcher" || true
    fi
    rm -rf "$home"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

"$python" launch.py --tp 2 --port 0 --run-dir "$home/run" &
launcher=$!
until "$python" client.py --run-dir "$home/run" --wait 1 --stats >"$home/stats" 2>&1; do
    kill -0 "$launcher" 2>/dev/null || exit 1 # it has said why
done
prompt="Return a copy of the string"
echo
echo "> $prompt"
"$python" client.py --run-dir "$home/run" --temperature 0.6 --top-p 0.9 --seed 1 --max-tokens 100 "$prompt"
echo
kill -TERM "$launcher"
wait "$launcher"
launcher=
echo "The cluster has shut down."
