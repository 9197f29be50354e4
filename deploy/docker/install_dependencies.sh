#!/bin/bash
# Installs the packages of LOCK into VENV, which is created if needed, and adds APP to its import path:
#   install_dependencies.sh VENV APP LOCK PACKAGE INDEX SHA256
# PACKAGE is only available from INDEX, its project's own index. Without SHA256 its hash is not checked; release.sh requires one.
# pip is removed at the end, so the image cannot install packages.
set -euo pipefail
venv=$1 app=$2 lock=$3 package=$4 index=$5 sha256=$6
[[ -d $venv ]] || python3 -m venv "$venv"
install=("$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check --no-deps --only-binary=:all:)
"${install[@]}" --require-hashes -r "$lock"
own=$(mktemp)
echo "$package${sha256:+ --hash=sha256:$sha256}" > "$own"
"${install[@]}" ${sha256:+--require-hashes} --index-url "$index" -r "$own"
rm "$own"
echo "$app" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/smcserve.pth"
"$venv/bin/python" -m pip uninstall --yes pip
