package backend

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestUnexpectedEnd checks that a process killed by another program is reported, even if it is asked to end before that
// is noticed, and that no other is.
func TestUnexpectedEnd(t *testing.T) {
	netnstest.Require(t)
	space := Namespace(netnstest.New(t).Name)
	for name, c := range map[string]struct {
		end  func(*Process)
		want bool
	}{
		"killed":           {func(p *Process) { _ = unix.Kill(p.cmd.Process.Pid, unix.SIGKILL) }, true},
		"killed and asked": {func(p *Process) { _ = unix.Kill(p.cmd.Process.Pid, unix.SIGKILL); p.Ask() }, true},
		"asked":            {func(p *Process) { p.Ask() }, false},
		"struck":           {func(p *Process) { p.strike() }, false},
		"stopped, asked, and killed after the patience": {func(p *Process) { _ = unix.Kill(p.cmd.Process.Pid, unix.SIGSTOP); p.Ask(); p.Wait(0) }, false},
	} {
		for range 20 {
			var failed error
			p, err := StartProcess(space, "node", "sleep", filepath.Join(t.TempDir(), "log"), func(err error) { failed = err }, "sleep", "60")
			if err != nil {
				t.Fatal(err)
			}
			c.end(p)
			select {
			case <-p.done:
			case <-time.After(time.Minute):
				t.Fatalf("%s: it has not ended", name)
			}
			if got := failed != nil && strings.Contains(failed.Error(), "node: sleep ended unexpectedly (signal: killed)"); got != c.want || failed != nil && !got {
				t.Fatalf("%s: %v", name, failed)
			}
		}
	}
}
