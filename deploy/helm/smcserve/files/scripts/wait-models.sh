#!/bin/bash
# Waits until every DIRECTORY holds a whole model, which fetch_models.py says of it: wait-models.sh DIRECTORY..
set -euo pipefail
for directory in "$@"; do
  until [[ -e $directory/.complete ]]; do
    ((SECONDS % 60)) || echo "waiting for the job that downloads $directory"
    sleep 1
  done
done
