#!/usr/bin/env bash
# Installs what the tests need beyond Go: routing daemons to interoperate with, iproute2, protoc, clang for the BPF object. Without root or apt it
# says what is missing; the tests that need it then skip, or fail where FARED_REQUIRE_ALL=1.
set -euo pipefail
declare -A needs=([vtysh]=frr [birdc]=bird2 [gobgpd]=gobgpd [ip]=iproute2 [ping]=iputils-ping [ethtool]=ethtool [gcc]=gcc [protoc]=protobuf-compiler [clang-14]=clang-14 [llvm-strip-14]=llvm-14 [tcpdump]=tcpdump [bpftool]=bpftool
  [/usr/include/bpf/bpf_helpers.h]=libbpf-dev)
missing=()
for tool in "${!needs[@]}"; do
  command -v "$tool" >/dev/null || [ -e "$tool" ] || [ -x "/usr/sbin/$tool" ] || missing+=("${needs[$tool]}")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "deps: missing: ${missing[*]} (install them by these Debian package names)" >&2
  exit 0
fi
# Packages must not start their daemons: the tests start their own, in namespaces of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
