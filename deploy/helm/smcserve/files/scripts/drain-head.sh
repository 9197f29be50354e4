#!/bin/bash
# preStop hook of Ray's head: waits at most SECONDS for the gateway of this pod to exit. drain-head.sh SECONDS LOCK
set -euo pipefail
flock -w "$1" "$2" true || echo "the gateway did not end within $1 s"
