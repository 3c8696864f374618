#!/usr/bin/env bash
# From a fresh clone to an answer:  scripts/demo.sh "What is the capital of France?" [options of nanovllm generate]
# Makes .venv, installs, fetches the default model, streams the answer, prints speed. Later runs only answer.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

ensure_installed ""
if [ $# -eq 0 ]; then set -- "What is the capital of France?"; fi
exec "$VENV/bin/python" -m nanovllm generate "$@"
