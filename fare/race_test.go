//go:build race

package fare

const raceEnabled = true
