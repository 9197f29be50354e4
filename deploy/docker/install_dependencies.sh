#!/bin/bash
# Installs a lock into a virtual environment, made if it is not there, which also finds what lies in APP: install_dependencies.sh VENV APP LOCK PACKAGE INDEX SHA256
# PACKAGE is the one that only its project's INDEX has. Without SHA256 it is taken as it comes, which release.sh refuses.
# The environment can run what is in it and build nothing: pip goes once it has done its work.
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
