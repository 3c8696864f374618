# Sourced by demo.sh, test.sh and the Dockerfile: a Python, a virtual environment in .venv, this package in it.
#
#   ensure_installed EXTRA     EXTRA is "", "server", "server,gpu" or "test"; afterwards $VENV/bin/python has the package
#
# What is done is not done again: a stamp in .venv, written after a successful install, holds the hash of
# pyproject.toml and the Python version. An interrupted install leaves no stamp and is repeated.
# NANOVLLM_PYTHON names the Python to use; no sudo, nothing outside this folder (and pip's own cache) is touched, but for
#
#   ensure_chromium            for tests/browser: by apt, if we are root already (a container); never a reason to fail

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON_RANGE="3.10 to 3.14" # what torch below 2.14 has wheels for

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

python_fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; }

# Prints the first Python that fits and can make virtual environments.
find_python() {
    local candidate found="" without_venv=""
    for candidate in "${NANOVLLM_PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10 python3.14 python; do
        command -v -- "$candidate" >/dev/null 2>&1 || continue
        found="$found $candidate ($("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo broken))"
        python_fits "$candidate" || continue
        # Debian and Ubuntu ship venv without ensurepip: it imports, then fails half way.
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            command -v -- "$candidate"
            return
        fi
        without_venv="${without_venv:-$candidate}"
    done
    if [ -n "$without_venv" ]; then
        local version
        version="$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        fail "$without_venv cannot make virtual environments (venv or ensurepip is missing)." \
            "On Debian or Ubuntu: apt install python$version-venv. Or name another Python in NANOVLLM_PYTHON."
    fi
    fail "needs Python $PYTHON_RANGE; found:${found:- none}." \
        "Install one, or name it: NANOVLLM_PYTHON=/path/to/python3.12 $0"
}

wanted_stamp() { # of the environment's own Python, so that another one makes a new stamp
    "$VENV/bin/python" - "$ROOT/pyproject.toml" <<'PYTHON'
import hashlib, platform, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest(), platform.python_version())
PYTHON
}

is_installed() { # EXTRA; the environment for tests also serves the demo
    local stamp wanted
    wanted="$(wanted_stamp 2>/dev/null)" || return 1
    for stamp in "$VENV/.installed-$1" "$VENV/.installed-test"; do
        if [ -f "$stamp" ] && [ "$(cat -- "$stamp")" = "$wanted" ]; then return 0; fi
    done
    return 1
}

ensure_installed() {
    local extra="$1" python target
    if is_installed "$extra"; then return; fi # first: the question below imports pip, half a second
    if ! { python_fits "$VENV/bin/python" && "$VENV/bin/python" -m pip --version; } >/dev/null 2>&1; then
        python="$(find_python)" || exit 1
        if [ -e "$VENV" ]; then say "$VENV is incomplete or of another Python: making it anew"; fi
        say "making a virtual environment in $VENV with $python"
        "$python" -m venv --clear -- "$VENV" || fail "$python -m venv failed; see above"
    fi
    say "installing into $VENV (the first time this downloads torch: some minutes)"
    target="$ROOT${extra:+[$extra]}"
    local quiet=(--quiet)
    if [ -t 2 ]; then quiet=(); fi # on a terminal pip shows its progress
    rm -f -- "$VENV/.installed-$extra"
    "$VENV/bin/python" -m pip install --disable-pip-version-check ${quiet[@]+"${quiet[@]}"} --editable "$target" >&2 ||
        fail "pip could not install (see above); run this again when the cause is gone"
    wanted_stamp >"$VENV/.installed-$extra.new"
    mv -- "$VENV/.installed-$extra.new" "$VENV/.installed-$extra"
}

# Tests of the page skip without a browser, and only they. NANOVLLM_APT=no keeps apt out of it.
ensure_chromium() {
    local name
    for name in chromium chromium-browser google-chrome-stable google-chrome; do
        if command -v -- "$name" >/dev/null 2>&1; then return 0; fi
    done
    if [ "$EUID" -eq 0 ] && [ "${NANOVLLM_APT:-yes}" != no ] && command -v apt-get >/dev/null 2>&1; then
        say "installing chromium with apt, for the tests of the page"
        local get=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=60)
        # The lists of packages may be missing or old, as in most containers
        if "${get[@]}" install -y --no-install-recommends chromium >/dev/null 2>&1; then return 0; fi
        if "${get[@]}" update >/dev/null 2>&1 &&
            "${get[@]}" install -y --no-install-recommends chromium >/dev/null 2>&1; then return 0; fi
    fi
    say "no Chromium (apt install chromium): the tests of the page will be skipped"
}
