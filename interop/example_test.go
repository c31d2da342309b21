package interop

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestExampleLeaf verifies that FRR's own parser accepts the example, and rejects it with a
// mistake in it.
func TestExampleLeaf(t *testing.T) {
	netnstest.Require(t, "vtysh")
	example, err := os.ReadFile("../examples/frr-leaf.conf")
	if err != nil {
		t.Fatal(err)
	}
	check := func(text string) error {
		file := filepath.Join(t.TempDir(), "frr.conf")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("vtysh", "-C", "-f", file).CombinedOutput()
		t.Logf("%s", out)
		return err
	}
	if err := check(string(example)); err != nil {
		t.Errorf("FRR refuses examples/frr-leaf.conf: %v", err)
	}
	wrong := strings.Replace(string(example), "bandwidth cumulative", "bandwidth cumulatively", 1)
	if wrong == string(example) {
		t.Fatal("the example does not add bandwidths up")
	}
	if err := check(wrong); err == nil {
		t.Error("FRR takes a file with a mistake in it: this test shows nothing")
	}
}
