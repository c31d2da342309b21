package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestCarrierWithoutAgent lets a sub-port fail and return while no agent runs. Where the kernel runs programs at
// carriers, the packets of its slot take other sub-ports from the first one after the failure, and return with the
// carrier; without these programs they are lost. A kernel in lockdown refuses them, and Open returns the reason;
// FARED_CARRIERS=1 makes that a failure (make vm).
func TestCarrierWithoutAgent(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	for _, hooked := range []bool{true, false} {
		t.Run(fmt.Sprintf("hooked=%v", hooked), func(t *testing.T) {
			b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
			ports := sequence(8, 5, 10127)
			b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
			refused := b.s.have.pinned.unhooked
			if refused != "" && os.Getenv("FARED_CARRIERS") == "1" {
				t.Fatalf("no programs at carriers: %s", refused)
			}
			if refused != "" && len(b.s.have.pinned.hooks) > 0 {
				t.Fatalf("%q, and yet programs at carriers", refused)
			}
			if hooked = hooked && refused == ""; !hooked {
				t.Logf("without programs at carriers: %s", refused)
			}
			dir := b.s.have.pinned.dir
			if err := b.s.Close(); err != nil {
				t.Fatal(err)
			}
			if !hooked && refused == "" {
				for _, pin := range []string{carrierOffPin, carrierOnPin} {
					if err := os.Remove(filepath.Join(dir, pin)); err != nil {
						t.Fatal(err)
					}
				}
			}
			// arrive waits until n more packets than before have arrived; the agent's counters are closed.
			arrive := func(before, n int) {
				t.Helper()
				netnstest.Eventually(t, patience, func() error {
					if got := b.total() - before; got != n {
						return fmt.Errorf("%d of %d packets arrived", got, n)
					}
					return nil
				})
			}
			f, other := b.flow(ports[0]), b.flow(ports[1])
			before, total := b.at("p0.0", ports[0]), b.total()
			if err := f.send(5); err != nil {
				t.Fatal(err)
			}
			if arrive(total, 5); b.at("p0.0", ports[0]) != before+5 {
				t.Fatalf("%d of 5 packets at p0.0", b.at("p0.0", ports[0])-before)
			}
			b.Leaves[0].IP("link", "set", "server0", "down")
			total, before = b.total(), b.at("p0.0", ports[0])
			if err := f.send(100); err != nil && hooked {
				t.Fatal(err)
			}
			if !hooked {
				// These packets arrive after those that are not lost.
				if err := other.send(5); err != nil {
					t.Fatal(err)
				}
				arrive(total, 5)
				return
			}
			arrive(total, 100)
			if n := b.at("p0.0", ports[0]) - before; n != 0 {
				t.Errorf("%d packets arrived at a device that is down", n)
			}
			b.Leaves[0].IP("link", "set", "server0", "up")
			netnstest.Eventually(t, patience, func() error {
				before := b.at("p0.0", ports[0])
				_ = f.send(1)
				if b.at("p0.0", ports[0]) == before {
					return errors.New("nothing arrives at p0.0")
				}
				return nil
			})
		})
	}
}

// TestLossDoesNotWaitForAgent checks that the packets to a sub-port that has failed take others while the agent handles
// no event: the kernel's programs at carriers mark the sub-port, or the one that reads the announcement.
func TestLossDoesNotWaitForAgent(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 5, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	f := b.flow(ports[0])
	arrive := func(n int) {
		t.Helper()
		total := b.total()
		if err := f.send(n); err != nil {
			t.Fatal(err)
		}
		netnstest.Eventually(t, patience, func() error {
			if got := b.total() - total; got != n {
				return fmt.Errorf("%d of %d packets arrived", got, n)
			}
			return nil
		})
	}
	arrive(5)
	if n := b.at("p0.0", ports[0]); n != 5 {
		t.Fatalf("%d of 5 packets at p0.0", n)
	}
	b.s.mu.Lock() // no event is handled from here on
	defer b.s.mu.Unlock()
	b.Server.IP("link", "set", "p0.0", "down")
	arrive(100)
}

// TestDarkMarkIsRemoved checks that a place whose device has a carrier does not stay dark, and that a device with a new
// index has the place of the deleted one.
func TestDarkMarkIsRemoved(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 5, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	f := b.flow(ports[0])
	returns := func() {
		t.Helper()
		netnstest.Eventually(t, patience, func() error {
			before := b.at("p0.0", ports[0])
			_ = f.send(1)
			if b.at("p0.0", ports[0]) == before {
				return errors.New("nothing arrives at p0.0")
			}
			return nil
		})
	}
	returns()
	dark := b.s.have.pinned.objects.FaredDark
	if err := dark.Put(uint32(b.s.want.layout.sources[0].number), ^uint64(0)); err != nil {
		t.Fatal(err)
	}
	returns()
	b.Server.IP("link", "delete", "p0.0")
	b.awaitLive("p0.0", false)
	b.cable(0, 0)
	b.awaitLive("p0.0", true)
	returns()
	b.Leaves[0].IP("link", "set", "server0", "down")
	if b.s.have.pinned.unhooked != "" { // packets before the agent has the event are lost
		b.awaitLive("p0.0", false)
	}
	total := b.total()
	if err := f.send(100); err != nil {
		t.Fatal(err)
	}
	b.arrived(total + 100)
}
