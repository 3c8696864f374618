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
#
# Up to three tests that failed run once more, alone, to tell what is broken from what depends on speed, order or neighbours:
# if all of them pass then, they are named at the end as unstable. The run has failed in either case.
all_tests() { # ARGUMENTS of pytest
    local pytest=("$VENV/bin/python" -m pytest) result=0
    rm -f -- .pytest_cache/v/cache/lastfailed
    "${pytest[@]}" -n 2 --dist loadfile --no-loadscope-reorder --durations=10 "$@" || result=$?
    if [ "$result" -ne 1 ]; then return "$result"; fi
    local failed
    failed="$("$VENV/bin/python" -c 'import json, sys; print("\n".join(json.load(open(sys.argv[1]))))' \
        .pytest_cache/v/cache/lastfailed)" || return 1
    if [ "$(wc -l <<<"$failed")" -gt 3 ]; then return 1; fi
    say "== what failed, once more, alone"
    if "${pytest[@]}" --last-failed --last-failed-no-failures none "$@"; then unstable="$failed"; fi
    return 1
}
unstable=""
check tests all_tests "$@"
printf '\n%s' "$summary"
if [ -n "$unstable" ]; then printf 'unstable, passed when run again, alone:\n%s\n' "$unstable"; fi
exit "$status"
