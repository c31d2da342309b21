// Package user has a test of a function that its own package's tests do not run.
package user

import (
	"testing"

	"sample"
)

func TestUnreached(t *testing.T) {
	if got := sample.Unreached(1, 2); got != 3 {
		t.Errorf("Unreached(1, 2) = %d", got)
	}
}
