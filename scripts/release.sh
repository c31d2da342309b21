#!/usr/bin/env bash
# The packages of the tag that is checked out, in out/packages: from a clean tree, with the version of the file VERSION and a section of the changelog, built twice in clones at separate paths and equal.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() {
  echo "release: $1" >&2
  exit 1
}
tag=$(git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null) || fail "no tag such as v0.1.0 is checked out: git tag -a v0.1.0, or git checkout v0.1.0"
[ -z "$(git status --porcelain)" ] || fail "the tree is not clean: commit or remove what git status shows"
version=$(cat VERSION)
[ "${tag#v}" = "$version" ] || fail "the tag $tag differs from the file VERSION, which has $version: change VERSION before the tag, or name the tag v$version"
grep -qxF "## ${tag#v}" CHANGELOG.md || fail "CHANGELOG.md has no section \"## ${tag#v}\": write one from the lines under Unreleased"
! awk '/^## /{on = $0 == "## Unreleased"} on && /^- /' CHANGELOG.md | grep -q . || fail "CHANGELOG.md has lines under Unreleased: move them to the section \"## ${tag#v}\", or raise VERSION"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for n in 1 2; do
  git clone -q --no-hardlinks . "$work/clone-$n"
  git -C "$work/clone-$n" checkout -q "$tag"
  VERSION=${tag#v} "$work/clone-$n/scripts/packages.sh" "$work/packages-$n"
done
diff -r "$work/packages-1" "$work/packages-2" || fail "two builds of $tag differ"
rm -rf out/packages
mkdir -p out
cp -r "$work/packages-1" out/packages
echo "release: $tag in out/packages; two builds are equal"
