#!/bin/bash
# Waits for the Ray node of this pod, then serves: gateway.sh ADDRESS LOCK FLAG..
# LOCK is held until the gateway has ended, however it ends; drain-head.sh waits for it.
set -euo pipefail
address=$1 lock=$2
shift 2
exec 9> "$lock"
flock 9
until ray health-check --address "$address" > /dev/null 2>&1; do
  echo "waiting for Ray at $address"
  sleep 1
done
exec smcserve serve --ray-address "$address" "$@"
