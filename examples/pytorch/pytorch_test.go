// Package pytorch tests the example: an unmodified training of PyTorch through failures of leaves.
package pytorch

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestPyTorch trains a model of a million parameters with four ranks on four servers, without and with failures of
// leaves. run.sh compares the final weights and the gradients of all steps and ranks bit by bit, and awaits steps while
// a leaf is down. FARED_PYTORCH_STEPS is the number of steps of a longer training, in which leaves fail every few
// seconds; it writes out/pytorch.svg.
func TestPyTorch(t *testing.T) {
	gate.Slow(t, gate.C, "two trainings of four ranks")
	netnstest.Require(t, "tc", "bash", "nsenter", "/usr/lib/python3/dist-packages/torch")
	netnstest.Folder(t)
	drawing := filepath.Join(t.TempDir(), "steps.svg")
	steps, settings := "40", []string{"OUTAGES=1", "DOWN=0", "UP=0"}
	if n := os.Getenv("FARED_PYTORCH_STEPS"); n != "" {
		steps, settings, drawing = n, nil, "../../out/pytorch.svg"
		if err := os.MkdirAll(filepath.Dir(drawing), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("bash", "run.sh", binary.Fared(t), steps)
	cmd.Env = append(append(os.Environ(), "SVG="+drawing), settings...)
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^4 ranks, 2 runs, [0-9]+ failures: equal weights [0-9a-f]{32} gradients [0-9a-f]{32}$`).Match(out) {
		t.Error("the weights are not reported as equal")
	}
	failures := regexp.MustCompile(`(?m)^(leaf[0-3]) was down for ([0-9]+) steps$`).FindAllSubmatch(out, -1)
	if len(failures) == 0 {
		t.Error("no leaf has failed and returned")
	}
	checkDrawing(t, drawing, failures)
}

// checkDrawing checks that a drawing is XML, and marks each failure of a leaf.
func checkDrawing(t *testing.T, path string, failures [][][]byte) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	marks := map[string]int{}
	for decoder := xml.NewDecoder(strings.NewReader(string(text))); ; {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if data, ok := token.(xml.CharData); ok {
			marks[string(data)]++
		}
	}
	want := map[string]int{}
	for _, f := range failures {
		want["p"+strings.TrimPrefix(string(f[1]), "leaf")]++
	}
	for plane, n := range want {
		if marks[plane] < n {
			t.Errorf("the drawing marks %d failures of plane %s, want %d", marks[plane], plane, n)
		}
	}
}
