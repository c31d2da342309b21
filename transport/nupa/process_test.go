package nupa

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/rdma"
)

// peerMode and peerFile are the environment variables of the test binary when it runs as the other process.
const (
	peerMode = "FARED_NUPA_PEER"
	peerFile = "FARED_NUPA_FILE"
)

const (
	planeSize = ringsAt + 8*ringSize + 64*pageSize
	planeKey  = 7
)

// start starts an endpoint with its goroutine.
func start(t testing.TB, path string, address string, cfg Config) *host {
	t.Helper()
	h := newHost(t, must(address))
	cfg.File, cfg.Size, cfg.Channels = path, planeSize, 8
	h.tr = New(cfg).(*transport)
	if err := h.tr.Start(h); err != nil {
		t.Fatal(err)
	}
	return h
}

// other is the other process.
type other struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

// fork runs the test binary as a peer at address B.
func fork(t testing.TB, mode, path string) *other {
	t.Helper()
	o := &other{t: t, cmd: exec.Command(os.Args[0], "-test.run=^TestPeerProcess$", "-test.count=1")}
	o.cmd.Env = append(os.Environ(), peerMode+"="+mode, peerFile+"="+path)
	o.cmd.Stderr = os.Stderr
	var err error
	if o.in, err = o.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := o.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	o.lines = bufio.NewScanner(out)
	o.lines.Buffer(nil, 1<<24)
	t.Cleanup(func() {
		if o.cmd.ProcessState == nil {
			o.in.Close()
			o.cmd.Wait()
		}
	})
	return o
}

// read waits for a line that starts with a word, and returns the rest of it.
func (o *other) read(word string) string {
	o.t.Helper()
	for o.lines.Scan() {
		if rest, ok := strings.CutPrefix(o.lines.Text(), word+" "); ok {
			return rest
		}
	}
	o.t.Fatalf("the other process has ended without %q", word)
	return ""
}

// connect connects a channel of h with the process.
func (o *other) connect(h *host) (c rdma.Channel, region uint64) {
	o.t.Helper()
	h.Do(func() {
		var err error
		if c, err = h.tr.Channel(rdma.ChannelConfig{Remote: addressB}); err != nil {
			o.t.Fatal(err)
		}
	})
	fmt.Fprintf(o.in, "%x\n", c.Local())
	var local string
	if _, err := fmt.Sscan(o.read("local"), &local, &region); err != nil {
		o.t.Fatal(err)
	}
	remote, err := hex.DecodeString(local)
	if err != nil {
		o.t.Fatal(err)
	}
	h.Do(func() { err = c.Connect(remote, live()) })
	if err != nil {
		o.t.Fatal(err)
	}
	return c, region
}

// TestPeerProcess is the other process of the tests below, and does nothing when run alone.
func TestPeerProcess(t *testing.T) {
	mode := os.Getenv(peerMode)
	switch mode {
	case "":
		return
	case "storm":
		stormProcess(t, os.Getenv(peerFile))
		return
	}
	spin := 20 * time.Microsecond
	if mode == "echo" {
		spin = time.Millisecond
	}
	h := start(t, os.Getenv(peerFile), addressB.String(), Config{Spin: spin})
	region := h.shared(pageSize)
	var c rdma.Channel
	input := bufio.NewScanner(os.Stdin)
	if !input.Scan() {
		t.Fatal("no peer")
	}
	remote, err := hex.DecodeString(input.Text())
	if err != nil {
		t.Fatal(err)
	}
	lean := &echo{host: h}
	h.Do(func() {
		if mode == "echo" {
			h.lean = lean
		}
		h.receives = 1 << 40
		h.register(planeKey, region, everything)
		if c, err = h.tr.Channel(rdma.ChannelConfig{Remote: addressA}); err != nil {
			t.Fatal(err)
		}
		if err := c.Connect(remote, live()); err != nil {
			t.Fatal(err)
		}
		lean.c = c
		switch mode {
		case "crash":
			h.onDeliver = func(rdma.Channel) {
				if len(h.delivered) == 20 { // the operation is taken, and will never end
					unix.Kill(os.Getpid(), unix.SIGKILL)
					select {}
				}
			}
		case "slow":
			rng := rand.New(rand.NewPCG(9, 9))
			h.onDeliver = func(rdma.Channel) { h.receives = rng.IntN(4) }
		}
	})
	fmt.Printf("local %x %d\n", c.Local(), addressOf(region))
	for ready := time.NewTicker(time.Millisecond); mode == "slow"; {
		<-ready.C
		done := false
		h.Do(func() {
			h.receives += 3
			c.Ready()
			done = region[0] == 1
		})
		if done {
			break
		}
	}
	for input.Scan() {
	}
	h.Do(func() {
		for _, m := range h.delivered {
			fmt.Printf("delivered %x\n", m)
		}
		c.Close()
		h.tr.Deregistered(planeKey)
	})
	fmt.Println("end .")
	h.tr.Free(region)
	h.tr.Stop()
}

// eventually waits until f, called with the lock held, returns true.
func (h *host) eventually(what string, f func() bool) {
	h.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); ; {
		var ok bool
		h.Do(func() { ok = f() })
		if ok {
			return
		}
		if time.Now().After(deadline) {
			h.t.Fatalf("never: %s", what)
		}
		<-tick.C
	}
}

// TestRevokeAcrossProcesses runs operations between two processes while the plane is parked and returns at random.
// Returned operations were not delivered, completed ones were, once and in order.
func TestRevokeAcrossProcesses(t *testing.T) {
	defer goleak.VerifyNone(t)
	path := filepath.Join(t.TempDir(), "plane")
	h := start(t, path, addressA.String(), Config{})
	o := fork(t, "slow", path)
	c, region := o.connect(h)
	rng := rand.New(rand.NewPCG(1, 6))
	const total = 4000
	for i := 0; i < total; {
		if h.tryPost(c, &rdma.Op{Kind: rdma.OpSend, Local: []byte{byte(i >> 8), byte(i)}}) {
			i++
		} else {
			h.eventually("room", func() bool { ok := h.rooms > 0; h.rooms = 0; return ok })
		}
		if rng.IntN(40) == 0 {
			h.Do(func() { c.SetPaths([]rdma.Path{{}}) })
			h.Do(func() { c.SetPaths(live()) })
		}
	}
	h.eventually("everything ends", func() bool { return len(h.posted) == 0 })
	stop := &rdma.Op{Kind: rdma.OpWrite, Key: planeKey, Remote: region, Local: []byte{1}}
	h.post(c, stop)
	h.eventually("written", func() bool { return len(h.posted) == 0 })
	o.in.Close()
	for i, op := range h.completed {
		if h.errs[op] != nil {
			t.Fatal(h.errs[op])
		}
		if op == stop {
			continue
		}
		if got, want := o.read("delivered"), hex.EncodeToString(op.Local); got != want {
			t.Fatalf("delivery %d: %s, want %s", i, got, want)
		}
	}
	if o.lines.Scan(); o.lines.Text() != "end ." {
		t.Errorf("and more: %s", o.lines.Text())
	}
	if err := o.cmd.Wait(); err != nil {
		t.Error(err)
	}
	if len(h.completed)+len(h.returned) != total+1 || len(h.returned) == 0 {
		t.Errorf("%d completed, %d returned of %d", len(h.completed), len(h.returned), total)
	}
	t.Logf("%d executed, %d returned, %d times not ready", len(h.completed), len(h.returned), h.tr.count.notReady)
	h.Do(c.Close)
	h.tr.Stop()
}

// TestPeerIsKilled kills a process inside an operation: its peer's operations end with ErrRetryExceeded, and the next
// process with the same address recovers all resources.
func TestPeerIsKilled(t *testing.T) {
	defer goleak.VerifyNone(t)
	path := filepath.Join(t.TempDir(), "plane")
	h := start(t, path, addressA.String(), Config{})
	o := fork(t, "crash", path)
	c, region := o.connect(h)
	read := h.post(c, &rdma.Op{Kind: rdma.OpRead, Key: planeKey, Remote: region, Local: make([]byte, 100)})
	h.eventually("read", func() bool { return len(h.posted) == 0 })
	h.wants(read, nil)
	var ops []*rdma.Op
	for i := range 40 {
		ops = append(ops, h.post(c, &rdma.Op{Kind: rdma.OpSend, Local: []byte{byte(i)}}))
	}
	h.eventually("failure", func() bool { return h.failed[c] != nil })
	o.cmd.Wait()
	for i, op := range ops {
		if i < 19 {
			h.wants(op, nil)
		} else {
			h.wants(op, rdma.ErrRetryExceeded)
		}
	}
	h.Do(c.Close)

	o = fork(t, "echo", path)
	c, region = o.connect(h)
	write := h.post(c, &rdma.Op{Kind: rdma.OpWrite, Key: planeKey, Remote: region, Local: []byte("again")})
	h.eventually("write", func() bool { return len(h.posted) == 0 })
	h.wants(write, nil)
	h.Do(c.Close)
	o.in.Close()
	o.read("end")
	if err := o.cmd.Wait(); err != nil {
		t.Error(err)
	}
	if b, err := h.tr.Alloc(60 * pageSize); err != nil {
		t.Errorf("pages of the dead are not free: %v", err)
	} else {
		h.tr.Free(b)
	}
	for r := range h.tr.area.rings {
		if who := h.tr.area.ring(r).sender().Load(); who != 0 {
			t.Errorf("ring %d is still %d's", r, who-1)
		}
	}
	h.tr.Stop()
}

// TestTwoEndpoints runs two endpoints of one process on the real machine: goroutines, locks, futexes.
func TestTwoEndpoints(t *testing.T) {
	defer goleak.VerifyNone(t)
	fd, err := unix.MemfdCreate("plane", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	path := fmt.Sprintf("/proc/self/fd/%d", fd)
	for _, spin := range []time.Duration{-1, 20 * time.Microsecond} {
		a, b := start(t, path, addressA.String(), Config{Spin: spin}), start(t, path, addressB.String(), Config{Spin: spin})
		ca, cb := connect(t, a, b)
		var got atomic.Int64
		b.Do(func() {
			b.receives = 1 << 40
			b.onDeliver = func(rdma.Channel) { got.Add(1) }
		})
		region := b.shared(pageSize)
		b.Do(func() { b.register(7, region, everything) })
		const total = 2000
		for i := 0; i < total; {
			op := &rdma.Op{Kind: rdma.OpFetchAdd, Key: 7, Remote: addressOf(region), Swap: 1, Local: make([]byte, 8)}
			if i%2 == 1 {
				op = &rdma.Op{Kind: rdma.OpSend, Local: make([]byte, i%200)}
			}
			if a.tryPost(ca, op) {
				i++
			} else {
				a.eventually("room", func() bool { ok := a.rooms > 0; a.rooms = 0; return ok })
			}
			if i == total/2 { // wait until the endpoints sleep
				a.eventually("sleep", func() bool { return len(a.posted) == 0 && b.tr.self.asleep().Load() == 1 })
			}
		}
		a.eventually("the end", func() bool { return len(a.posted) == 0 })
		if region[0] != byte(total/2%256) || region[1] != byte(total/2/256) || got.Load() != total/2 {
			t.Errorf("added up to %v, %d delivered", region[:2], got.Load())
		}
		a.Do(func() {
			if a.tr.Counters()["wakes"] == 0 || b.tr.sleeps.Load() == 0 {
				t.Error("no process has slept")
			}
		})
		if second := New(Config{File: path, Size: planeSize}); second.Start(newHost(t, addressA)) == nil {
			t.Error("two endpoints of one address")
		}
		a.Do(ca.Close)
		b.Do(cb.Close)
		b.Do(func() { b.tr.Deregistered(7) })
		b.tr.Free(region)
		a.tr.Stop()
		b.tr.Stop()
	}
	if unix.Ftruncate(fd, 0) == nil {
		t.Error("the memfd can be cut short under everybody's feet")
	}
}

// TestStopLeavesMemoryInUse checks that memory that the application still uses stays mapped and allocated after Stop.
func TestStopLeavesMemoryInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plane")
	a := start(t, path, addressA.String(), Config{})
	b := a.shared(10 * pageSize)
	a.tr.Stop()
	again := start(t, path, addressA.String(), Config{})
	c := again.shared(10 * pageSize)
	c[0] = 1
	if b[0] != 0 {
		t.Error("one memory, two owners")
	}
	again.tr.Free(c)
	again.tr.Stop()
	a.tr.m.close()
}
