package bpf

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

func TestPropagates(t *testing.T) {
	const mounts = `22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:27 / /sys rw,nosuid shared:7 - sysfs sysfs rw
31 30 0:28 / /sys/fs/bpf rw,nosuid - bpf bpf rw
32 22 0:29 / /run/slave rw master:4 - bpf bpf rw
33 22 0:30 / /opt rw - bpf bpf rw
34 33 0:31 / /opt rw shared:9 - bpf bpf rw
`
	for dir, want := range map[string]bool{
		"/sys/fs/bpf/fared": false, "/sys/fs/bpffs/fared": true, "/sys/fs/bpf": false, "/run/slave/a": true, "/tmp": true, "/opt/fared": true,
	} {
		if got := propagates([]byte(mounts), dir); got != want {
			t.Errorf("%s: %v, want %v", dir, got, want)
		}
	}
}

// TestOutlives checks that an agent whose BPF file system was mounted in its own mount namespace reports that its pins
// end with it, and that one with an outside BPF file system does not.
func TestOutlives(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	netnstest.Require(t, "unshare", "mount")
	if dir := os.Getenv("FARED_TEST_OUTLIVES"); dir != "" {
		os.Stdout.WriteString("answer: " + outlives(dir) + "\n")
		return
	}
	outside, inside := mountBPF(t), t.TempDir()
	for _, c := range []struct {
		name, dir, mount string
		private          bool
	}{
		{"mounted outside", outside, "true", false},
		{"mounted inside", inside, "mount -t bpf bpf " + inside, true},
	} {
		cmd := exec.Command("unshare", "-m", "sh", "-c", c.mount+` && exec "$@"`, "sh", os.Args[0], "-test.run=^TestOutlives$")
		cmd.Env = append(os.Environ(), "FARED_TEST_OUTLIVES="+c.dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", c.name, err, out)
		}
		if private := strings.Contains(string(out), "answer: "+c.dir); private != c.private {
			t.Errorf("%s: private %v, want %v:\n%s", c.name, private, c.private, out)
		}
	}
}
