package linux

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/testlog"
)

// TestEventsThatConcern checks which changes by other programs make the Driver read the kernel back.
func TestEventsThatConcern(t *testing.T) {
	d := offline(t, 2)
	d.state.config.Table = 7000
	d.state.want.sources[netip.Prefix{}].table = 7000
	d.state.want.claimants = map[uint32][]netip.Prefix{7000: {netip.Prefix{}}}
	d.state.want.sources[netip.Prefix{}].loopbacks = []netip.Prefix{mustPrefix("10.255.0.1/32"), mustPrefix("10.255.0.9/32")}
	d.state.have.addresses[netip.MustParseAddr("10.255.0.1")] = true
	d.set(1, 1, 1)
	d.leads(target4(0), 0, 1)
	d.obey(t)
	g := d.state.have.groups[groupKey{1, v4}]
	address := func(a string, usable, gone bool) rtnl.ObjectEvent {
		return rtnl.ObjectEvent{Gone: gone, Address: &rtnl.Address{Addr: netip.MustParseAddr(a), Usable: usable}}
	}
	route := func(prefix string, table uint32, protocol uint8, metric uint32) rtnl.ObjectEvent {
		return rtnl.ObjectEvent{Route: &rtnl.Route{Prefix: mustPrefix(prefix), Table: table, Protocol: protocol, Metric: metric}}
	}
	rule := func(table uint32) rtnl.ObjectEvent { return rtnl.ObjectEvent{Rule: &rtnl.Rule{Table: table}} }
	nexthop := func(id uint32, protocol uint8) rtnl.ObjectEvent {
		return rtnl.ObjectEvent{Nexthop: &rtnl.Nexthop{ID: id, Protocol: protocol}}
	}
	for _, c := range []struct {
		what  string
		event rtnl.ObjectEvent
		want  bool
	}{
		{"a nexthop of others", nexthop(5, 11), false}, {"a nexthop with the mark", nexthop(5, 179), true},
		{"a nexthop in our place", nexthop(d.state.want.subPorts[0].pools[v4].ids[0], 11), true},
		{"a rule of others", rule(90), false}, {"a rule to the table", rule(7000), true}, {"a rule to a source group's", rule(DefaultSourceTable + 3), true},
		{"a route elsewhere", route(target4(0), 254, 179, 20), false}, {"a route with the mark", route("10.9.9.9/32", 7000, 179, 1), true},
		{"a route with the mark of a source group", route("10.9.9.9/32", DefaultSourceTable, 179, 1), true},
		{"a route in our place", route(target4(0), 7000, 11, 20), true}, {"a route of another metric", route(target4(0), 7000, 11, 30), false},
		{"a route of no destination", route("10.9.9.9/32", 7000, 11, 20), false},
		{"an address of others", address("10.1.0.1", true, false), false}, {"a loopback, as it was", address("10.255.0.1", true, false), false},
		{"a loopback that cannot be used", address("10.255.0.1", false, false), true}, {"a loopback that goes", address("10.255.0.1", true, true), true},
		{"a loopback that comes", address("10.255.0.9", true, false), true},
	} {
		if got := d.others.concerns(c.event); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
	if g.moved || d.state.stats.Differences != 0 {
		t.Errorf("%+v, %+v", g, d.state.stats)
	}
	unfit := netip.MustParseAddr("10.255.0.1")
	d.state.have.unfit[unfit] = true
	if !d.others.concerns(address("10.255.0.1", true, false)) || d.state.have.unfit[unfit] {
		t.Errorf("a loopback that the kernel had refused: %v", d.state.have.unfit)
	}
	// A group that another program changed, with or without the mark.
	for _, protocol := range []uint8{11, 179} {
		g.moved, d.integrity.torn, d.state.stats.Differences = false, "", 0
		d.state.staleGroups[g.key] = true
		d.obey(t)
		g.segments, g.weights = []segment{{1, 64}}, []uint32{1, 1}
		clear(d.state.staleGroups)
		if !d.others.concerns(nexthop(g.id, protocol)) || !g.moved || g.weights != nil || g.segments != nil || !d.state.staleGroups[g.key] || d.state.stats.Differences != 1 {
			t.Errorf("protocol %d: %+v, %+v", protocol, g, d.state.stats)
		}
	}
	// A group that does not exist yet has no changes; its id belongs to another program.
	d.state.have.groups[groupKey{2, v4}] = &group{key: groupKey{2, v4}, id: 555}
	if d.others.concerns(nexthop(555, 11)) || d.state.have.groups[groupKey{2, v4}].moved {
		t.Error("a group that is not there was changed")
	}
}

// TestIntegrityReports: the first difference is reported, and its repair once nothing is refused or unread.
func TestIntegrityReports(t *testing.T) {
	d := offline(t, 1)
	var received reports
	d.integrity.mended(nil)
	d.integrity.differs("before %s", "Guard")
	d.integrity.mended(nil)
	d.Guard(received.report)
	want := func(what string, list ...string) {
		t.Helper()
		var got []string
		for _, i := range received.take() {
			got = append(got, fmt.Sprint(i.Intact, " ", i.Repairs, " ", i.Message))
		}
		if !slices.Equal(got, list) {
			t.Errorf("%s: %q, want %q", what, got, list)
		}
	}
	d.integrity.mended(nil)
	want("nothing differs")
	d.integrity.differs("group %d", 7)
	d.integrity.differs("group %d", 8)
	want("two differ", "false 2 group 7")
	d.integrity.mended([]failure{{}})
	d.integrity.unread = true
	d.integrity.mended(nil)
	d.integrity.unread = false
	want("not repaired")
	d.integrity.mended(nil)
	d.integrity.mended(nil)
	want("repaired", "true 3 group 7")
	d.report([]failure{{op{kind: setGroup}, unix.EINVAL}, {op{kind: setGroup}, unix.ENOMEM}})
	want("refused", "false 3 the kernel refused: invalid argument")
	d.report(nil)
	want("not refused")
}

// TestComplaint logs refusals: one line for a sync, none while the reason stays, and one at a lower level for a device
// that is down.
func TestComplaint(t *testing.T) {
	d := offline(t, 1)
	var log testlog.Log
	d.state.log = slog.New(slog.NewTextHandler(&log, nil))
	refusal := func(err error) failure { return failure{op{kind: setGroup}, err} }
	for i, c := range []struct {
		failures []failure
		line     string
	}{
		{nil, ""},
		{[]failure{refusal(unix.EINVAL), refusal(unix.EPERM)}, `level=ERROR msg="linux data plane: the kernel refused a change; retrying" error="invalid argument" others=1`},
		{[]failure{refusal(unix.EINVAL)}, ""},
		{[]failure{refusal(unix.ENETDOWN)}, `level=INFO msg="linux data plane: the kernel refused a change; retrying" error="network is down" others=0`},
	} {
		before := len(log.String())
		d.complain(c.failures)
		_, line, _ := strings.Cut(strings.TrimSpace(log.String()[before:]), " ")
		if line != c.line {
			t.Errorf("step %d: %q, want %q", i, line, c.line)
		}
	}
}
