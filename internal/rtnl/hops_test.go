package rtnl_test

import (
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHops compares the next hops of routes with devices, several gateways, gateways of the other family, nexthop ids
// and groups with the commands that made them, in both modes of the kernel's reports.
func TestHops(t *testing.T) {
	s := newSpace(t)
	for _, command := range [][]string{
		{"nexthop", "add", "id", "7", "via", "10.1.0.2", "dev", "p0"},
		{"nexthop", "add", "id", "8", "via", "10.1.1.2", "dev", "p1"},
		{"nexthop", "add", "id", "9", "group", "7/8"},
		{"nexthop", "add", "id", "17", "via", "fd01:1::2", "dev", "p1"},
		{"route", "add", "default", "nhid", "7"},
		{"route", "add", "10.2.0.1/32", "nhid", "9", "proto", "static"},
		{"route", "add", "10.2.0.2/32", "nexthop", "via", "10.1.0.2", "nexthop", "via", "10.1.1.2"},
		{"route", "add", "10.2.0.3/32", "via", "inet6", "fd01::2", "dev", "p0"},
		{"route", "add", "10.2.0.4/32", "dev", "p1", "table", "100"},
		{"route", "add", "10.2.0.5/32", "nhid", "17"},
		{"route", "add", "blackhole", "10.2.0.6/32"},
		{"-6", "route", "add", "default", "nhid", "17"},
		{"-6", "route", "add", "fd02::1/128", "nexthop", "via", "fd01::2", "dev", "p0", "nexthop", "via", "fd01:1::2", "dev", "p1"},
	} {
		s.IP(command...)
	}
	names := map[int]string{0: "-", s.devices[0]: "p0", s.devices[1]: "p1"}
	want := []string{
		"0.0.0.0/0 main boot p0 10.1.0.2",
		"10.2.0.1/32 main static p0 10.1.0.2", "10.2.0.1/32 main static p1 10.1.1.2",
		"10.2.0.2/32 main boot p0 10.1.0.2", "10.2.0.2/32 main boot p1 10.1.1.2",
		"10.2.0.3/32 main boot p0 fd01::2", "10.2.0.4/32 100 boot p1 invalid IP",
		"10.2.0.5/32 main boot p1 fd01:1::2", "10.2.0.6/32 main boot - invalid IP blackhole",
		"::/0 main boot p1 fd01:1::2",
		"fd02::1/128 main boot p0 fd01::2", "fd02::1/128 main boot p1 fd01:1::2",
	}
	for _, mode := range []string{"1", "0"} {
		s.Sysctl("net.ipv4.nexthop_compat_mode=" + mode)
		var got []string
		static := 0
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			hops, err := s.conn.Hops(family, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, h := range hops {
				table := map[uint32]string{unix.RT_TABLE_MAIN: "main", 100: "100"}[h.Table]
				by := map[uint8]string{unix.RTPROT_BOOT: "boot", unix.RTPROT_STATIC: "static"}[h.Protocol]
				if by != "" {
					got = append(got, fmt.Sprint(h.Prefix, " ", table, " ", by, " ", names[h.Device], " ", h.Gateway, map[bool]string{true: " blackhole"}[h.Type == unix.RTN_BLACKHOLE]))
				}
			}
			some, err := s.conn.Hops(family, unix.RTPROT_STATIC)
			if err != nil {
				t.Fatal(err)
			}
			static += len(some)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("mode %s:\n%q, want\n%q", mode, got, want)
		}
		if static != 2 {
			t.Errorf("mode %s: %d next hops of static routes, want 2", mode, static)
		}
	}
}
