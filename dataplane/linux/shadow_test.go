package linux

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// suggested waits until the data plane has suggested a retry of what the last try refused.
func (s *stream) suggested() {
	s.t.Helper()
	for !s.Retry {
		response, err := s.Recv()
		if err != nil {
			s.t.Fatal(err)
		}
		s.Retry = response.Retry
	}
	s.Retry = false
}

// TestOccupiedPlace checks that a destination whose place a foreign route has is refused, without work in the kernel
// when it is repeated, and that a retry is suggested when the route may be gone: by the kernel's notification, by that
// of a link (the kernel then removes IPv4 routes without a notification), and by the audit.
func TestOccupiedPlace(t *testing.T) {
	h := newHost(t, 3)
	h.forwarding.Planes = h.forwarding.Planes[:2] // p2 is no sub-port
	h.config.AuditInterval = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1))
	occupied := []*farev1.Operation{destination(target4(0), 1), destination(target6(0), 1), destination(target4(1), 1)}
	refused := func(s *stream, want int) {
		t.Helper()
		got := s.try(append([]*farev1.Operation{destination(target4(2), 1)}, occupied...)...)
		if len(got) != want {
			t.Fatalf("%d refusals %v, want %d", len(got), got, want)
		}
		for _, ack := range got {
			if codes.Code(ack.Code) != codes.Unavailable || !strings.Contains(ack.Message, "another program's route to") {
				t.Errorf("refusal %v, want UNAVAILABLE with the cause", ack)
			}
		}
	}
	h.IP("route", "add", target4(0), "via", "10.1.1.2", "metric", "20", "proto", "186")
	h.IP("route", "add", target6(0), "via", "fd01:1::2", "metric", "20", "proto", "186")
	h.IP("route", "add", target4(1), "dev", "p2", "metric", "20", "proto", "186")
	first := s.try(occupied[0])
	if again := s.try(occupied[0]); len(first) != 1 || len(again) != 1 || first[0].Message != again[0].Message {
		t.Errorf("refused by %v, then by %v; want the same text", first, again)
	}
	refused(s, 3)
	before := d.Stats()
	refused(s, 3)
	if after := d.Stats(); after.Errors != before.Errors || after.Resyncs != before.Resyncs {
		t.Errorf("repeated refusals cost %d messages and %d read-backs", after.Errors-before.Errors, after.Resyncs-before.Resyncs)
	}
	h.IP("route", "del", target4(0), "proto", "186")
	s.suggested()
	refused(s, 2)
	h.IP("route", "del", target6(0), "proto", "186")
	s.suggested()
	refused(s, 1)
	h.IP("link", "set", "p2", "down")
	s.suggested()
	refused(s, 0)
	if got := d.Stats().Audits; got != 0 {
		t.Errorf("%d audits", got)
	}

	h = newHost(t, 2)
	h.config.AuditInterval = 20 * time.Millisecond
	d, c = h.start()
	s = program(t, c.server)
	s.do(h.group(1, 1, 1))
	h.IP("route", "add", target4(0), "via", "10.1.1.2", "metric", "20", "proto", "186")
	occupied = occupied[:1]
	refused(s, 1)
	d.mu.Lock()
	h.IP("route", "del", target4(0), "proto", "186")
	d.others.disturbed() // the notification is lost
	d.mu.Unlock()
	s.suggested()
	refused(s, 0)
}

// shadowed waits for a report that packets follow another program's route, and checks its text.
func (r *reports) shadowed(t *testing.T, texts ...string) {
	t.Helper()
	var all []*farev1.Integrity
	netnstest.Eventually(t, time.Minute, func() error {
		all = append(all, r.take()...)
		if len(all) == 0 || all[len(all)-1].Intact {
			return fmt.Errorf("reports %v; want one that is not intact at the end", all)
		}
		for _, text := range texts {
			if message := all[len(all)-1].Message; !strings.Contains(message, text) {
				return fmt.Errorf("report %q, want %q in it", message, text)
			}
		}
		return nil
	})
}

// looked waits until the Driver has looked at the present state: it begins a look after the end of the previous one.
func looked(t *testing.T, d *Driver) {
	t.Helper()
	for range 2 {
		d.mu.Lock()
		d.lookSoon()
		d.mu.Unlock()
		netnstest.Eventually(t, time.Minute, func() error {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.shadows.due {
				return fmt.Errorf("no look yet")
			}
			return nil
		})
	}
}

// TestShadowedRoutes checks that routes and rules of other programs which lead packets elsewhere are reported with
// their text as long as they exist, whatever makes the kernel prefer them, and that those which do not are not
// reported. The next audit is an hour away.
func TestShadowedRoutes(t *testing.T) {
	h := newHost(t, 2)
	h.captured()
	h.IP("addr", "add", "10.255.0.3/32", "dev", "lo")
	h.forwarding.Loopbacks = append(h.forwarding.Loopbacks, "10.255.0.3/32")
	d, c := h.start()
	var received reports
	d.Guard(received.report)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1))
	for i := range 300 { // more than are looked at in one piece
		s.do(destination(target4(i), 1), destination(target6(i), 1))
	}
	e := h.tap()
	to4, to6, own4 := strings.TrimSuffix(target4(0), "/32"), strings.TrimSuffix(target6(0), "/128"), "10.255.0.1"
	h.IP("route", "add", "default", "via", "10.1.1.2", "table", "90", "proto", "186")
	h.IP("-6", "route", "add", "default", "via", "fd01:1::2", "table", "90", "proto", "186")
	looked(t, d)
	received.take()
	for _, x := range []struct {
		what     string
		do, undo string   // commands of ip(8)
		texts    []string // in the report
		leaves   string   // a device by which all packets to the first destination leave; "" if that is not tested
	}{
		{"a better metric", "route add " + to4 + " via 10.1.1.2 proto 186", "route del " + to4 + " proto 186",
			[]string{"packets to " + target4(0) + " ", "table 254 (protocol 186, metric 0)", "remove that route"}, "p1"},
		{"a better metric of IPv6", "-6 route add " + to6 + " via fd01:1::2 metric 5 proto 186", "-6 route del " + to6 + " proto 186",
			[]string{"packets to " + target6(0) + " ", "protocol 186, metric 5"}, ""},
		{"an equal metric in front", "route prepend " + to4 + " via 10.1.1.2 proto 186 metric 20", "route del " + to4 + " proto 186", []string{"protocol 186, metric 20"}, "p1"},
		{"a rule before", "rule add pref 500 lookup 90", "rule del pref 500",
			[]string{"and other destinations", "route 0.0.0.0/0 of table 90 (protocol 186)", "before the agent's in table 254", "route or rule"}, "p1"},
		{"a rule before of IPv6", "-6 rule add pref 500 lookup 90", "-6 rule del pref 500", []string{"route ::/0 of table 90"}, ""},
		{"a rule by source", "rule add pref 500 from " + own4 + " lookup 90", "rule del pref 500", []string{"from " + own4, "table 90"}, "p1"},
		{"a rule by another source", "rule add pref 500 from 10.255.0.3 lookup 90", "rule del pref 500", []string{"from 10.255.0.3", "table 90"}, ""},
		{"a rule by port", "rule add pref 500 ipproto udp dport 4791 lookup 90", "rule del pref 500", []string{"port 4791", "table 90"}, ""},
		{"a rule that refuses", "rule add pref 500 to " + to4 + " prohibit", "rule del pref 500", []string{"packets to " + target4(0), "are refused by a route or rule"}, ""},
		{"a rule that refuses IPv6", "-6 rule add pref 500 to " + to6 + " unreachable", "-6 rule del pref 500", []string{"packets to " + target6(0), "are refused by a route or rule"}, ""},
		{"no rule", "-6 rule del pref 32766", "-6 rule add pref 32766 lookup main", []string{"packets to " + target6(0), "are refused by a route or rule"}, ""},
		{"a blackhole", "route add blackhole " + to4 + " proto 186", "route del blackhole " + to4 + " proto 186", []string{"are refused by a route or rule"}, ""},
		{"a route in a table that a rule looks up", "route add 10.0.0.0/8 via 10.1.1.2 table 91 proto 186", "route del 10.0.0.0/8 table 91", []string{"route 10.0.0.0/8 of table 91"}, "p1"},
		{"an unreachable route of IPv6", "-6 route add unreachable " + to6 + " metric 5 proto 186", "-6 route del unreachable " + to6 + " metric 5 proto 186",
			[]string{"packets to " + target6(0), "are refused by a route or rule"}, ""},
		{"an address of the host", "addr add " + target4(0) + " dev lo", "addr del " + target4(0) + " dev lo", []string{"packets to " + target4(0)}, ""},
	} {
		t.Run(x.what, func(t *testing.T) {
			if strings.Contains(x.do, "table 91") {
				h.IP("rule", "add", "pref", "501", "lookup", "91")
				looked(t, d)
				defer h.IP("rule", "del", "pref", "501")
			}
			h.IP(strings.Fields(x.do)...)
			received.shadowed(t, x.texts...)
			if x.leaves != "" {
				if got := e.send(own4, target4(0), 64); got[x.leaves] != 64 {
					t.Errorf("packets leave by %v, want 64 by %s", got, x.leaves)
				}
			}
			h.IP(strings.Fields(x.undo)...)
			received.settled(t)
			if got := e.send(own4, target4(0), 256); got["p0"] == 0 || got["p1"] == 0 {
				t.Errorf("afterwards packets leave by %v", got)
			}
		})
	}
	t.Run("harmless", func(t *testing.T) {
		looked(t, d)
		received.take()
		h.IP("route", "add", to4, "via", "10.1.1.2", "metric", "50", "proto", "186")
		h.IP("route", "add", "10.0.0.0/8", "via", "10.1.1.2", "proto", "186")
		h.IP("rule", "add", "pref", "500", "fwmark", "7", "lookup", "90")
		h.IP("rule", "add", "pref", "501", "from", "10.255.0.77", "lookup", "90")
		h.IP("rule", "add", "pref", "502", "ipproto", "udp", "dport", "53", "lookup", "90")
		h.IP("rule", "add", "pref", "32767", "lookup", "90")
		looked(t, d)
		if all := received.take(); len(all) > 0 {
			t.Errorf("reports %v", all)
		}
		// A sub-port without a carrier, and a destination without a way out.
		h.leaf.IP("link", "set", "p0", "down")
		h.carriers(1)
		s.do(h.group(1))
		looked(t, d)
		h.leaf.IP("link", "set", "p0", "up")
		h.carriers(2)
		s.do(h.group(1, 1, 1))
		looked(t, d)
		if all := slices.DeleteFunc(received.take(), func(i *farev1.Integrity) bool { return i.Intact }); len(all) > 0 {
			t.Errorf("reports %v", all)
		}
	})
}

// TestShadowIsFound checks that a route that has precedence is found without a notification: when the destination comes
// after it, and by the audits, which look at a part of many destinations each.
func TestShadowIsFound(t *testing.T) {
	h := newHost(t, 2)
	log := h.captured()
	h.IP("route", "add", target4(0), "via", "10.1.1.2", "proto", "186")
	d, c := h.start()
	var received reports
	d.Guard(received.report)
	s := program(t, c.server)
	s.do(h.group(1, 1, 1))
	looked(t, d)
	s.do(destination(target4(0), 1), destination(target4(1), 1))
	received.shadowed(t, "packets to "+target4(0))
	if lines := log.lines("packets follow a route of another program"); len(lines) != 1 {
		t.Errorf("log %q, want one line", lines)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	h.IP("route", "del", target4(0), "proto", "186")

	h.config.AuditInterval = 200 * time.Millisecond
	d, c = h.start()
	var again reports
	d.Guard(again.report)
	s = program(t, c.server)
	operations := []*farev1.Operation{h.group(1, 1, 1)}
	for i := range 2 * lookLeast {
		operations = append(operations, destination(target4(i), 1))
	}
	s.do(operations...)
	looked(t, d) // from now on only audits look
	for _, step := range [][]string{{"route", "add", target4(0), "via", "10.1.1.2", "proto", "186"}, {"route", "del", target4(0), "proto", "186"}} {
		d.mu.Lock()
		h.IP(step...)
		d.others.disturbed() // the notification is lost
		d.mu.Unlock()
		if step[1] == "add" {
			again.shadowed(t, "metric 0")
		} else {
			again.settled(t)
		}
	}
}
