#!/bin/bash
# Installs the checkout around this file into a new virtual environment, with the versions of constraints.txt: install.sh VENV
# The environment can run the service and build nothing: pip goes once it has done its work.
set -euo pipefail
venv=$1
cd "$(dirname "$0")/../.."
python3 -m venv "$venv"
"$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt .
"$venv/bin/python" -m pip uninstall --yes pip
