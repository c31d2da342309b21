#!/usr/bin/env bash
# Builds what a release consists of: for each architecture deb and rpm of fared and fared-lab, the SBOMs of these static binaries and fared-kube, and for all one image in OCI layout and one OpenVEX document;
# libfared's packages for the architecture of this machine; SHA256SUMS. Two runs on the same commit make equal bytes. No Docker, no root, no registry.
#
#   packages.sh [DIR]    DIR: out/packages by default
#
# VERSION   of the packages: by default that of the file VERSION
# ARCHS     "amd64 arm64" by default
# FORMATS   "deb rpm" by default
# PACKAGES  "fared fared-lab sbom image libfared" by default; image includes the OpenVEX document
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C TZ=UTC
unset MAKEFLAGS MFLAGS FARED_SOCKET # VERSION of a calling make is not that of libfared; the pages have the default of --socket
out=$(realpath -m "${1:-out/packages}")
nfpm=github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2 # 2.46 and later need a module that the proxy lacks
sbom=github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.10.0
go=${GO:-go}
read -ra archs <<<"${ARCHS:-amd64 arm64}"
read -ra formats <<<"${FORMATS:-deb rpm}"
parts=" ${PACKAGES:-fared fared-lab sbom image libfared} "
host=$($go env GOHOSTARCH)

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
DATE=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)
VERSION=${VERSION:-$(cat VERSION)}
if [[ ! $VERSION =~ ^[0-9]+\.[0-9]+\.[0-9]+([~+.][a-zA-Z0-9.~+]*)?$ ]]; then
  echo "packages: VERSION $VERSION is not a version such as 0.1.0, or 0.1.1~rc1, which sorts before 0.1.1" >&2
  exit 2
fi
MAINTAINER=${MAINTAINER:-"fared maintainers <maintainers@fared.invalid>"}
export SOURCE_DATE_EPOCH DATE VERSION MAINTAINER ARCH STAGE UNITS=/usr/lib/systemd/system
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out" && mkdir -p "$out"

# build ARCH FOLDER: the binaries, which do not depend on the folder or the state of the checkout.
build() {
  mkdir -p "$2"
  CGO_ENABLED=0 GOARCH=$1 $go build -trimpath -buildvcs=false -tags grpcnotrace \
    -ldflags "-s -w -buildid= -X github.com/fared/fared/internal/version.version=$VERSION" -o "$2/" ./cmd/fared ./cmd/fared-lab ./cmd/fared-kube
}

# package CONFIG FORMAT...: packages of one configuration of nfpm.
package() {
  local format
  for format in "${@:2}"; do
    $go run "$nfpm" package --config "$1" --packager "$format" --target "$out" >"$work/nfpm.log" 2>&1 || { cat "$work/nfpm.log" >&2; exit 1; }
  done
}

[ "$host" = "${archs[0]}" ] || echo "packages: pages and completions come from a binary of $host" >&2
build "$host" "$work/host"
mkdir -p "$work"/man/man{5,7} "$work/man-lab"
"$work/host/fared" man "$work/man/man1" >/dev/null
"$work/host/fared-lab" man "$work/man-lab/man1" >/dev/null
cp packaging/*.5 "$work/man/man5"
cp packaging/*.7 "$work/man/man7"
gzip -9n "$work"/man/*/* "$work"/man-lab/*/*
binaries=()
for ARCH in "${archs[@]}"; do
  STAGE=$work/$ARCH
  mkdir "$STAGE"
  cp -r "$work/man" "$work/man-lab" "$STAGE"
  if [ "$ARCH" = "$host" ]; then cp -r "$work/host" "$STAGE/bin"; else build "$ARCH" "$STAGE/bin"; fi
  "$work/host/fared" completion bash >"$STAGE/fared.bash"
  "$work/host/fared" completion zsh >"$STAGE/_fared"
  "$work/host/fared" completion fish >"$STAGE/fared.fish"
  for program in fared fared-lab fared-kube; do # fared-kube is in the image alone
    [[ $program = fared-kube || $parts != *" $program "* ]] || package packaging/$program.yaml "${formats[@]}"
    [[ $parts != *" sbom "* ]] || $go run "$sbom" bin -json -std -noserial -notimestamp -version "v$VERSION" -output "$out/$program-$VERSION-linux-$ARCH.cdx.json" "$STAGE/bin/$program" \
      2>"$work/sbom.log" || { cat "$work/sbom.log" >&2; exit 1; }
  done
  binaries+=("$ARCH=$STAGE/bin")
  echo "packages: fared $VERSION for $ARCH"
done
if [[ $parts == *" image "* ]]; then
  $go run ./internal/tools/vex -version "$VERSION" -gobgp "$($go list -m -f '{{.Version}}' github.com/osrg/gobgp/v3)" -created "$SOURCE_DATE_EPOCH" >"$out/fared-$VERSION.openvex.json"
  $go -C internal/tools/ociimage run . -version "$VERSION" -created "$SOURCE_DATE_EPOCH" -out "$out/fared-$VERSION-oci.tar" "${binaries[@]}"
fi

ARCH=$host
for format in "${formats[@]}"; do
  [[ $parts == *" libfared "* ]] || continue
  STAGE=$work/libfared-$format
  libdir=/usr/lib64
  [ "$format" = rpm ] || libdir=/usr/lib/$(${CC:-cc} -dumpmachine)
  for part in lib lib/softdev lib/nccl; do
    make --no-print-directory -s -C $part OUT="$STAGE/build" CFLAGS="-O2 -g0 -ffile-prefix-map=$PWD=." PREFIX=/usr LIBDIR="$libdir" DESTDIR="$STAGE/lib" install
  done
  gzip -9n "$STAGE"/lib/usr/share/man/man*/*
  package packaging/libfared.yaml "$format"
done
(cd "$out" && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
echo "packages: $(wc -l <"$out/SHA256SUMS") files in $out, named in SHA256SUMS"
