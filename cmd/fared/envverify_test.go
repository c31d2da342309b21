package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
)

// TestEnvVerify runs commands that move the counters of ports, or none, with each result: the packets by plane, and the
// exit code.
func TestEnvVerify(t *testing.T) {
	root := rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/four.txt")
	counter := func(port int) string {
		return fmt.Sprintf("class/infiniband/mlx5_0/ports/%d/counters/port_xmit_packets", port)
	}
	verify := func(script string) clitest.Outcome {
		t.Helper()
		return fared(t, "env", "ucx", "--sysfs", root, "--config", "testdata/four.yaml", "--interposer", "none", "--verify", "--", "sh", "-euc", script)
	}
	if o := verify("exit 0"); o.Code != exitExec || !strings.Contains(o.Err, "mlx5_0/1 does not count packets") {
		t.Errorf("without counters: exit %d, %s", o.Code, o.Err)
	}
	for port := range 4 {
		rdmadevtest.Write(t, root, counter(port+1), "1000")
	}
	const none = "no RoCE packet left by the planes: sh took another way"
	sends := fmt.Sprintf("echo 1007 > %s; echo 1500 > %s; ", filepath.Join(root, counter(1)), filepath.Join(root, counter(3)))
	seen := filepath.Join(t.TempDir(), "seen")
	for _, test := range []struct {
		script, want string
		code         int
	}{
		{"exit 0", none, cli.ExitFailed},
		{"exit 7", none, 7},
		{"kill -TERM $$", none, exitSignal + 15},
		{sends + `echo "$UCX_NET_DEVICES" > ` + seen, "fared env: RoCE packets that left by the planes: red 507, blue 0\n", cli.ExitOK},
		{"echo 2000 > " + filepath.Join(root, counter(2)) + "; exit 3", "fared env: RoCE packets that left by the planes: red 0, blue 1000\n", 3},
	} {
		if o := verify(test.script); o.Code != test.code || !strings.Contains(o.Err, test.want) || o.Out != "" {
			t.Errorf("%s: exit %d, want %d, %q: %s%s", test.script, o.Code, test.code, test.want, o.Out, o.Err)
		}
	}
	if text, err := os.ReadFile(seen); err != nil || string(text) != "mlx5_0:1,mlx5_0:2,mlx5_0:3,mlx5_0:4\n" {
		t.Errorf("the environment has the devices %q, %v", text, err)
	}
	refused(t, cli.ExitUsage, "env", "ucx", "--verify")
	refused(t, cli.ExitUsage, "env", "ucx", "--verify", "true")
	refused(t, cli.ExitUsage, "env", "nccl-net", "--config", "testdata/four.yaml", "--verify", "--", "true")
	refused(t, exitNoProgram, "env", "ucx", "--sysfs", root, "--config", "testdata/four.yaml", "--verify", "--", "no-such-program")
}
