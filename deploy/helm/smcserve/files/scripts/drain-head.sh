#!/bin/bash
# Before Ray's head is stopped: wait until the gateway beside it has ended, SECONDS at most. drain-head.sh SECONDS LOCK
set -euo pipefail
flock -w "$1" "$2" true || echo "the gateway did not end within $1 s"
