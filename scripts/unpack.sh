#!/usr/bin/env bash
# Unpacks packages of a Debian suite, each with the libraries that it needs, into /usr/local/lib/fared-tests/SUITE/PACKAGE, where tests find other versions of
# routers and containerd than the installed ones, and programs that set addresses (internal/testkit/testbed). Nothing is installed or configured. A package that is there is kept.
#
#   unpack.sh SUITE PACKAGE...
set -euo pipefail
suite=$1
shift
root=/usr/local/lib/fared-tests/$suite
missing=()
for package in "$@"; do
  [ -e "$root/$package" ] || missing+=("$package")
done
[ ${#missing[@]} -ne 0 ] || exit 0
if ! command -v apt-get >/dev/null || ! mkdir -p "$root" 2>/dev/null || [ ! -w "$root" ]; then
  echo "unpack: ${missing[*]} of Debian $suite not unpacked into $root, so tests that need them are skipped" >&2
  exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages}
touch "$work/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$work/sources.list"
cat >"$work/apt.conf" <<CONF
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "-";
Dir::State "$work";
Dir::State::lists "$work/lists";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
APT::Sandbox::User "root";
Acquire::Languages "none";
CONF
export APT_CONFIG=$work/apt.conf
apt-get update -qq
for package in "${missing[@]}"; do
  # The rest of what it depends on is for its installation.
  libraries=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$package" |
    grep -E '^(lib|zlib1g)' | sort -u)
  rm -rf "$work/packages" && mkdir "$work/packages"
  # shellcheck disable=SC2086 # one word a package
  (cd "$work/packages" && apt-get download -qq "$package" $libraries)
  for file in "$work"/packages/*.deb; do
    dpkg -x "$file" "$work/root-$package"
  done
  mv "$work/root-$package" "$root/$package"
  echo "unpack: $package of Debian $suite unpacked into $root"
done
