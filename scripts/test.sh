#!/usr/bin/env bash
# All checks from a fresh clone: format, lint, types, tests.  scripts/test.sh [arguments of pytest]
# Every check runs even if one before it failed; the exit code is 0 only if all passed.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

ensure_installed test
ensure_chromium
cd -- "$ROOT"

summary=""
status=0
check() { # NAME COMMAND...
    local name="$1" started=$SECONDS result=passed
    shift
    say "== $name"
    "$@" || { result=FAILED; status=1; }
    summary="$summary$(printf '%-8s %s in %d s' "$name" "$result" $((SECONDS - started)))"$'\n'
}

check format "$VENV/bin/python" -m ruff format --check --quiet .
check lint "$VENV/bin/python" -m ruff check .
check types "$VENV/bin/python" -m mypy
# Whole files go to two processes: most tests are small and use one core. In the order of collection, where the files that
# take longest are first (tests/conftest.py); the scheduler's own order puts files of few tests last, however long they take.
check tests "$VENV/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
printf '\n%s' "$summary"
exit "$status"
