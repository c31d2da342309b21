#!/usr/bin/env bash
# Builds the labs' images where no registry is needed: fared:local (bin/fared and bin/fared-lab in a FROM-scratch image), fared-frr:local and
# fared-bird:local (Debian's packages, by debootstrap). One that is up to date is kept: its label has the checksum of its inputs.
# With the name of another Debian suite, only fared-debian-SUITE:local, a machine with that suite's systemd and routers.
#
#   images.sh [SUITE]
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${1:-bookworm}
packages="frr bird2 iproute2 tini systemd"
images=containerlab/images
label=fared.inputs

fail() {
  echo "images: $1" >&2
  exit 1
}
missing() { fail "$1: scripts/deps.sh installs and starts what is needed"; }
docker info >/dev/null 2>&1 || missing "no Docker daemon answers"
[ "$suite" != bookworm ] || { [ -x bin/fared ] && [ -x bin/fared-lab ]; } || fail "bin/fared or bin/fared-lab is missing: run make build first"
# Without buildx docker knows the classic builder only, and warns unless this variable chooses it.
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0

# inputs TEXT FILE...: a short hash of them.
inputs() { { echo "$1" && cat "${@:2}"; } | sha256sum | cut -c1-16; }

# current TAG HASH: whether the image is there and was made from just that.
current() {
  [ "$(docker image inspect -f "{{index .Config.Labels \"$label\"}}" "$1" 2>/dev/null)" = "$2" ] || return 1
  echo "images: $1 is up to date"
}

# build TAG HASH CONTEXT [OPTION...]: builds the Dockerfile.
build() {
  current "$1" "$2" && return
  local said
  said=$(docker build --label "$label=$2" -t "$1" "${@:4}" "$3" 2>&1) || { echo "$said" >&2; fail "$1 cannot be built"; }
  echo "images: $1 built"
}

base=fared-debian-$suite:local
if [ "$suite" = bookworm ]; then
  base=fared-debian:local
  build fared:local "$(inputs '' $images/fared/Dockerfile bin/fared bin/fared-lab)" bin -f $images/fared/Dockerfile
fi
made=$(inputs "$suite $packages" scripts/images.sh)
if ! current "$base" "$made"; then
  command -v debootstrap >/dev/null || missing "debootstrap is missing"
  [ "$(id -u)" = 0 ] || fail "debootstrap needs root"
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  echo "images: installing $packages of Debian $suite, which takes a minute"
  # apt installs the packages, because debootstrap resolves no pre-dependency among those it includes, as that of Debian 13's systemd.
  # shellcheck disable=SC2086 # one word a package
  if ! { debootstrap --variant=minbase "$suite" "$root" && chroot "$root" apt-get update -q &&
    DEBIAN_FRONTEND=noninteractive chroot "$root" apt-get install -y -q --no-install-recommends $packages; } >"$root.log" 2>&1; then
    tail -20 "$root.log" >&2
    fail "Debian $suite cannot be installed, see $root.log"
  fi
  rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,info,locale,man}/*
  tar -C "$root" -c . | docker import --change "LABEL $label=$made" - "$base" >/dev/null
  echo "images: $base built"
fi
[ "$suite" = bookworm ] || exit 0
for router in frr bird; do
  build fared-$router:local "$(inputs "$made" $images/$router/*)" $images/$router --build-arg BASE="$base"
done
# The images that these have replaced.
docker image prune -f --filter "label=$label" >/dev/null
