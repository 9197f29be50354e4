#!/bin/bash
# Runs COMMAND where the host's NVIDIA driver is new enough for the CUDA of this image, and says so where it is not: check-driver COMMAND..
# CUDA 13 needs R580. Where the host does not tell its driver's version, such as WSL, CUDA itself will say.
set -euo pipefail
needed=580
told=${NVIDIA_VERSION_FILE:-/proc/driver/nvidia/version}
if [[ -r $told ]]; then
  version=$(grep -oE '[0-9]{3,}\.[0-9]+(\.[0-9]+)?' "$told" | head -n 1)
  if ((${version%%.*} < needed)); then
    echo "the NVIDIA driver of this machine is $version; this image needs R$needed or newer, because it has CUDA 13: update the driver" >&2
    exit 1
  fi
fi
exec "$@"
