//go:build race

package wecmp

const raceEnabled = true
