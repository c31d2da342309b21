package declared

import (
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

var _ = gate.Package{Computes: "waits for no timer", HostNetwork: "a port of the host"}

func TestQuick(t *testing.T) {}

func TestSlow(t *testing.T) { gate.Slow(t, gate.Packets, "10^6 packets") }

func TestVariants(t *testing.T) {
	gate.Needed(t, "the promise")
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			if family == "IPv6" {
				gate.Slow(t, gate.Kernel, "the other family")
			}
			if gate.Count(t, gate.Models, 10, 1000) < 10 {
				t.Error("too few")
			}
		})
	}
}

func TestPlain(t *testing.T) { gate.WithoutRaceDetector(t, "one goroutine") }

func Example() {
	// Output:
}

func TestLacks(t *testing.T) { t.Skip("no such tool") }

func testHelper() {}
