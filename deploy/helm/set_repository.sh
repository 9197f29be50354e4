#!/bin/bash
# Writes the repository of a release's images into a copy of the chart, so that it installs as it is: set_repository.sh CHART REPOSITORY
set -euo pipefail
chart=$1 repository=$2
sed -i "/^image:/,/^  repository:/ s|^  repository: .*|  repository: $repository|" "$chart/values.yaml" "$chart/files/values.yaml"
sed -i "s#^| \`image.repository\` | \`\"\"\`#| \`image.repository\` | \`\"$repository\"\`#" "$chart/README.md"
grep -Fqx "  repository: $repository" "$chart/values.yaml"
cmp "$chart/values.yaml" "$chart/files/values.yaml"
