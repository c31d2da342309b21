package systemd

import (
	"os"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestStarved takes the processors away, for longer than the units' watchdog: 16 slices a processor, of equal weight,
// run two busy processes each. The daemon answers, no unit restarts, and all is right afterwards; BFD of the leaves,
// which starve too, fails meanwhile.
func TestStarved(t *testing.T) {
	gate.Slow(t, gate.Systemd, "a minute without processors")
	m := boot(t)
	example, err := os.ReadFile("../examples/server-8gpu.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m.run("systemctl stop frr && ip link delete p0.0")
	m.leaves()
	m.write("/etc/fared/fared.yaml", string(example))
	m.netsetup("/etc/fared/fared.yaml")
	m.run("fared check && systemctl enable --now fared-dataplane fared")
	m.forwards("start", patience(returnLimit*4), every...)
	m.eventually("fared sessions | grep -c 'up 900ms' | grep -x 8")
	m.run(`for i in $(seq $((16 * $(nproc)))); do systemd-run --quiet --collect --property RuntimeMaxSec=10min --unit hog$i --slice hogs$i.slice sh -c 'while :; do :; done & while :; do :; done'; done`)
	begin, answers := time.Now(), 0
	for time.Since(begin) < 75*time.Second {
		m.eventually("fared status")
		answers++
	}
	t.Logf("%d answers in %v; pressure: %s", answers, time.Since(begin).Round(time.Second), m.run("cat /proc/pressure/cpu"))
	m.run("systemctl stop 'hogs*.slice'")
	m.forwards("the processors return", patience(returnLimit*4), every...)
	for _, unit := range []string{"fared", "fared-dataplane"} {
		if n := m.show(unit, "NRestarts"); n != "0" {
			t.Errorf("%s has restarted %s times", unit, n)
		}
	}
}
