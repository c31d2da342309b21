package wrong

import (
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

var (
	_ = gate.Package{NoGoroutine: true, Computes: reason}
	_ = gate.Package{Computes: "again"}
)

const reason = "not a literal"

func helper(t *testing.T) { gate.Slow(t, gate.Packets, "of a helper") }

func TestPart(t *testing.T) {
	gate.Slow(t, gate.Part("packets"), "computed")
	go helper(t)
}
