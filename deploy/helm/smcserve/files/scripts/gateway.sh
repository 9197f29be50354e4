#!/bin/bash
# Waits for the Ray node of this pod, then starts the gateway: gateway.sh ADDRESS LOCK FLAG..
# The gateway holds LOCK until it exits; drain-head.sh waits for the lock.
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
