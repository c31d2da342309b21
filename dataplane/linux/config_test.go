package linux

import (
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestConfigJudged checks the documented defaults, and that contradictory values are refused by name.
func TestConfigJudged(t *testing.T) {
	got, err := Config{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	logger := got.Logger
	got.Logger = nil
	want := Config{
		Protocol: 179, Table: 254, RulePriority: 10000, SourceTable: 0x66617300, Metric: 20, Memory: 1 << 30, Seed: 0x66617265, FirstID: 0x66617265,
		ProbeTable: 0x66617265, ProbeMark: 0x66617265, ReachTable: 0x66616000, ReachPriority: 1780, AuditInterval: time.Minute,
		witnessTime: 50 * time.Millisecond,
	}
	if !reflect.DeepEqual(got, want) || logger == nil {
		t.Errorf("%+v, want %+v", got, want)
	}
	set := Config{
		Protocol: 5, Table: 7, RulePriority: 3, SourceTable: 1000, Metric: 1, Memory: 2, Seed: 3, FirstID: 4, ProbeTable: 8, ProbeMark: 9, ReachTable: 5000, ReachPriority: 2,
		AuditInterval: 1, witnessTime: 1, Buckets: 1, Logger: slog.New(slog.DiscardHandler),
	}
	if got, err := set.withDefaults(); err != nil || !reflect.DeepEqual(got, set) {
		t.Errorf("%+v, %v; want it as it was", got, err)
	}
	for _, c := range []struct {
		change func(*Config)
		names  string // "": valid
	}{
		{func(c *Config) { c.Protocol = 4 }, "protocol 4"}, {func(c *Config) { c.Protocol = 1 }, "protocol 1"},
		{func(c *Config) { c.AuditInterval = -1 }, "audit interval"},
		{func(c *Config) { c.Table, c.ProbeTable = 9, 9 }, "probe table"},
		{func(c *Config) { c.Table = 1000 }, "source groups"}, {func(c *Config) { c.Table = 1255 }, "source groups"},
		{func(c *Config) { c.Table = 999 }, ""}, {func(c *Config) { c.Table = 1256 }, ""},
		{func(c *Config) { c.ProbeTable = 1000 }, "source groups"}, {func(c *Config) { c.ProbeTable = 1255 }, "source groups"},
		{func(c *Config) { c.ProbeTable = 1256 }, ""},
		{func(c *Config) { c.SourceTable = math.MaxUint32 - 255 }, "source groups"}, {func(c *Config) { c.SourceTable = math.MaxUint32 - 256 }, ""},
		{func(c *Config) { c.Table = 5000 }, "for probes"}, {func(c *Config) { c.ProbeTable = 6023 }, "for probes"}, {func(c *Config) { c.Table = 6024 }, ""},
		{func(c *Config) { c.ReachTable = 1255 }, "for probes"}, {func(c *Config) { c.ReachTable = 1256 }, ""}, {func(c *Config) { c.ReachTable = math.MaxUint32 - 1023 }, "for probes"},
		{func(c *Config) { c.RulePriority = 2 }, "rule priority 2"}, {func(c *Config) { c.RulePriority = 3 }, ""},
	} {
		config := set
		c.change(&config)
		if _, err := config.withDefaults(); (err == nil) != (c.names == "") || err != nil && !strings.Contains(err.Error(), c.names) {
			t.Errorf("%+v: %v, want %q", config, err, c.names)
		}
	}
}

// TestForwardingJudged checks next hops and the limits of sub-ports and source groups.
func TestForwardingJudged(t *testing.T) {
	d := offline(t, 1)
	hops := func(four, six string) *farev1.Forwarding {
		return &farev1.Forwarding{Planes: []*farev1.ForwardingPlane{
			{Plane: "A", SubPorts: []*farev1.ForwardingSubPort{{Device: "p0", NextHopV4: "10.1.0.2"}}},
			{Plane: "B", SubPorts: []*farev1.ForwardingSubPort{{Device: "p1"}, {Device: "p2", NextHopV4: four, NextHopV6: six}}},
		}}
	}
	for _, c := range []struct {
		four, six string
		ok        bool
	}{
		{"", "", true}, {"10.1.0.2", "fd01::2", true}, {"::ffff:10.1.0.2", "fe80::1%eth0", true}, {"169.254.1.1", "", true},
		{"fd01::2", "", false}, {"", "10.1.0.2", false}, {"leaf", "", false}, {"", "leaf", false}, {"0.0.0.0", "", false}, {"", "::", false},
		{"224.0.0.1", "", false}, {"", "ff02::1", false}, {"127.0.0.1", "", false}, {"", "::1", false},
	} {
		err := d.judge(hops(c.four, c.six))
		if (err == nil) != c.ok || !c.ok && (status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "planes[1].sub_ports[1]: ")) {
			t.Errorf("%q, %q: %v", c.four, c.six, err)
		}
	}
	for text, want := range map[string]string{"::ffff:10.1.0.2": "10.1.0.2", "fe80::1%eth0": "fe80::1", "": "invalid IP"} {
		if got, err := parseHop(text); err != nil || got.String() != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for _, f := range []*farev1.Forwarding{nil, {}, {Planes: []*farev1.ForwardingPlane{{Plane: "A"}}}} {
		if err := d.judge(f); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "no sub-ports") {
			t.Errorf("%v: %v", f, err)
		}
	}
	d.state.config.Buckets = 2
	if err := d.judge(hops("", "")); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "3 sub-ports exceed 2 buckets") {
		t.Errorf("more sub-ports than buckets: %v", err)
	}
	d.state.config.Buckets = 3
	if err := d.judge(hops("", "")); err != nil {
		t.Errorf("as many sub-ports as buckets: %v", err)
	}
	f := hops("", "")
	for i := range 128 {
		loopback := fmt.Sprintf("10.255.%d.%d/32", i/250, 1+i%250)
		f.Loopbacks = append(f.Loopbacks, loopback)
		f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: []string{loopback}, Devices: []string{"p0"}})
	}
	if err := d.judge(f); err != nil {
		t.Errorf("128 source groups: %v", err)
	}
	f.SourceGroups = append(f.SourceGroups, &farev1.SourceGroup{Loopbacks: []string{"10.255.9.9/32"}, Devices: []string{"p0"}})
	if err := d.judge(f); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "129 source groups") {
		t.Errorf("129 source groups: %v", err)
	}
	if !transit(hops("", "")) || transit(f) {
		t.Error("a node without loopbacks is not the one that forwards for others")
	}
	d.state.ipv6 = true
	if d.state.hopsV6(hops("10.1.0.2", "")) || !d.state.hopsV6(hops("", "fd01::2")) {
		t.Error("IPv6 is not where the next hops are")
	}
	d.state.ipv6 = false
	if d.state.hopsV6(hops("", "fd01::2")) {
		t.Error("IPv6 next hops without IPv6")
	}
}
