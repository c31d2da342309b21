// Package version has the version of this program.
package version

import "runtime/debug"

// version is set by the linker (-X); otherwise String uses the version that the Go toolchain recorded.
var version string

// String returns the version, "v0.1.0" or "devel".
func String() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}
