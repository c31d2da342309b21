//go:build race

package race

// Enabled is true when the race detector watches.
const Enabled = true
