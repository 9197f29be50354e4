#!/bin/bash
# Before a worker is stopped: wait until no rank of a model runs here, SECONDS at most. drain-worker.sh SECONDS [PROCESS]
set -euo pipefail
process=${2:-ray::smcserve:}
while ((SECONDS < $1)) && grep -aqs "^$process" /proc/[0-9]*/cmdline; do
  sleep 0.2
done
