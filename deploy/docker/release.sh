#!/bin/bash
# Builds the images of a release reproducibly: release.sh KINDS REPOSITORY PINS [ARGUMENT..]
# KINDS: cpu, cuda, router, or several with commas. PINS is a file of NAME=VALUE: the base images with their digests
# (docker buildx imagetools inspect BASE), and the SHA256 of each package that is not in a lock file (the index has it in the package's
# link). ARGUMENTs are those of `docker buildx bake`: --push, or --print to see what would be built.
set -euo pipefail
kinds=$1 pins=$3
export REPOSITORY=$2
shift 3
cd "$(dirname "$0")/../.."
set -a
# shellcheck source=/dev/null
source "$pins"
set +a
IFS=, read -ra targets <<< "$kinds"
for kind in "${targets[@]}"; do
  case $kind in
    cpu) needed=(PYTHON_BASE TORCH_SHA256) ;;
    cuda) needed=(CUDA_BASE JIT_CACHE_SHA256) ;;
    router) needed=(PYTHON_BASE) ;;
    *) echo "kind '$kind'; allowed: cpu, cuda, router" >&2 && exit 2 ;;
  esac
  for name in "${needed[@]}"; do
    value=${!name:-}
    shape='^[0-9a-f]{64}$'
    [[ $name == *_BASE ]] && shape='^[^@]+:[^@]+@sha256:[0-9a-f]{64}$'
    if [[ ! $value =~ $shape ]]; then
      echo "$name='$value' in $pins; allowed: $([[ $name == *_BASE ]] && echo 'an image with its digest, NAME:TAG@sha256:..' || echo '64 hex digits')" >&2
      exit 2
    fi
  done
done
if [[ -n $(git status --porcelain) ]]; then
  echo "the checkout has changes that no commit holds; a release is built from a commit" >&2
  exit 2
fi
REVISION=$(git rev-parse HEAD) CREATED=$(git log -1 --format=%cI) SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export REVISION CREATED SOURCE_DATE_EPOCH
exec docker buildx bake -f deploy/docker/docker-bake.hcl "$@" "${targets[@]}"
