package udp

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestManySourcePorts checks that each port has a socket, at most 1024 are open, and those unused for a minute are
// closed.
func TestManySourcePorts(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			var clock atomic.Int64
			var a, b device
			open(t, &a, Config{Address: f.a})
			a.endpoint.config.Now = func() time.Duration { return time.Duration(clock.Load()) }
			eb := open(t, &b, Config{Address: f.b})
			to := netip.AddrPortFrom(f.b, eb.Port())
			const ports = 1500 // from 61000 on: the kernel assigns lower ports to other programs
			for i := 0; i < 2*ports; {
				a.do(func() {
					for range 4 * inFlight {
						a.endpoint.Send(to, uint16(61000+i%ports), numbered(i, 64), nil, nil)
						if i++; i == 2*ports {
							break
						}
					}
				})
				b.until(t, waitFor(&b, i))
			}
			b.mu.Lock()
			of := map[uint16]int{}
			for _, from := range b.from {
				of[from.Port()]++
			}
			b.mu.Unlock()
			for i := range ports {
				if n := of[uint16(61000+i)]; n != 2 {
					t.Fatalf("%d datagrams from port %d, want 2", n, 61000+i)
				}
			}
			c := accounted(t, &a)
			if c["sockets"] != 1024 || c["sockets_opened"] < ports {
				t.Errorf("%d sockets of %d opened", c["sockets"], c["sockets_opened"])
			}
			clock.Store(int64(idle) + 1)
			flood(&a, to, 61000, 1, 64)
			a.mu.Lock()
			known := len(a.endpoint.sender.ports)
			a.mu.Unlock()
			if c := accounted(t, &a); c["sockets"] != 1 || known != 1 {
				t.Errorf("after a minute: %d sockets of %d ports", c["sockets"], known)
			}
		})
	}
}

// TestSourcePortIsShared checks that endpoints can send from the same port of the same address, and from their
// receiving port; a foreign socket with exclusive use of the port prevents this until it is closed.
func TestSourcePortIsShared(t *testing.T) {
	var clock atomic.Int64
	var a, a2, b device
	ea := open(t, &a, Config{Address: families[0].a})
	open(t, &a2, Config{Address: families[0].a})
	a.endpoint.config.Now = func() time.Duration { return time.Duration(clock.Load()) }
	eb := open(t, &b, Config{Address: families[0].b})
	to := netip.AddrPortFrom(families[0].b, eb.Port())
	flood(&a, to, 61000, 1, 64)
	flood(&a2, to, 61000, 1, 64)
	flood(&a, to, ea.Port(), 1, 64)
	b.until(t, waitFor(&b, 3))

	stranger, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(families[0].a, 0)))
	if err != nil {
		t.Fatal(err)
	}
	port := stranger.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	flood(&a, to, port, 5, 64)
	if c := accounted(t, &a); c["dropped_no_socket"] != 5 {
		t.Errorf("beside a stranger: %v", c)
	}
	stranger.Close()
	clock.Store(int64(tryAgain))
	flood(&a, to, port, 5, 64)
	b.until(t, waitFor(&b, 8))
}

// TestSourcePortsTakeNothing checks that datagrams to a source port are neither kept nor passed to the core.
func TestSourcePortsTakeNothing(t *testing.T) {
	var a, b device
	ea := open(t, &a, Config{Address: families[0].a})
	eb := open(t, &b, Config{Address: families[0].b})
	flood(&a, netip.AddrPortFrom(families[0].b, eb.Port()), 61000, 1, 64)
	flood(&b, netip.AddrPortFrom(families[0].a, 61000), 61501, 500, 1000)
	flood(&b, netip.AddrPortFrom(families[0].a, ea.Port()), 61501, 1, 99)
	a.until(t, waitFor(&a, 1))
	a.until(t, func() error { // they may still be queued on another processor
		if drops(ea.sender.ports[61000].fd) == 0 {
			return errors.New("the filter has dropped nothing")
		}
		return nil
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.got) != 1 || len(a.got[0]) != 99 {
		t.Errorf("%d datagrams came in", len(a.got))
	}
}

// TestCloseDuringTraffic checks that nothing is delivered after Close, datagrams sent are counted, and no descriptor
// remains.
func TestCloseDuringTraffic(t *testing.T) {
	descriptors := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	round := func() {
		var a, b device
		var closed atomic.Bool
		b.received = func(from netip.AddrPort, p []byte) {
			if closed.Load() {
				t.Error("received after Close")
			}
			b.endpoint.Send(from, 61501, p, nil, nil)
		}
		b.ticked = func() { b.endpoint.WakeAt(1) }
		ea := open(t, &a, Config{Address: families[0].a})
		eb := open(t, &b, Config{Address: families[0].b})
		b.do(func() { eb.WakeAt(1) })
		to := netip.AddrPortFrom(families[0].b, eb.Port())
		var wait sync.WaitGroup
		stop := make(chan struct{})
		wait.Go(func() {
			for i := uint16(0); ; i++ {
				select {
				case <-stop:
					return
				default:
					flood(&a, to, 61000+i%8, 20, 500)
				}
			}
		})
		b.until(t, func() error {
			if c := eb.Counters(); c["received"] < 100 || c["ticks"] < 10 {
				return fmt.Errorf("not yet: %v", c)
			}
			return nil
		})
		wait.Go(eb.Close)
		eb.Close()
		closed.Store(true)
		flood(&b, netip.AddrPortFrom(families[0].a, ea.Port()), 61000, 3, 10)
		if c := accounted(t, &b); c["dropped_closed"] < 3 || c["sockets"] != 0 {
			t.Errorf("after Close: %v", c)
		}
		ea.Close() // while its sender is active
		close(stop)
		wait.Wait()
		accounted(t, &a)
	}
	round()
	before := descriptors()
	for range 5 {
		round()
	}
	if after := descriptors(); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestWakeAt checks that the last request wins, each causes one tick, never before its time, and 0 cancels it.
func TestWakeAt(t *testing.T) {
	var d device
	type tick struct{ wanted, now time.Duration }
	var ticks []tick
	var wanted time.Duration
	var e *Endpoint
	wish := func(after time.Duration) {
		wanted = e.config.Now() + after
		e.WakeAt(wanted)
	}
	d.ticked = func() {
		ticks = append(ticks, tick{wanted, e.config.Now()})
		if len(ticks) == 2 {
			wish(time.Millisecond) // a tick may request the next one
		}
	}
	e = open(t, &d, Config{Address: families[0].a})
	come := func(n int) {
		t.Helper()
		d.until(t, func() error {
			if len(ticks) < n {
				return fmt.Errorf("%d ticks of %d", len(ticks), n)
			}
			return nil
		})
	}
	d.do(func() { wish(time.Hour); wish(time.Millisecond) }) // sooner
	come(1)
	d.do(func() { wish(time.Millisecond); wish(20 * time.Millisecond) }) // later
	come(3)
	d.do(func() { wish(time.Millisecond); e.WakeAt(0) }) // canceled
	d.do(func() { e.WakeAt(0) })
	d.do(func() { wish(-time.Second) }) // immediately
	come(4)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(ticks) != 4 || e.Counters()["ticks"] != 4 {
		t.Errorf("%d ticks, want 4", len(ticks))
	}
	for i, k := range ticks {
		if k.now < k.wanted {
			t.Errorf("tick %d at %v, wanted at %v", i, k.now, k.wanted)
		}
	}
}

// TestNothingIsAllocated checks sending, receiving and setting the timer in the steady state.
func TestNothingIsAllocated(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			var a, b device
			n, all := 0, make(chan struct{}, 1)
			b.received = func(netip.AddrPort, []byte) {
				if n++; n%256 == 0 {
					all <- struct{}{}
				}
			}
			ea := open(t, &a, Config{Address: f.a})
			eb := open(t, &b, Config{Address: f.b})
			to := netip.AddrPortFrom(f.b, eb.Port())
			head, payload, tail := make([]byte, 16), make([]byte, 1000), make([]byte, 4)
			batch := func() {
				for i := range 256 {
					ea.Next(to, uint16(61000+i/3%8), 1020)
					ea.Send(to, uint16(61000+i/3%8), head, payload, tail)
				}
				ea.WakeAt(ea.config.Now() + time.Second)
			}
			if got := testing.AllocsPerRun(50, func() {
				a.do(batch)
				<-all
			}); got != 0 {
				t.Errorf("%v allocations for 256 datagrams", got)
			}
		})
	}
}
