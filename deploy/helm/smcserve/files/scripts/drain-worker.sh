#!/bin/bash
# preStop hook of a worker: waits at most SECONDS until no rank of a model runs in this pod. drain-worker.sh SECONDS [PROCESS]
set -euo pipefail
process=${2:-ray::smcserve:}
while ((SECONDS < $1)) && grep -aqs "^$process" /proc/[0-9]*/cmdline; do
  sleep 0.2
done
