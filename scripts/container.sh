#!/usr/bin/env bash
# Entry point of the Docker image (see Dockerfile): its arguments are those of `nanovllm`.
#
# A published port does not reach the loopback of a container, so `serve` listens on all addresses here. It never does
# so without a key: NANOVLLM_API_KEY or --api-key, else a random one, which the log shows.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

if [ "${1:-}" = serve ]; then
    shift
    if [ -z "${NANOVLLM_API_KEY:-}" ] && [[ " $* " != *" --api-key"[\ =]* ]]; then
        NANOVLLM_API_KEY="$("$VENV/bin/python" -c 'import secrets; print(secrets.token_urlsafe(24))')"
        export NANOVLLM_API_KEY
        say "NANOVLLM_API_KEY is not set: clients need the key $NANOVLLM_API_KEY, made for this run"
    fi
    set -- serve --host 0.0.0.0 "$@"
fi
exec "$VENV/bin/python" -m nanovllm "$@"
