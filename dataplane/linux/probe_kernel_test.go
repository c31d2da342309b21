package linux

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestHashAttempts: transient errors are retried hashAttempts times, and keep the previous hash.
func TestHashAttempts(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	d, _ := h.start()
	d.mu.Lock()
	hash, flow := d.prober.hash, proto.CloneOf(d.capabilities.FlowHash)
	d.mu.Unlock()
	h.Sysctl("net.ipv4.fib_multipath_hash_seed=42")
	for refusals := hashAttempts; refusals >= 0; refusals-- {
		n := 0
		var err error
		refusing(d, func(what string) unix.Errno {
			if strings.HasPrefix(what, "delete route") && strings.Contains(what, "192.0.0.8") && n < refusals {
				n++
				return unix.EBUSY
			}
			return 0
		}, nil, func() { err = d.SetForwarding(h.forwarding) })
		d.mu.Lock()
		now, nowFlow := d.prober.hash, proto.CloneOf(d.capabilities.FlowHash)
		d.mu.Unlock()
		if refusals == hashAttempts {
			if status.Code(err) != codes.Unavailable || now != hash || !proto.Equal(nowFlow, flow) || n != hashAttempts || len(log.lines("cannot be determined now")) != 1 {
				t.Errorf("%d refusals: %v, %v, %v, %d messages, %q", refusals, err, now, nowFlow, n, log.lines("level="))
			}
		} else if err != nil || now.Seed != 42 || nowFlow.Seed != 42 || nowFlow.Algorithm != computed || n != refusals {
			t.Errorf("%d refusals: %v, %v, %v, %d messages", refusals, err, now, nowFlow, n)
		}
	}
	// An error of another kind is no matter of time.
	refusing(d, beginning(unix.EPERM, "delete route"), nil, func() {
		if err := d.SetForwarding(h.forwarding); err != nil {
			t.Error(err)
		}
	})
	if f := d.Capabilities().FlowHash; f.GetAlgorithm() != asked || len(log.lines("cannot be relied on")) != 1 {
		t.Errorf("%v; %q", f, log.lines("level="))
	}
}

// TestHashWhileLinksChange: a check whose device fails or vanishes says nothing about the hash. Hello is retried, and
// finds another device.
func TestHashWhileLinksChange(t *testing.T) {
	for _, change := range [][]string{{"ip", "link", "set", "p0", "down"}, {"ip", "link", "del", "p0"}} {
		for _, at := range []string{"add nexthop", "add route"} {
			h := newHost(t, 2)
			log := h.captured()
			d := h.open()
			var err error
			changed := false
			refusing(d, func(what string) unix.Errno {
				if !changed && strings.HasPrefix(what, at) {
					changed = true
					if out, err := h.Output(change[0], change[1:]...); err != nil {
						t.Errorf("%q: %v: %s", change, err, out)
					}
				}
				return 0
			}, nil, func() { err = d.SetForwarding(h.forwarding) })
			if !changed || status.Code(err) != codes.Unavailable || len(log.lines("cannot be determined now")) != 1 {
				t.Errorf("%q at %q: %v, %v, %q", change, at, changed, err, log.lines("level="))
			}
			netnstest.Eventually(t, time.Minute, func() error { return d.SetForwarding(h.forwarding) })
			if f := d.Capabilities().FlowHash; f.GetAlgorithm() != computed {
				t.Errorf("%q at %q: then %v; %q", change, at, f, log.lines("level="))
			}
		}
	}
}

// TestLargestWeight: the largest weight follows from the kernel's answer to one of more than 8 bits.
func TestLargestWeight(t *testing.T) {
	h := newHost(t, 1)
	h.captured()
	d := h.open()
	// The test queries the kernel by a separate message.
	b := h.conn.Begin()
	b.SetNexthop(rtnl.Nexthop{ID: 5, Family: unix.AF_INET, Blackhole: true}, rtnl.Create)
	b.SetNexthop(rtnl.Nexthop{ID: 6, Members: []rtnl.Member{{ID: 5, Weight: 300}}}, rtnl.Create)
	b.DelNexthop(6)
	b.DelNexthop(5)
	kernel := 65535
	if errs := h.conn.Do(b); errs[1] != nil {
		kernel = 256
	}
	before := h.Objects()
	for _, c := range []struct {
		what   string
		refuse func(what string) unix.Errno
		want   int
		err    error
	}{
		{"both", nil, kernel, nil},
		{"no group", func(what string) unix.Errno {
			if strings.Contains(what, "group") {
				return unix.EINVAL
			}
			return 0
		}, 256, nil},
		{"nothing", beginning(unix.EPERM, "add nexthop"), 0, unix.EPERM},
	} {
		refusing(d, c.refuse, nil, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.state.maxWeight = 0
			if err := d.prober.findMaxWeight(); !errors.Is(err, c.err) || d.state.maxWeight != c.want {
				t.Errorf("%s: %d, %v", c.what, d.state.maxWeight, err)
			}
		})
		if after := h.Objects(); after != before {
			t.Errorf("%s left\n%s", c.what, after)
		}
	}
}

// TestAskedWithoutCarriers: without a carrier, IPv4 probes use the loopback, and IPv6 cannot be probed. A programmed
// route to the destination of the hash check stays.
func TestAskedWithoutCarriers(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1), destination("192.0.0.8/32", 1))
	c.hello(h.forwarding)
	h.wants("192.0.0.8/32", map[string]int{"p0": 512, "p1": 512})
	for _, device := range []string{"p0", "p1"} {
		h.leaf.IP("link", "set", device, "down")
	}
	h.wants(target6(0), map[string]int{"blackhole": 1024})
	for source, want := range map[string]codes.Code{"10.255.0.1": codes.OK, "fd00:255::1": codes.Unavailable} {
		to := target4(0)
		if want != codes.OK {
			to = target6(0)
		}
		answer, err := c.server.Landing(context.Background(), &farev1.LandingRequest{
			Source: source, Destination: mustPrefix(to).Addr().String(), DestinationPort: 4791,
		})
		if status.Code(err) != want || err != nil && !strings.Contains(err.Error(), "carrier") {
			t.Errorf("from %s: %v", source, err)
		}
		if err == nil && (!slices.Contains(answer.SubPortOfPort, 1) || !slices.Contains(answer.SubPortOfPort, 2)) {
			t.Errorf("from %s: no port lands on some sub-port", source)
		}
	}
}

// TestHeldDownIsAskedFor: an operation that holds a sub-port down makes polls of all carriers due a millisecond later.
func TestHeldDownIsAskedFor(t *testing.T) {
	h := newHost(t, 2)
	d, _ := h.start()
	d.mu.Lock()
	defer d.mu.Unlock()
	ask := func() []rtnl.LinkEvent {
		known := d.links.carriers()
		for i := range known {
			known[i].CarrierChanges-- // unlike the kernel's counts, so that a poll has results
		}
		events, err := d.links.watch.Ask(known)
		if err != nil {
			t.Fatal(err)
		}
		return events
	}
	for len(ask()) > 0 { // then not due for some milliseconds
	}
	d.apply(contract.Change{Kind: contract.SubPortChange, Device: "p0"}, map[groupKey]bool{}, map[routeKey]bool{})
	for from := time.Now(); ; {
		began := time.Now()
		events := ask()
		if len(events) == 2 && events[0].Asked {
			return
		}
		if len(events) > 0 || began.Sub(from) > time.Millisecond {
			t.Fatalf("%v, %v after the operation; want the carriers of both sub-ports", events, began.Sub(from))
		}
	}
}
