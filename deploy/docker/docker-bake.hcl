# The images. From the root of a checkout, with a builder that can attest (`docker buildx create --use`):
#   REPOSITORY=registry.example/smcserve docker buildx bake -f deploy/docker/docker-bake.hcl --push
# builds and pushes all three, `.. cpu` one of them; each with the list of its packages (SBOM) and how it was built (provenance).
# `--print` shows what would be built, `--check` lints the Dockerfiles. A release is built by deploy/docker/release.sh, which pins the rest.

# Tags are REPOSITORY:VERSION-cpu and so on, as the chart expects them.
variable "REPOSITORY" {
  default = "smcserve"
}

variable "VERSION" {
  default = "0.1.0"
}

# Of the commit; in the images' labels.
variable "REVISION" {
  default = ""
}

variable "CREATED" {
  default = ""
}

# Base images; release.sh requires their digests.
variable "PYTHON_BASE" {
  default = "python:3.12.13-slim-bookworm"
}

variable "CUDA_BASE" {
  default = "nvidia/cuda:13.0.0-base-ubuntu24.04"
}

# Hashes of the packages that no lock holds. Empty: not checked.
variable "TORCH_SHA256" {
  default = ""
}

variable "JIT_CACHE_SHA256" {
  default = ""
}

group "default" {
  targets = ["cpu", "cuda", "router"]
}

target "_image" {
  context = "."
  attest  = ["type=sbom", "type=provenance,mode=max"]
  args = {
    VERSION  = VERSION
    REVISION = REVISION
    CREATED  = CREATED
  }
}

target "cpu" {
  inherits   = ["_image"]
  dockerfile = "deploy/docker/Dockerfile.cpu"
  tags       = ["${REPOSITORY}:${VERSION}-cpu"]
  args = {
    BASE         = PYTHON_BASE
    TORCH_SHA256 = TORCH_SHA256
  }
}

target "cuda" {
  inherits   = ["_image"]
  dockerfile = "deploy/docker/Dockerfile.cuda"
  tags       = ["${REPOSITORY}:${VERSION}-cuda"]
  args = {
    BASE             = CUDA_BASE
    JIT_CACHE_SHA256 = JIT_CACHE_SHA256
  }
}

target "router" {
  inherits   = ["_image"]
  dockerfile = "deploy/docker/Dockerfile.router"
  tags       = ["${REPOSITORY}:${VERSION}-router"]
  args = {
    BASE = PYTHON_BASE
  }
}
