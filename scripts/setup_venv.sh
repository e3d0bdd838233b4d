#!/usr/bin/env bash
# Usage: setup_venv.sh FOLDER LOCK [LOCK ...]
# Makes the virtual environment FOLDER hold exactly requirements/LOCK.lock and this project, editable. If it already holds any of the
# locks named, unchanged, there is nothing to do (some milliseconds); otherwise the lock it held is renewed, or else the first one installed.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift
stamp=$venv/.jaxpaged-stamp

# Whatever changes what is installed: the lock, the project's own metadata, this script, and the path that the editable install points to.
stamp_of() {
    { cat "requirements/$1.lock" requirements/installer.lock pyproject.toml scripts/setup_venv.sh && pwd; } | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d " " -f 1
}

lock=$1
if [ -f "$stamp" ] && [ -x "$venv/bin/python" ]; then
    read -r held digest _ <"$stamp"
    for candidate in "$@"; do
        [ "$candidate" = "$held" ] && lock=$held
    done
    [ "$lock" = "$held" ] && [ "$digest" = "$(stamp_of "$lock")" ] && exit 0
fi

if ! "$venv/bin/python" -I -c 'import sys, pip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
    python=$(bash scripts/find_python.sh)
    echo "Making $venv with $python ..."
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
echo "Installing requirements/$lock.lock into $venv ..."
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --require-hashes --requirement requirements/installer.lock

# uv does not read pip's settings: hand over the index and the certificates that this machine is set up for.
index=${PIP_INDEX_URL:-$("${pip[@]}" config get global.index-url 2>/dev/null || true)}
certificates=${PIP_CERT:-$("${pip[@]}" config get global.cert 2>/dev/null || true)}
[ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
[ -n "${SSL_CERT_FILE:-}" ] || [ -z "$certificates" ] || export SSL_CERT_FILE=$certificates

uv=("$venv/bin/uv" pip)
# Progress for who watches; a log gets no list of ninety packages.
[ -t 2 ] && quiet= || quiet=--quiet
# Bytecode is written here, once: where PYTHONDONTWRITEBYTECODE is set (in many containers) every start would compile jax from source.
"${uv[@]}" sync $quiet --compile-bytecode --python "$venv/bin/python" --require-hashes "requirements/$lock.lock"
# The build backend is in the lock: offline and without isolation, so that nothing unlocked is ever fetched.
"${uv[@]}" install --quiet --python "$venv/bin/python" --offline --no-deps --no-build-isolation --editable .
"$venv/bin/python" -m compileall -q jaxpaged pallas_kernels server
# Without a C++ compiler there are no CPU kernels, and XLA does their work.
"$venv/bin/python" pallas_kernels/native/build.py
printf '%s %s\n' "$lock" "$(stamp_of "$lock")" >"$stamp"
