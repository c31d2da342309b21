package bpf

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestVM runs the tests of the programs at carriers on a kernel that allows them, in a virtual machine, whose verifier
// is another one.
func TestVM(t *testing.T) {
	gate.Slow(t, gate.VM, "boots a virtual machine")
	gate.WithoutRaceDetector(t, "so do the tests that it runs in the machine")
	tests := []string{
		"TestCarrierWithoutAgent", "TestCarrierChangesAreReported", "TestDarkMarkIsRemoved", "TestSecondCableIsNotLate", "TestLossDoesNotWaitForAgent",
		"TestSettle", "TestVerifierHasRoom",
	}
	binary, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("../../scripts/kernel-vm", "-k", "6.12", "-t", "900", "env", "-C", here, "FARED_CARRIERS=1", gate.Environment+"="+string(gate.Kernel),
		binary, "-test.v", "-test.run=^("+strings.Join(tests, "|")+")$").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range tests {
		if !strings.Contains(string(out), "--- PASS: "+name+" ") {
			t.Errorf("%s has not passed:\n%s", name, out)
		}
	}
}
