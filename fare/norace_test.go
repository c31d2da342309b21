//go:build !race

package fare

const raceEnabled = false
