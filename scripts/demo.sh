#!/usr/bin/env bash
set -euo pipefail
if [ "${1:-}" = "-h" ] || [ "${1:-}" = "--help" ]; then
    cat <<'END'
From a fresh clone to an answer:  scripts/demo.sh "What is the capital of France?" [options of nanovllm generate]
Makes .venv, installs, fetches the default model, streams the answer, prints speed. Later runs only answer.

  scripts/demo.sh --serve [options of nanovllm serve]     an OpenAI-compatible server and its page instead; prints
                                                          both addresses. --no-events: the page cannot watch the engine

Once it is installed, .venv/bin/nanovllm generate --help and .venv/bin/nanovllm serve --help list the options.
END
    exit
fi
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

if [ "${1:-}" = "--serve" ]; then
    shift
    ensure_installed server
    exec "$VENV/bin/python" -m nanovllm serve --events "$@"
fi
ensure_installed ""
if [ $# -eq 0 ]; then set -- "What is the capital of France?"; fi
exec "$VENV/bin/python" -m nanovllm generate "$@"
