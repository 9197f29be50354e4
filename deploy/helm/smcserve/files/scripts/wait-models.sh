#!/bin/bash
# Waits until fetch_models.py has marked every DIRECTORY as complete, and says how far it is: wait-models.sh DIRECTORY..
set -euo pipefail
for directory in "$@"; do
  until [[ -e $directory/.complete ]]; do
    if ((SECONDS % 10 == 0)); then
      have=$({ du -sk "$directory" 2> /dev/null || echo 0; } | cut -f 1)
      total=$(cat "$directory/.total" 2> /dev/null || true)
      how_far="$((have / 1024)) MiB"
      [[ -z $total ]] || how_far="$((have / 1024)) of $((total / 1024)) MiB, $((100 * have / total))%"
      echo "waiting for the job that downloads $directory: $how_far"
    fi
    sleep 1
  done
done
