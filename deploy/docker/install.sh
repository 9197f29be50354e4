#!/bin/bash
# Installs the checkout around this file into a new virtual environment, with the versions of constraints.txt: install.sh VENV [EXTRA]
# The environment can run the service and build nothing: pip goes once it has done its work.
set -euo pipefail
venv=$1
extra=${2:-}
cd "$(dirname "$0")/../.."
python3 -m venv "$venv"
"$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ".${extra:+[$extra]}"
if [ "$extra" = gpu ]; then
    # flashinfer's kernels, compiled: the image has no compiler for them. They are in the project's own index alone.
    version=$(sed -n 's/^flashinfer-python==//p' constraints.txt)
    "$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
        --index-url https://flashinfer.ai/whl/cu130 "flashinfer-jit-cache==$version"
fi
"$venv/bin/python" -m pip uninstall --yes pip
