package rdmatest_test

import "github.com/fared/fared/internal/testkit/gate"

var _ = gate.Package{
	WithoutRaceDetector: "simulates the network in one goroutine, and does a hundredth of the cases with it",
	Computes:            "waits in virtual time",
}
