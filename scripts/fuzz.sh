#!/usr/bin/env bash
# Runs every fuzzer of the module for the given time each (default 20s).
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-20s}
found=0
while IFS=: read -r file fuzzer; do
  found=1
  echo "== $(dirname "$file") $fuzzer"
  go test -run '^$' -fuzz "^$fuzzer\$" -fuzztime "$time" "./$(dirname "$file")"
done < <(git ls-files '*_test.go' | xargs grep -oE '^func Fuzz[A-Za-z0-9_]+' /dev/null | sed 's/func //')
[ $found = 1 ] || { echo "fuzz: no fuzzer found" >&2; exit 1; }
