//go:build !race

package race

// Enabled is true if the race detector is enabled.
const Enabled = false
