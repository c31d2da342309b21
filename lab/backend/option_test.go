package backend

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// TestNamed verifies that options have the names of a command in wrapped and joined errors, also next to values that
// look like options, and that the error still wraps the original.
func TestNamed(t *testing.T) {
	inner := NewOptionError("{Rate} %s: use {Netns}", "{Rate} 5 %")
	err := errors.Join(errors.New("first"), fmt.Errorf("line 3: %w", inner))
	if got, want := err.Error(), "first\nline 3: Rate {Rate} 5 %: use Netns"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	named := Named(err, func(field string) string { return "--" + strings.ToLower(field) })
	if got, want := named.Error(), "first\nline 3: --rate {Rate} 5 %: use --netns"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if !errors.Is(named, inner) {
		t.Error("the original error is lost")
	}
}
