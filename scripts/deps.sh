#!/usr/bin/env bash
# Installs what the tests need beyond Go, as Debian packages, and starts dockerd if no Docker daemon runs. Without root or apt it lists the missing
# packages, and the tests that need them are skipped with the reason, or fail if FARED_REQUIRE_ALL=1.
#
#   deps.sh [PART...]    what the gate needs, and in addition what these parts of make test-slow need, or all
set -euo pipefail

# needs: a program or file, and its package.
declare -A needs=([promtool]=prometheus [vtysh]=frr [birdc]=bird2 [gobgpd]=gobgpd [ip]=iproute2 [nft]=nftables [iptables]=iptables [ping]=iputils-ping [ethtool]=ethtool [gcc]=gcc
  [protoc]=protobuf-compiler [clang-14]=clang-14 [llvm-strip-14]=llvm-14 [tcpdump]=tcpdump [bpftool]=bpftool [tshark]=tshark [iperf3]=iperf3 [valgrind]=valgrind
  [pkg-config]=pkgconf [python3]=python3 [setarch]=util-linux [clang-format-14]=clang-format-14 [shellcheck]=shellcheck [groff]=groff-base [pyflakes3]=pyflakes3 [/usr/include/bpf/bpf_helpers.h]=libbpf-dev
  [docker]=docker.io [debootstrap]=debootstrap [/usr/share/keyrings/debian-archive-keyring.gpg]=debian-archive-keyring
  [/usr/include/infiniband/verbs.h]=libibverbs-dev [ibv_rc_pingpong]=ibverbs-utils [rping]=rdmacm-utils [ib_write_bw]=perftest [ucx_perftest]=ucx-utils)
for part in "$@"; do
  case $part in
    c | all) needs+=([/usr/lib/python3/dist-packages/torch]=python3-torch [/usr/lib/python3/dist-packages/pyverbs]=python3-pyverbs [fio]=fio [qperf]=qperf
      [mpicc.openmpi]=libopenmpi-dev [mpirun.openmpi]=openmpi-bin [mpicc.mpich]=libmpich-dev [mpirun.mpich]=mpich) ;;&
    models | all) needs+=([etcd]=etcd-server) ;;&
    prometheus | all) needs+=([chromium]=chromium) ;;&
    systemd | all) needs+=([rpm]=rpm) ;;&
    vm | all) needs+=([qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [cpio]=cpio [xz]=xz-utils [modprobe]=kmod [ndctl]=ndctl
      [fi_pingpong]=libfabric-bin [rdma]=iproute2 [/etc/libibverbs.d/rxe.driver]=ibverbs-providers) ;;&
  esac
done
missing=()
for tool in "${!needs[@]}"; do
  command -v "$tool" >/dev/null || [ -e "$tool" ] || [ -x "/usr/sbin/$tool" ] || missing+=("${needs[$tool]}")
done

install() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "deps: not installed, so tests that need them are skipped; on Debian, as root: apt-get install $*" >&2
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

# Other versions of routers than the installed ones.
case " $* " in *" interop "* | *" all "*)
  "$(dirname "$0")/unpack.sh" trixie frr bird2 bird3 gobgpd openbgpd
  "$(dirname "$0")/unpack.sh" bookworm openbgpd
  ;;
esac
# A container runtime with NRI, and a root file system for containers.
case " $* " in *" kernel "* | *" all "*)
  "$(dirname "$0")/unpack.sh" trixie containerd
  "$(dirname "$0")/unpack.sh" bookworm coreutils
  ;;
esac
# Programs that set addresses, which would set this machine's if they were installed.
case " $* " in *" systemd "* | *" all "*)
  "$(dirname "$0")/unpack.sh" bookworm netplan.io ifupdown ifupdown2
  "$(dirname "$0")/unpack.sh" trixie netplan-generator ifupdown ifupdown2
  ;;
esac
case " $* " in *" vm "* | *" all "*)
  [ "$(id -u)" != 0 ] || for kernel in 6.12 6.1; do "$(dirname "$0")/kernel-vm" -n -k $kernel; done
  ;;
esac

# The labs in containers need a Docker daemon that answers.
docker info >/dev/null 2>&1 && exit
if [ "$(id -u)" != 0 ] || ! command -v dockerd >/dev/null; then
  echo "deps: no Docker daemon answers, so tests in containers are skipped: start one, or add this user to the group docker" >&2
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
