#!/bin/bash
# Waits for the Ray node of this pod, then serves: gateway.sh FLAGS ADDRESS LOCK, flags one a line in the file FLAGS.
# LOCK is held until the gateway has ended, however it ends; drain-head.sh waits for it.
set -euo pipefail
flags=$1 address=$2 lock=$3
mapfile -t arguments < "$flags"
exec 9> "$lock"
flock 9
until ray health-check --address "$address" > /dev/null 2>&1; do
  echo "waiting for Ray at $address"
  sleep 1
done
exec smcserve serve --ray-address "$address" "${arguments[@]}"
