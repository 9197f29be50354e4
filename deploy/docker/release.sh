#!/bin/bash
# Builds an image reproducibly: release.sh cpu|cuda|router IMAGE:TAG PINS [--print]
# PINS is a file of NAME=VALUE: BASE with its digest (docker buildx imagetools inspect BASE), and the SHA256 of the package that is not in
# the lock file (the index has it in the package's link). --print prints the command without running it.
set -euo pipefail
kind=$1 tag=$2 pins=$3 print=${4:-}
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
source "$pins"
case $kind in
  cpu) needed=(BASE TORCH_SHA256) ;;
  cuda) needed=(BASE JIT_CACHE_SHA256) ;;
  router) needed=(BASE) ;;
  *) echo "kind $kind; allowed: cpu, cuda, router" >&2 && exit 2 ;;
esac
arguments=()
for name in "${needed[@]}"; do
  value=${!name:-}
  shape='^[0-9a-f]{64}$'
  [[ $name == BASE ]] && shape='^[^@]+:[^@]+@sha256:[0-9a-f]{64}$'
  if [[ ! $value =~ $shape ]]; then
    echo "$name='$value' in $pins; allowed: $([[ $name == BASE ]] && echo 'an image with its digest, NAME:TAG@sha256:..' || echo '64 hex digits')" >&2
    exit 2
  fi
  arguments+=(--build-arg "$name=$value")
done
if [[ -n $(git status --porcelain) ]]; then
  echo "the checkout has changes that no commit holds; a release is built from a commit" >&2
  exit 2
fi
arguments+=(--build-arg "REVISION=$(git rev-parse HEAD)" --build-arg "CREATED=$(git log -1 --format=%cI)")
arguments+=(--build-arg "SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)")
command=(docker build -f "deploy/docker/Dockerfile.$kind" -t "$tag" "${arguments[@]}" .)
[[ $print == --print ]] && printf '%s\n' "${command[@]}" && exit
exec "${command[@]}"
