#!/bin/bash
# Runs COMMAND if the host's NVIDIA driver supports the image's CUDA version, otherwise fails: check-driver COMMAND..
# CUDA 13 needs R580. Hosts that do not report a driver version, such as WSL, are not checked.
set -euo pipefail
needed=580
version_file=${NVIDIA_VERSION_FILE:-/proc/driver/nvidia/version}
if [[ -r $version_file ]]; then
  version=$(grep -oE '[0-9]{3,}\.[0-9]+(\.[0-9]+)?' "$version_file" | head -n 1)
  if ((${version%%.*} < needed)); then
    echo "the NVIDIA driver of this machine is $version; this image needs R$needed or newer, because it has CUDA 13: update the driver" >&2
    exit 1
  fi
fi
exec "$@"
