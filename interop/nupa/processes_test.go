package nupa

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestTwoProcesses runs traffic nodes that share an ordinary file as if they were on two machines: each has the boot id
// of another kernel, so that its file locks do not meet those of its peer. One is killed at random points of traffic
// and returns, by the same or another boot; all bytes of new traffic are right.
func TestTwoProcesses(t *testing.T) {
	gate.Slow(t, gate.Labs, "traffic over killed processes")
	if os.Getuid() != 0 {
		netnstest.Lacks(t, "not root, who can give processes another boot id")
	}
	b := newBed(t)
	boots := 0
	boot := func() string {
		boots++
		path := filepath.Join(b.dir, fmt.Sprint("boot", boots))
		if err := os.WriteFile(path, fmt.Appendf(nil, "%08x-0000-4000-8000-000000000000\n", boots), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	node := func(number int, boot string) *exec.Cmd {
		address := fmt.Sprint("127.0.79.", number)
		cmd := exec.Command("unshare", "--mount", "sh", "-c", `mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"`, boot,
			binary.Lab(t), "traffic", "node", "--listen", address+":4795", "--source", address, "--slot", "memory=49152",
			"--transport", "nupa", "--nupa-file", b.memory.Name(), "--nupa-shared", "--nupa-channels", "16", "--nupa-dead-after", "3s")
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		if !bufio.NewScanner(out).Scan() {
			t.Fatal("the node does not listen")
		}
		return cmd
	}
	run := func(args ...string) *exec.Cmd {
		cmd := exec.Command(binary.Lab(t), append([]string{"traffic", "run", "--node", "a=127.0.79.1:4795", "--node", "b=127.0.79.2:4795"}, args...)...)
		cmd.Stderr = os.Stderr
		return cmd
	}
	node(1, boot())
	machine := boot()
	second := node(2, machine)
	for round := range 2 {
		endless := run("--duration", "10m", "-o", "json")
		endless.Stderr = nil
		if err := endless.Start(); err != nil {
			t.Fatal(err)
		}
		b.awaitTraffic()
		time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
		if err := second.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = second.Wait()
		if round%2 == 1 {
			machine = boot()
		}
		second = node(2, machine)
		_ = endless.Process.Kill()
		_ = endless.Wait()
		const size = 64 << 20
		output, err := run("--size", fmt.Sprint(size), "-o", "json").Output()
		if err != nil {
			t.Fatalf("round %d: %v: %s", round, err, output)
		}
		b.verify(string(output), size)
		if places := b.places(); len(places) != 2 {
			t.Errorf("round %d: places %v", round, places)
		}
	}
}
