#!/usr/bin/env bash
# Installs the tests' requirements beyond Go: routing daemons for interoperability, iproute2, protoc, clang for the BPF object, Docker and debootstrap
# for the labs in containers. Starts dockerd if none runs. Without root or apt it lists the missing packages; the tests that need them then skip,
# or fail if FARED_REQUIRE_ALL=1. The argument "vm" adds the packages that scripts/kernel-vm needs.
set -euo pipefail
declare -A needs=([promtool]=prometheus [vtysh]=frr [birdc]=bird2 [gobgpd]=gobgpd [ip]=iproute2 [ping]=iputils-ping [ethtool]=ethtool [gcc]=gcc [protoc]=protobuf-compiler [clang-14]=clang-14 [llvm-strip-14]=llvm-14 [tcpdump]=tcpdump [bpftool]=bpftool [tshark]=tshark [iperf3]=iperf3 [valgrind]=valgrind [pkg-config]=pkgconf [python3]=python3 [chromium]=chromium [rpm]=rpm [setarch]=util-linux [/usr/include/infiniband/verbs.h]=libibverbs-dev
  [docker]=docker.io [debootstrap]=debootstrap [/usr/share/keyrings/debian-archive-keyring.gpg]=debian-archive-keyring
  [ibv_rc_pingpong]=ibverbs-utils [ib_write_bw]=perftest [ucx_perftest]=ucx-utils
  [/usr/include/rdma/rdma_cma.h]=librdmacm-dev [rping]=rdmacm-utils [fi_pingpong]=libfabric-bin
  [/usr/include/bpf/bpf_helpers.h]=libbpf-dev [/usr/lib/python3/dist-packages/torch]=python3-torch)
if [ "${1:-}" = vm ]; then
  needs+=([qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [cpio]=cpio [xz]=xz-utils [modprobe]=kmod [ndctl]=ndctl
    [ib_write_bw]=perftest [ucx_perftest]=ucx-utils [rdma]=iproute2 [/etc/libibverbs.d/rxe.driver]=ibverbs-providers)
fi
missing=()
for tool in "${!needs[@]}"; do
  command -v "$tool" >/dev/null || [ -e "$tool" ] || [ -x "/usr/sbin/$tool" ] || missing+=("${needs[$tool]}")
done

install() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "deps: missing: $* (install them by these Debian package names)" >&2
    return
  fi
  # Packages must not start their daemons: the tests start them in separate namespaces.
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}
[ ${#missing[@]} -eq 0 ] || install "${missing[@]}"

# The labs in containers need a Docker daemon that answers.
docker info >/dev/null 2>&1 && exit
if [ "$(id -u)" != 0 ] || ! command -v dockerd >/dev/null; then
  echo "deps: no Docker daemon answers: start one, or add this user to the group docker" >&2
  exit
fi
log=/var/log/dockerd.log
setsid dockerd >>"$log" 2>&1 </dev/null &
for _ in {1..60}; do
  docker info >/dev/null 2>&1 && exit
  sleep 0.5
done
echo "deps: dockerd does not answer; it logs to $log, which ends" >&2
tail -5 "$log" >&2
