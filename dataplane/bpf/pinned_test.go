package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// descriptors runs f with n descriptors available beyond those that are open.
func descriptors(t *testing.T, n int, f func()) {
	t.Helper()
	lowest, err := unix.Dup(0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(lowest)
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(lowest + n), Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Fatal(err)
		}
	}()
	f()
}

// TestFailedStart checks that a start that runs out of descriptors at any point returns that error, forwarding
// continues, and the next start adopts all state.
func TestFailedStart(t *testing.T) {
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 5, 10127)
	state := []contract.Change{setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports)}
	b.commit(state...)
	slots := func() {
		t.Helper()
		for slot, port := range ports {
			p, s := place(slot)
			if got := b.sentFrom(gpu{loopback: b.family.source}, port, 2); got[testbed.Device(p, s)] != 2 {
				t.Fatalf("slot %d: 2 packets at %v", slot, got)
			}
		}
	}
	slots()
	spec, err := steeringSpec(b.s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	for n := range 4 { // the attached program is then unknown, and nothing may be replaced
		descriptors(t, n, func() {
			if found, err := b.s.have.pinned.find(b.cfg.PinDir, spec); err == nil {
				t.Errorf("with %d descriptors: found %v and no error", n, found)
			}
		})
	}
	failed := 0
	for n, open := 0, false; !open; n += 3 {
		if err := b.s.Close(); err != nil {
			t.Fatal(err)
		}
		var err error
		descriptors(t, n, func() {
			err = b.Server.Do(func() error {
				s, err := Open(b.cfg)
				if err == nil {
					b.s, open = s, true
				}
				return err
			})
		})
		if err != nil {
			failed++
			if !errors.Is(err, unix.EMFILE) && !strings.Contains(err.Error(), unix.EMFILE.Error()) {
				t.Errorf("%d descriptors: %v", n, err)
			}
		}
	}
	if failed < 5 {
		t.Errorf("only %d starts failed", failed)
	}
	t.Cleanup(func() { b.s.Close() })
	if stats, err := b.s.Stats(); err != nil || !stats.Adopted || stats.Pairs != 1 {
		t.Errorf("after %d failed starts: %+v, %v", failed, stats, err)
	}
	slots()
	if dirs, err := filepath.Glob(b.cfg.PinDir + "/" + mapsPrefix + "*"); err != nil || len(dirs) != 1 {
		t.Errorf("directories %v, %v, want one", dirs, err)
	}
}

// TestUnfinishedPins checks that an incomplete directory of a killed start, and one whose maps are not those of the
// attached program, are not adopted, and are removed.
func TestUnfinishedPins(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := newBed(t, families[0])
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 5, 10127)))
	own := b.s.have.pinned.dir
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	name := own[:strings.LastIndex(own, "-")]
	for _, more := range []string{"-0", "-zz"} { // before and after it in the directory
		if err := os.Mkdir(name+more, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	b.open()
	if stats, err := b.s.Stats(); err != nil || !stats.Adopted || stats.Groups != 1 {
		t.Errorf("stats %+v, %v", stats, err)
	}
	if dirs, err := filepath.Glob(b.cfg.PinDir + "/" + mapsPrefix + "*"); err != nil || len(dirs) != 1 {
		t.Errorf("directories %v, %v, want one", dirs, err)
	}
}

// TestLossBeforeHello checks that a carrier that is lost or returns after an agent has adopted state, and before any
// control plane connects, is excluded or used immediately, with maps of the same layout or of another one.
func TestLossBeforeHello(t *testing.T) {
	for _, layout := range []string{"same", "other"} {
		t.Run(layout, func(t *testing.T) {
			b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
			ports := sequence(8, 5, 10127)
			b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
			if err := b.s.Close(); err != nil {
				t.Fatal(err)
			}
			if layout == "other" {
				b.cfg.MaxGroups = DefaultMaxGroups - 1
			}
			b.open()
			if b.s.have.pinned.adopted != (layout == "same") {
				t.Fatalf("adopted: %v", b.s.have.pinned.adopted)
			}
			// reach waits until the packets of slot 1, which is on p1.0, arrive there, or elsewhere.
			flow := b.flow(ports[1])
			reach := func(own bool) {
				t.Helper()
				netnstest.Eventually(t, patience, func() error {
					here, total := b.at("p1.0", ports[1]), b.total()
					_ = flow.send(1)
					if b.total() == total {
						return errors.New("nothing arrives")
					}
					if (b.at("p1.0", ports[1]) > here) != own {
						return fmt.Errorf("arrives at p1.0: %v", !own)
					}
					return nil
				})
			}
			reach(true)
			b.Leaves[1].IP("link", "set", "server0", "down")
			reach(false)
			b.Leaves[1].Addr("server0", "fd00:16:1:0::2/64")
			reach(true)
		})
	}
}

// TestSweepPins checks that pins are removed once the anchor is gone, as with its network namespace, and no agent uses
// them, not before, and that directories of other names and those without a link stay.
func TestSweepPins(t *testing.T) {
	b := newBed(t, families[0])
	base := b.cfg.PinDir
	b.cfg.PinDir = base + "-7"
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 5, 10127)))
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{base + "-8", base + "-x"} {
		if err := os.Mkdir(name, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	sweep := func(want ...string) {
		t.Helper()
		removed, err := SweepPins(base)
		if err != nil || !slices.Equal(removed, want) {
			t.Errorf("removed %v, %v, want %v", removed, err, want)
		}
	}
	sweep()
	b.open() // adopts what stayed
	if stats, err := b.s.Stats(); err != nil || !stats.Adopted || stats.Groups != 1 {
		t.Errorf("stats %+v, %v", stats, err)
	}
	b.s.whileOpen(func() { // before the agent repairs it
		b.Server.IP("link", "del", DefaultDevice)
		sweep()
	})
	netnstest.Eventually(t, patience, func() error {
		_, err := b.Server.Output("ip", "link", "show", DefaultDevice)
		return err
	})
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	b.Server.IP("link", "del", DefaultDevice)
	sweep(base + "-7")
	left, err := filepath.Glob(base + "*")
	if want := []string{base + "-8", base + "-x"}; err != nil || !slices.Equal(left, want) {
		t.Errorf("left %v, %v, want %v", left, err, want)
	}
}
