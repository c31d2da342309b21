#!/usr/bin/env bash
# The rules of api/buf.yaml: buf lint, and buf breaking against api/baseline.binpb.gz. buf's plugins for protoc make the same checks and are compiled with
# two thirds of the packages of buf, which has clients of Docker and of registries.
#
#   lint-api.sh FOLDER VERSION    FOLDER: that of buf's commands as a Go package
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v protoc >/dev/null; then
  echo "lint-api: skipped: protoc is missing (Debian package protobuf-compiler)" >&2
  [ "${FARED_REQUIRE_ALL:-}" != 1 ]
  exit
fi
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
GOBIN=$tools ${GO:-go} install "$1/protoc-gen-buf-lint@$2" "$1/protoc-gen-buf-breaking@$2"
export PATH=$tools:$PATH
protoc -I api --buf-lint_out="$tools" --buf-lint_opt='{"input_config":"api/buf.yaml","timeout":600000000000}' api/*/v1/*.proto
protoc -I api --buf-breaking_out="$tools" --buf-breaking_opt='{"against_input":"api/baseline.binpb.gz","input_config":"api/buf.yaml","timeout":600000000000}' api/*/v1/*.proto
