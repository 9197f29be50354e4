#!/bin/bash
# Waits until fetch_models.py has marked every DIRECTORY as complete: wait-models.sh DIRECTORY..
set -euo pipefail
for directory in "$@"; do
  until [[ -e $directory/.complete ]]; do
    ((SECONDS % 60)) || echo "waiting for the job that downloads $directory"
    sleep 1
  done
done
