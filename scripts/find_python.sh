#!/usr/bin/env bash
# Prints the path of a Python 3.12 or 3.13 that can make a virtual environment; else one sentence on what to install, and exit code 2.
# Tried in turn: $PYTHON, the names on PATH, pyenv's versions that are installed but not activated, and what uv can install in a minute.
set -u

# A name on PATH proves nothing (pyenv's shims answer "command not found", Debian's python3 may lack ensurepip), so each is run.
# Free-threaded builds are passed over: many wheels are not built for them.
check='
import sys, sysconfig, venv, ensurepip
fits = (3, 12) <= sys.version_info[:2] < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(sys.executable if fits else "")
'

try() {
    local found
    found=$("$1" -I -c "$check" 2>/dev/null) && [ -n "$found" ] && printf '%s\n' "$found"
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is no Python 3.12 or 3.13 with venv and ensurepip; looking further." >&2
fi

for candidate in python3.13 python3.12 python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23]*/bin/python3; do
    try "$candidate" && exit 0
done

if command -v uv >/dev/null && command -v timeout >/dev/null && timeout 60 uv python install 3.12 >&2; then
    try "$(uv python find 3.12 2>/dev/null)" && exit 0
fi

echo "jaxpaged needs Python 3.12 or 3.13 with the modules venv and ensurepip: install python3.12 and python3.12-venv (Debian, Ubuntu)," \
    "python@3.12 (Homebrew) or uv, or name another interpreter with PYTHON=/path/to/python3." >&2
exit 2
