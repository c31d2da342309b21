//go:build !race

package wecmp

const raceEnabled = false
