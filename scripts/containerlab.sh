#!/usr/bin/env bash
# Prints the path of a containerlab for this machine: the installed one, else v0.69.3, built from its Go module into
# ${XDG_CACHE_HOME:-~/.cache}/fared once, with what the labs use: the kinds bridge, host and linux, without topologies from git and files from S3, which
# leaves 438 of 1,083 packages. An ordinary containerlab fails on two kinds of bare machine, which get a special build:
#   modules     no /proc/modules: the kernel has no loadable modules, so all its parts are built in
#   privileged  no CAP_SYS_RESOURCE: Docker cannot start privileged containers; the labs' nodes ask for the capabilities they need
set -euo pipefail
version=v0.69.3
without=()
[ -e /proc/modules ] || without+=(modules)
bounding=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
((0x$bounding >> 24 & 1)) || without+=(privileged) # CAP_SYS_RESOURCE, linux/capability.h

if [ ${#without[@]} -eq 0 ] && command -v containerlab; then
  exit
fi
name=containerlab-$version-labs$(printf -- '-%s' "${without[@]}")
out=${XDG_CACHE_HOME:-${HOME:?}/.cache}/fared/${name%-}
if [ -x "$out" ]; then
  echo "$out"
  exit
fi

echo "containerlab: building $version, without: ${without[*]:-nothing}" >&2
mkdir -p "${out%/*}"
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
module=$(go mod download -json github.com/srl-labs/containerlab@$version | sed -n 's/^[[:space:]]*"Dir": "\(.*\)",$/\1/p')
[ -n "$module" ] || { echo "containerlab: no Go module of $version to be had" >&2; exit 1; }
cp -r "$module" src
chmod -R u+w src
cd src
# edit FILE SED-SCRIPT: changes a file of containerlab, or fails if the file differs from the expected one.
edit() {
  sed -i "$2" "$1"
  if cmp -s "$1" "$module/$1"; then
    echo "containerlab: $1 of $version is not what this script knows" >&2
    exit 1
  fi
}
edit core/register.go '/containerlab\/nodes\//{/nodes\/\(bridge\|host\|linux\)"/!d}; /\.Register(c\.Reg)/{/\t\(bridge\|host\|linux\)\./!d}'
edit nodes/linux/linux.go '/weaveworks\/ignite\/pkg\/operations/d; s/operations\.VMChannels/ignite.VMChannels/'
edit utils/file.go '/minio-go/d; /^\t"context"$/d; /^\t"time"$/d; /case IsS3URL(src):/,/^\tdefault:/{//!d}; s/case IsS3URL(src):/&\n\t\treturn errS3Fetch/'
rm runtime/ignite/*
printf 'package ignite\n\nconst RuntimeName = "ignite"\n\ntype VMChannels struct{ SpawnFinished chan error }\n' >runtime/ignite/ignite.go
printf 'package git\n\nimport "errors"\n\ntype GoGit struct{}\n\nfunc NewGoGit(GitRepo) GoGit { return GoGit{} }\n\nfunc (GoGit) Clone() error { return errors.New("this containerlab fetches nothing from git") }\n' >git/git.go
for lack in "${without[@]}"; do
  case $lack in
    modules) edit utils/kernel_module.go 's|f, err := os.Open("/proc/modules")|&\n\tif os.IsNotExist(err) {\n\t\treturn true, nil\n\t}|' ;;
    privileged) edit runtime/docker/docker.go 's|\(Privileged: *\)true,|\1false,|' ;;
  esac
done
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X github.com/srl-labs/containerlab/cmd/version.Version=${version#v}" -o "$work/containerlab" .
mv "$work/containerlab" "$out.$$" && mv "$out.$$" "$out"
echo "$out"
