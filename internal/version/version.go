// Package version has the version of this program.
package version

import (
	_ "embed"
	"runtime/debug"
	"strings"
)

// number is the version of the sources, "0.1.0" and a line feed. The file VERSION of the root folder is a link to it,
// because go:embed reads only files below the folder of the package.
//
//go:embed VERSION
var number string

// version is set by the linker (-X): make build adds the commit to the file's, packages may have another one. Empty
// means number.
var version string

// digits is the length of a commit in String.
const digits = 12

// String returns the version: "0.1.0" in packages, "0.1.0+c111131a2b3c" in a build of a commit, with "-dirty" for
// changed sources. Without a version of the linker the commit is the one that the Go toolchain recorded, if it did.
func String() string {
	if version != "" {
		return version
	}
	var settings []debug.BuildSetting
	if info, ok := debug.ReadBuildInfo(); ok {
		settings = info.Settings
	}
	return withCommit(settings)
}

func withCommit(settings []debug.BuildSetting) string {
	v, commit, dirty := strings.TrimSpace(number), "", ""
	for _, s := range settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "-dirty"
		}
	}
	if commit == "" {
		return v
	}
	return v + "+" + commit[:min(digits, len(commit))] + dirty
}
