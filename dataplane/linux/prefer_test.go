package linux

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// unbound returns the source address that the kernel chooses for an unbound UDP socket that connects to a destination.
func (h *host) unbound(to string) (source netip.Addr, err error) {
	err = h.Do(func() error {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(mustPrefix(to).Addr(), 4791)))
		if err != nil {
			return err
		}
		source = c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		return c.Close()
	})
	return source, err
}

// sends fails unless unbound sockets use the given sources before a deadline; "" is any address except the loopback's.
func (h *host) sends(sources ...string) {
	h.t.Helper()
	netnstest.Eventually(h.t, time.Minute, func() error {
		for i, to := range []string{target4(0), target6(0)} {
			got, err := h.unbound(to)
			loopback := mustPrefix(h.forwarding.Loopbacks[i]).Addr()
			if err != nil || sources[i] == "" && got == loopback || sources[i] != "" && got.String() != sources[i] {
				return fmt.Errorf("to %s the kernel chooses %v, %v; want %q", to, got, err, sources[i])
			}
		}
		return nil
	})
}

// logged records the log.
type logged struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logged) lines(with string) (lines []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, with) {
			lines = append(lines, line)
		}
	}
	return lines
}

// quiet fails if the Driver sends messages although nothing has changed.
func quiet(t *testing.T, d *Driver) {
	t.Helper()
	rest(t, d)
	before := d.Stats()
	d.audit()
	d.audit()
	if after := d.Stats(); sent(after) != sent(before) || after.Differences != before.Differences {
		t.Errorf("audits changed something: %+v, before %+v", after, before)
	}
}

// TestUnboundSocketsSendFromLoopback queries the kernel for the source address of unbound sockets while loopbacks and
// routes change.
func TestUnboundSocketsSendFromLoopback(t *testing.T) {
	h := newHost(t, 3)
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 2, 1), destination(target4(0), 1), destination(target6(0), 1))
	if err := d.Settle(); err != nil {
		t.Fatal(err)
	}
	for range 32 { // each has a different source port, and so a different sub-port
		h.sends("10.255.0.1", "fd00:255::1")
	}
	quiet(t, d)

	for i, route := range []string{"route", "-6 route"} {
		to, other := []string{target4(0), target6(0)}[i], []string{"10.1.1.1", "fd01:1::1"}[i]
		repairs := d.Stats().Differences
		h.IP(strings.Fields(fmt.Sprintf("%s replace %s nhid %d proto 179 metric 20 src %s", route, to, d.state.have.groups[groupKey{1, family(i)}].id, other))...)
		netnstest.Eventually(t, time.Minute, func() error {
			if d.Stats().Differences == repairs {
				return fmt.Errorf("the route to %s with another source address is not noticed", to)
			}
			return nil
		})
		h.sends("10.255.0.1", "fd00:255::1")
	}
	quiet(t, d)

	// The next run adopts the routes unchanged.
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d, c = h.start()
	if got := d.Stats(); got.Routes != 0 || got.RouteObjects != 3 {
		t.Errorf("routes were set again after a restart: %+v", got)
	}
	s = program(t, c.server)
	s.do(h.group(1, 1, 2, 1), destination(target4(0), 1), destination(target6(0), 1))
	h.sends("10.255.0.1", "fd00:255::1")

	// A Hello with a different first loopback.
	h.IP("addr", "add", "10.255.0.7/32", "dev", "lo")
	h.forwarding.Loopbacks = append([]string{"10.255.0.7/32"}, h.forwarding.Loopbacks...)
	c.hello(h.forwarding)
	h.forwarding.Loopbacks = h.forwarding.Loopbacks[1:]
	h.sends("10.255.0.7", "fd00:255::1")
	quiet(t, d)
	if got := d.Stats(); got.Errors != 0 || got.Differences != 0 {
		t.Errorf("%+v", got)
	}
}

// TestLoopbackMissing checks that routes exist without a source address while the host lacks the loopback, and with it
// afterwards.
func TestLoopbackMissing(t *testing.T) {
	h := newHost(t, 2)
	h.config.AuditInterval = time.Hour
	var log logged
	h.config.Logger = slog.New(slog.NewTextHandler(&log, nil))
	h.IP("addr", "del", "10.255.0.1/32", "dev", "lo")
	h.IP("addr", "del", "fd00:255::1/128", "dev", "lo")
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1), destination(target6(0), 1), destination(target4(1), 1))
	h.sends("", "")
	if f := d.Capabilities().FlowHash; f.GetAlgorithm() != computed {
		t.Errorf("flow hash %v", f)
	}
	quiet(t, d)
	s.do(destination(target4(3), 1), destination(target6(3), 1))
	warned := func(n int) {
		t.Helper()
		if lines := log.lines("is not an address of the host"); len(lines) != n {
			t.Errorf("%d warnings, want %d, one of each family when an address is found missing: %v", len(lines), n, lines)
		}
	}
	warned(2)
	if got := d.Stats(); got.Errors != 0 {
		t.Errorf("%+v", got)
	}

	add := func() {
		h.IP("addr", "add", "10.255.0.1/32", "dev", "lo")
		h.IP("addr", "add", "fd00:255::1/128", "dev", "lo", "nodad")
	}
	add()
	h.sends("10.255.0.1", "fd00:255::1")
	quiet(t, d)

	// The kernel removes the IPv4 routes that name the address together with the address.
	h.IP("addr", "del", "10.255.0.1/32", "dev", "lo")
	h.IP("addr", "del", "fd00:255::1/128", "dev", "lo")
	h.sends("", "")
	h.wants(target4(1), map[string]int{"p0": 512, "p1": 512})
	quiet(t, d)
	warned(4)
	add()
	h.sends("10.255.0.1", "fd00:255::1")
	h.IP("addr", "flush", "dev", "lo")

	// An IPv6 address is checked for duplicates first.
	h.sends("", "")
	netnstest.Veth(t, h.Namespace, "d0", h.leaf, "d0")
	h.IP("link", "set", "d0", "up")
	h.leaf.IP("link", "set", "d0", "up")
	h.IP("addr", "add", "10.255.0.1/32", "dev", "d0")
	h.IP("addr", "add", "fd00:255::1/128", "dev", "d0")
	h.sends("10.255.0.1", "fd00:255::1")

	// The kernel lists the address but refuses it, as in the main table for the address of a device in a VRF.
	h.IP("route", "del", "local", "10.255.0.1", "dev", "d0", "table", "local")
	s.do(h.group(2, 1, 2), destination(target4(2), 2), destination(target6(2), 2)) // in a separate group, because the kernel checks a source once per group
	h.sends("", "fd00:255::1")
	if got := d.Stats(); got.Errors != 1 {
		t.Errorf("%d routes were refused, want the one that found out: %+v", got.Errors, got)
	}
	quiet(t, d)
	h.IP("addr", "del", "10.255.0.1/32", "dev", "d0")
	h.IP("addr", "add", "10.255.0.1/32", "dev", "d0")
	h.sends("10.255.0.1", "fd00:255::1")
	quiet(t, d)
}

// TestUnboundSocketsOfSourceGroups checks that routes of the main table name the first source group's loopback, and
// those of the other tables the loopback of their source group.
func TestUnboundSocketsOfSourceGroups(t *testing.T) {
	h := gpus(t)
	d, c := h.start()
	h.someSources(program(t, c.server))
	h.sends("10.255.0.1", "fd00:255::1")
	for i, g := range d.state.want.order[1:] {
		for f, to := range []string{target4(0), target6(0)} {
			want := strings.Split(h.forwarding.SourceGroups[i+1].Loopbacks[f], "/")[0]
			text := h.IP([]string{"-4", "-6"}[f], "route", "show", "table", fmt.Sprint(g.own), "to", to)
			if !strings.Contains(text, "src "+want+" ") {
				t.Errorf("source group %d: %q has not the source address %s", i+1, text, want)
			}
		}
	}
	quiet(t, d)
}
