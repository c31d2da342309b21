package nccl

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testlog"
)

// gpuCheck runs scripts/gpu-check, and returns its output and exit status.
func gpuCheck(t *testing.T, environment []string, args ...string) (string, int) {
	t.Helper()
	cmd := exec.Command("../../scripts/gpu-check", args...)
	cmd.Env = append(os.Environ(), environment...)
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// TestGPUCheckRefuses checks the messages and exit codes of wrong options and of a machine that lacks something.
func TestGPUCheckRefuses(t *testing.T) {
	netnstest.Tools(t, "bash", "ip", "tc", "sysctl", "nsenter")
	missing := "has no PyTorch: name a Python that has it by --python"
	if os.Geteuid() != 0 {
		missing = "it needs root, for network namespaces: sudo scripts/gpu-check"
	}
	for args, want := range map[string]struct {
		text   string
		status int
	}{
		"--help":              {"usage: gpu-check [OPTION]...", 0},
		"--gpus":              {"--gpus is not an option (gpu-check --help explains)", 2},
		"--rate":              {"--rate needs a value", 2},
		"--rate 9":            {"--rate 9: write a number from 10 to 8000", 2},
		"--max-bytes 1G":      {"--max-bytes 1G: write a number from 262144 to 4294967296", 2},
		"--networks share,ib": {"--networks ib: write share, verbs, equal or socket", 2},
		"--python false":      {missing, 3},
	} {
		if out, status := gpuCheck(t, nil, strings.Fields(args)...); status != want.status || !strings.Contains(out, want.text) {
			t.Errorf("gpu-check %s: exit code %d, want %d and %q:\n%s", args, status, want.status, want.text, out)
		}
	}
}

// programs returns a folder as that of make build and make lib.
func programs(t *testing.T) string {
	t.Helper()
	netnstest.Tools(t, "/usr/include/infiniband/verbs.h")
	lib := ""
	for _, made := range [][]string{{"softdev"}, {"nccl"}, {"nccl", "sockets.so"}} {
		lib = cbuild.Make(t, made[0], made[1:]...)
	}
	folder := t.TempDir()
	for name, file := range map[string]string{"fared": binary.Fared(t), "fared-lab": binary.Lab(t), "lib": lib} {
		if err := os.Symlink(file, filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// table returns the rows of a file of results by the name of their network.
func table(t *testing.T, file string) map[string][][]string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil || len(rows) == 0 {
		t.Fatalf("%s: %v\n%s", file, err, text)
	}
	networks := map[string][][]string{}
	for _, row := range rows[1:] {
		networks[row[0]] = append(networks[row[0]], row)
	}
	return networks
}

// TestGPUCheck runs the parts of scripts/gpu-check that need no GPU: collectives over a fabric of fared with planes of
// 2:2:1:2, by shares over TCP and verbs, by equal stripes, by plain sockets, and while a plane fails. With equal
// stripes under the name of shares the script fails.
func TestGPUCheck(t *testing.T) {
	gate.Slow(t, gate.C, "45 jobs over a fabric, and one whose plane fails")
	netnstest.Require(t, "bash", "tc", "sysctl", "nsenter")
	bin := programs(t)
	netnstest.Folder(t)
	check := func(environment string, args ...string) (out, results string, status int) {
		results = t.TempDir()
		out, status = gpuCheck(t, []string{"FARED_NCCL_STALL_MS=60000", environment}, append(args, "--without-gpu", "--rate", "200", "--bin", bin, "--out", results)...)
		t.Logf("%s", out)
		return out, results, status
	}
	out, results, status := check("", "--networks", "share,verbs,equal,socket", "--max-bytes", "1048576")
	if status != 0 || !strings.Contains(out, "\nevery element is right") {
		t.Errorf("exit code %d", status)
	}
	rates, planes := table(t, filepath.Join(results, "rates.csv")), table(t, filepath.Join(results, "planes.csv"))
	for network, want := range map[string]int{"share": 15, "verbs": 15, "equal": 15, "socket": 15, "failure": 1} {
		if len(rates[network]) != want {
			t.Errorf("%s: %d rows, want 3 operations in 5 sizes, and 1 of a failure", network, len(rates[network]))
		}
		for _, row := range rates[network] {
			if rate, err := strconv.ParseFloat(row[5], 64); err != nil || rate <= 0 || row[6] != "0" {
				t.Errorf("row %v", row)
			}
		}
	}
	for p, share := range []float64{2.0 / 7, 2.0 / 7, 1.0 / 7, 2.0 / 7} {
		for network, due := range map[string]float64{"share": share, "verbs": share, "equal": 1.0 / 4} {
			if got, err := strconv.ParseFloat(planes[network][p][3], 64); err != nil || math.Abs(got-100*due) > 2 {
				t.Errorf("%s: plane %d has carried %v, want %.2f", network, p, planes[network][p], 100*due)
			}
		}
	}
	out, _, status = check("FARED_NCCL_STRIPING=equal", "--networks", "share", "--max-bytes", "262144")
	if status != 1 || !strings.Contains(out, "WRONG: share: the planes do not carry their shares") {
		t.Errorf("equal stripes pass for shares: exit code %d", status)
	}
}

// torchRanks runs two ranks of scripts/gpu-check.py over Gloo, without a GPU, and returns their output.
func torchRanks(t *testing.T, scripts [2]string) [2]string {
	t.Helper()
	var ranks [2]*exec.Cmd
	var outs [2]testlog.Log
	folder := t.TempDir()
	for r, script := range scripts {
		ranks[r] = exec.Command("/usr/bin/python3", script, "--backend", "gloo", "--rank", fmt.Sprint(r), "--rendezvous", folder, "--op", "allreduce,allgather,sendrecv", "--bytes", "8:3,100000:2")
		ranks[r].Stdout, ranks[r].Stderr = &outs[r], &outs[r]
		if err := ranks[r].Start(); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range ranks {
		_ = r.Wait() // the output has the result
	}
	return [2]string{outs[0].String(), outs[1].String()}
}

// TestGPUCheckRanks runs the ranks of PyTorch over Gloo: each checks every element, and finds those of a peer that
// sends others.
func TestGPUCheckRanks(t *testing.T) {
	gate.Slow(t, gate.C, "starts PyTorch four times")
	netnstest.Tools(t, "/usr/lib/python3/dist-packages/torch")
	const script = "../../scripts/gpu-check.py"
	text, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "other.py")
	if err := os.WriteFile(other, bytes.Replace(text, []byte("65537"), []byte("65539"), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^rank [01]: \S+ (allreduce|allgather|sendrecv): [23] x [0-9]+ bytes in [0-9.]+ s, [0-9.]+ MB/s; wrong elements: ([0-9]+)$`)
	for name, scripts := range map[string][2]string{"right": {script, script}, "wrong": {script, other}} {
		for r, out := range torchRanks(t, scripts) {
			rows := row.FindAllStringSubmatch(out, -1)
			if len(rows) != 6 {
				t.Errorf("%s: rank %d has %d results, want 6:\n%s", name, r, len(rows), out)
			}
			for _, m := range rows {
				if (m[2] != "0") != (name == "wrong") {
					t.Errorf("%s: rank %d: %s", name, r, m[0])
				}
			}
		}
	}
}
