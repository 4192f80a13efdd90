#!/bin/sh
# Run public clients (SDKs, lm-eval, load generators, a compatibility scanner, a router) against a cluster on the demo
# model.
# Needs .venv (make test makes it) and the package registries of Python and, for two of the clients, Node.
# Usage: scripts/conformance.sh [--home DIR] [CLIENT ...]
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m tests.conformance "$@"
