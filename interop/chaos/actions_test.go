package chaos

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/topo"
)

// action is one disturbance. It depends only on the seed and on earlier actions.
type action struct {
	name string
	odds int // frequency, relative to the others
	// do makes the disturbance and returns its description, or "" if it is not possible now.
	do func(c *chaos) string
}

var actions = []action{
	{"cut at the server", 6, func(c *chaos) string { return c.cut(false) }},
	{"cut at the leaf", 6, func(c *chaos) string { return c.cut(true) }},
	{"mend", 9, (*chaos).mend},
	{"flap", 4, (*chaos).flap},
	{"silence a leaf", 5, (*chaos).silence},
	{"return a leaf", 8, (*chaos).giveBack},
	{"kill", 6, (*chaos).kill},
	{"freeze", 3, (*chaos).freeze},
	{"take descriptors", 3, (*chaos).starve},
	{"fill a disk", 3, (*chaos).fill},
	{"delete kernel objects", 8, (*chaos).vandalize},
	{"detach the program", 2, (*chaos).detach},
}

// pick chooses an action by its odds.
func pick(r *rand.Rand) *action {
	sum := 0
	for i := range actions {
		sum += actions[i].odds
	}
	n := r.IntN(sum)
	for i := range actions {
		if n -= actions[i].odds; n < 0 {
			return &actions[i]
		}
	}
	panic("odds")
}

// cable is a cable's place.
type cable struct{ plane, group, sub int }

func (x cable) String() string { return fmt.Sprintf("p%d.%d of owner %d", x.plane, x.sub, x.group) }

// some returns a random cable that is up, or one that is down.
func (c *chaos) some(up bool) (cable, bool) {
	var all []cable
	for p := range planes {
		for g := range c.f.d.owners() {
			for i := range c.f.d.subs(p, g) {
				if c.is.up[p][g][i] == up {
					all = append(all, cable{p, g, i})
				}
			}
		}
	}
	if len(all) == 0 {
		return cable{}, false
	}
	return all[c.r.IntN(len(all))], true
}

// enough reports whether every pair keeps a number of planes, so that the judge can still observe it.
func enough(x *cables, least int) bool {
	for _, pair := range x.d.pairs() {
		n := 0
		for p := range planes {
			if x.bandwidth(p, groupOf(pair[0]), groupOf(pair[1])) > 0 {
				n++
			}
		}
		if n < least {
			return false
		}
	}
	return true
}

// keptPlanes is the number of planes that every pair keeps.
const keptPlanes = 2

// set takes a cable up or down at one of its ends.
func (c *chaos) set(x cable, far, up bool) {
	at := c.f.cable(x)
	n, device := c.f.server[x.group/c.f.d.gpus], at.Down.Device
	if far {
		n, device = c.f.leaf[x.plane], at.Up.Device
	}
	n.ns.IP("link", "set", device, map[bool]string{true: "up", false: "down"}[up])
}

func (c *chaos) cut(far bool) string {
	x, ok := c.some(true)
	if !ok {
		return ""
	}
	then := c.is
	then.up[x.plane][x.group][x.sub] = false
	if !enough(&then, keptPlanes) {
		return ""
	}
	c.is = then
	c.far[x] = far
	c.set(x, far, false)
	return fmt.Sprintf("cut %v, at the %s", x, map[bool]string{false: "server", true: "leaf"}[far])
}

func (c *chaos) mend() string {
	x, ok := c.some(false)
	if !ok {
		return ""
	}
	c.is.up[x.plane][x.group][x.sub] = true
	c.set(x, c.far[x], true)
	return fmt.Sprintf("mend %v", x)
}

func (c *chaos) flap() string {
	x, ok := c.some(true)
	if !ok {
		return ""
	}
	times := 2 + c.r.IntN(4)
	for range times {
		c.set(x, false, false)
		c.pause(0, 200*time.Millisecond)
		c.set(x, false, true)
		c.pause(0, 200*time.Millisecond)
	}
	return fmt.Sprintf("flap %v %d times", x, times)
}

// silence kills or freezes a leaf's BGP daemon, one leaf at a time; its kernel keeps forwarding.
func (c *chaos) silence() string { return c.silenceBy(c.r.IntN(2) == 0) }

func (c *chaos) silenceBy(freeze bool) string {
	p := c.r.IntN(planes)
	for _, speaks := range c.is.leaf {
		if !speaks {
			return ""
		}
	}
	then := c.is
	then.leaf[p] = false
	if !enough(&then, keptPlanes) {
		return ""
	}
	c.is = then
	n := c.f.leaf[p]
	if c.frozen = freeze; freeze {
		n.signal(control, unix.SIGSTOP)
		return fmt.Sprintf("freeze the speaker of %s (%s)", n.Name, n.software)
	}
	n.kill(control)
	return fmt.Sprintf("kill the speaker of %s (%s)", n.Name, n.software)
}

func (c *chaos) giveBack() string {
	for p, speaks := range c.is.leaf {
		if speaks {
			continue
		}
		c.is.leaf[p] = true
		n := c.f.leaf[p]
		if c.frozen {
			n.signal(control, unix.SIGCONT)
			return "thaw the speaker of " + n.Name
		}
		n.start(control)
		return "start the speaker of " + n.Name
	}
	return ""
}

// target returns a random running process of fared. Its absence can be judged only after its return, so every action
// brings it back.
func (c *chaos) target() (*node, string) {
	name := control
	if c.r.IntN(2) == 0 {
		name = dataplane
	}
	return c.f.server[c.r.IntN(servers)], name
}

func (c *chaos) kill() string {
	n, name := c.target()
	both := c.r.IntN(4) == 0
	n.kill(name)
	if both {
		n.kill(map[string]string{control: dataplane, dataplane: control}[name])
		name = "both processes"
	}
	took := c.pause(0, 2*time.Second)
	n.startAll()
	return fmt.Sprintf("kill %s of %s, and start again after %v", name, n.Name, took)
}

func (c *chaos) freeze() string {
	n, name := c.target()
	n.signal(name, unix.SIGSTOP)
	took := c.pause(200*time.Millisecond, 2*holdTime)
	n.signal(name, unix.SIGCONT)
	return fmt.Sprintf("freeze %s of %s for %v", name, n.Name, took)
}

// starve leaves a process no descriptors while one of its cables flaps, or its data plane restarts.
func (c *chaos) starve() string {
	n, name := c.target()
	if c.r.IntN(3) == 0 {
		if leaf := c.f.leaf[c.r.IntN(planes)]; leaf.software == topo.Fared {
			n, name = leaf, control
		}
	}
	p := n.processes[name]
	if p == nil {
		return ""
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Pid()))
	if err != nil {
		c.f.t.Fatal(err)
	}
	var was unix.Rlimit
	spare := c.r.IntN(3)
	few := unix.Rlimit{Cur: uint64(len(open) + spare)}
	if err := unix.Prlimit(p.Pid(), unix.RLIMIT_NOFILE, nil, &was); err != nil {
		c.f.t.Fatal(err)
	}
	few.Max = was.Max
	if err := unix.Prlimit(p.Pid(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
		c.f.t.Fatal(err)
	}
	what := ""
	if x, ok := c.some(true); ok {
		c.set(x, true, false)
		c.pause(500*time.Millisecond, time.Second)
		c.set(x, true, true)
		what = fmt.Sprintf(", while %v flaps", x)
	}
	took := c.pause(time.Second, 4*time.Second)
	if p.Running() == nil {
		if err := unix.Prlimit(p.Pid(), unix.RLIMIT_NOFILE, &was, nil); err != nil && !errors.Is(err, unix.ESRCH) {
			c.f.t.Fatal(err)
		}
	}
	return fmt.Sprintf("leave %s of %s %d spare descriptors for %v%s", name, n.Name, spare, took, what)
}

// fill fills the disk of a server while one of its cables flaps, and while its data plane restarts.
func (c *chaos) fill() string {
	n := c.f.server[c.r.IntN(servers)]
	ballast := filepath.Join(n.dir, "ballast")
	file, err := os.Create(ballast)
	if err != nil {
		c.f.t.Fatal(err)
	}
	for block := make([]byte, 64<<10); err == nil; {
		_, err = file.Write(block)
	}
	file.Close()
	if !errors.Is(err, unix.ENOSPC) {
		c.f.t.Fatal(err)
	}
	x, ok := c.some(true)
	if ok {
		c.set(x, false, false)
		c.pause(300*time.Millisecond, time.Second)
		c.set(x, false, true)
	}
	what := ""
	if c.r.IntN(2) == 0 {
		n.kill(dataplane)
		n.start(dataplane)
		what = ", with a start of the data plane"
	}
	took := c.pause(500*time.Millisecond, 3*time.Second)
	if err := os.Remove(ballast); err != nil {
		c.f.t.Fatal(err)
	}
	return fmt.Sprintf("fill the disk of %s for %v while %v flaps%s", n.Name, took, x, what)
}

// vandalize deletes kernel objects of a server as another program could.
func (c *chaos) vandalize() string {
	n := c.f.server[c.r.IntN(servers)]
	own := n.ns.IP("-N", "rule") // protocols as numbers
	var lines []string
	switch c.r.IntN(6) {
	case 0:
		lines = []string{"nexthop flush"}
	case 1:
		lines = []string{"route flush proto 179", "-6 route flush proto 179"}
	case 2:
		lines = []string{"route flush table 179"}
	case 3:
		for rule := range strings.Lines(own) {
			fields := strings.Fields(rule)
			if strings.Contains(rule, "proto 179") {
				lines = append(lines, "rule del priority "+strings.TrimSuffix(fields[0], ":"))
			}
		}
	case 4:
		lines = c.one(n, "nexthop")
	case 5:
		lines = c.one(n, "route")
	}
	for _, line := range lines {
		// An error means that the object does not exist, or that the flush had to be retried: it counts as deleted.
		_, _ = n.ns.Output("ip", strings.Fields(line)...)
	}
	if lines == nil {
		return "find nothing to delete on " + n.Name
	}
	return fmt.Sprintf("ip %s on %s", strings.Join(lines, "; "), n.Name)
}

// one deletes one nexthop, or one route, of fared's.
func (c *chaos) one(n *node, kind string) []string {
	chosen := c.r.Uint64() // drawn in any case, so that a seed's next steps remain the same
	var found []string
	for line := range strings.Lines(n.ns.IP("-N", kind, "show")) {
		if fields := strings.Fields(line); len(fields) > 2 && strings.Contains(line, "proto 179") {
			if kind == "nexthop" {
				found = append(found, "nexthop del id "+fields[1])
			} else if fields[0] != "blackhole" && fields[0] != "unreachable" {
				found = append(found, "route del "+fields[0]+" proto 179")
			}
		}
	}
	if len(found) == 0 {
		return nil
	}
	return []string{found[chosen%uint64(len(found))]}
}

// detach detaches the steering program from its device, as `bpftool link detach` does, or deletes the device.
func (c *chaos) detach() string {
	for _, n := range c.f.server {
		if n.driver != "bpf" {
			continue
		}
		if c.r.IntN(2) == 0 {
			n.ns.IP("link", "del", "fared0")
			return "delete the device fared0 of " + n.Name
		}
		var pinned []string
		_ = filepath.Walk(n.pins(), func(path string, info os.FileInfo, err error) error {
			if err == nil && !info.IsDir() {
				if l, err := link.LoadPinnedLink(path, nil); err == nil {
					pinned = append(pinned, filepath.Base(path))
					err = l.Detach()
					l.Close()
					if err != nil {
						c.f.t.Errorf("detach %s: %v", path, err)
					}
				}
			}
			return nil
		})
		return fmt.Sprintf("detach %v of %s", pinned, n.Name)
	}
	return ""
}

// pause waits for a random time within bounds, because the duration is part of a disturbance.
func (c *chaos) pause(least, most time.Duration) time.Duration {
	d := least + time.Duration(c.r.Int64N(int64(most-least)))
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.f.t.Context().Done():
	}
	return d.Round(time.Millisecond)
}
