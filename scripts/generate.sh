#!/usr/bin/env bash
# Makes every generated file from its source; with --check, fails when a committed one differs.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v protoc >/dev/null; then
  echo "generate: skipped: protoc is missing (Debian package protobuf-compiler)" >&2
  [ "${1:-}" = --check ] && [ "${FARED_REQUIRE_ALL:-}" != 1 ]
  exit
fi
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
go build -o "$tools/" google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
out=.
if [ "${1:-}" = --check ]; then
  out=$tools/out
  mkdir -p "$out/api"
fi
PATH="$tools:$PATH" protoc -I api --go_out="$out/api" --go_opt=paths=source_relative \
  --go-grpc_out="$out/api" --go-grpc_opt=paths=source_relative api/*/v1/*.proto
if [ "$out" = . ]; then
  go generate ./...
  exit 0
fi
# A comment contains protoc's version; another protoc that generates the same code is fine.
for f in api/*/v1/*.pb.go; do
  if ! diff -q <(grep -v '^//.*protoc ' "$f") <(grep -v '^//.*protoc ' "$out/$f") >/dev/null; then
    echo "generate: $f is stale: run 'make generate' and commit" >&2
    exit 1
  fi
done
