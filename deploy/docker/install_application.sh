#!/bin/bash
# Builds the checkout around this file, and installs it beside its dependencies: install_application.sh VENV APP
# What builds it is pinned, too: code made for gRPC by a newer generator does not start with the gRPC that is installed.
set -euo pipefail
venv=$1 app=$2
cd "$(dirname "$0")/../.."
build=$(mktemp -d)
python3 -m venv "$build"
pip=("$build/bin/python" -m pip --no-cache-dir --disable-pip-version-check)
"${pip[@]}" install --no-deps --only-binary=:all: --require-hashes -r deploy/docker/locks/build.txt
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$build/wheels" .
"${pip[@]}" --python "$venv/bin/python" install --no-deps --no-index --target "$app" "$build"/wheels/*.whl
rm -r "$build"
