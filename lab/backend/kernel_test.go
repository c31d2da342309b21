package backend

import (
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestKernelIsRead verifies that lines of ip become routes with the buckets of each device, by the rules for the
// source.
func TestKernelIsRead(t *testing.T) {
	nexthops := []kernelNexthop{{ID: 1, Dev: "p0.0"}, {ID: 2, Dev: "p0.0"}, {ID: 3, Dev: "p1.0"}, {ID: 9, Blackhole: &struct{}{}}}
	routes := []kernelRoute{{Dst: "10.255.0.2", NHID: 10}, {Dst: "10.255.0.3", Type: "blackhole"}, {Dst: "10.255.0.4", NHID: 9}, {Dst: "10.255.0.5", NHID: 1}}
	buckets := kernelBuckets{}
	for i, id := range []int{1, 2, 1, 2, 1, 2, 3, 3, 3, 3} {
		if err := buckets.parse(fmt.Appendf(nil, "id 10 index %d idle_time 0.32 nhid %d \n", i, id)); err != nil {
			t.Fatal(err)
		}
	}
	for _, line := range []string{"", "id 10", "id 10 nhid x", "Error: Invalid nexthop id."} {
		if buckets.parse([]byte(line)) == nil {
			t.Errorf("%q is no bucket", line)
		}
	}
	// A GPU that owns its ports has a table by its source address, which precedes main; packets from another GPU do not
	// use it.
	routes = append(routes, kernelRoute{Dst: "10.255.0.2", Table: "500", NHID: 11}, kernelRoute{Dst: "10.255.0.3", Table: "500", NHID: 10}, kernelRoute{Dst: "10.255.0.2", Table: "501", NHID: 5})
	mark, udp, two := "0x5", "udp", 24
	rules := []kernelRule{{Src: "all", Table: "local"}, {Src: "10.255.0.9", Table: "500"}, {Src: "all", FWMark: &mark, Table: "501"}, {Src: "all", IPProto: &udp, Table: "501"},
		{Src: "10.255.7.0", SrcLen: &two, Table: "500"}, {Src: "all", Table: "main"}}
	buckets.add(11, 3)
	table := newKernelTable(rules, routes, nexthops, buckets)
	one := netip.MustParseAddr("10.255.0.1")
	for src, want := range map[string]map[string]map[string]uint64{ // by source and destination
		"10.255.0.9": {"10.255.0.2": {"p1.0": 1}, "10.255.0.3": {"p0.0": 6, "p1.0": 4}},
		"10.255.7.4": {"10.255.0.2": {"p1.0": 1}, "10.255.0.3": {"p0.0": 6, "p1.0": 4}}, // blocked for others
		one.String(): {"10.255.0.2": {"p0.0": 6, "p1.0": 4}, "10.255.0.5": {}},
	} {
		for dst, devices := range want {
			if r := table.Toward(netip.MustParseAddr(src), netip.MustParseAddr(dst)); r.Err != nil || !maps.Equal(r.Devices, devices) {
				t.Errorf("%s -> %s: %+v, want %v", src, dst, r, devices)
			}
		}
	}
	for _, dst := range []string{"10.255.0.3", "10.255.0.4", "10.255.0.9"} {
		if r := table.Toward(one, netip.MustParseAddr(dst)); r.Err != errNoRoute {
			t.Errorf("%s: %+v, want no route", dst, r)
		}
	}
	if r := table.Toward(one, netip.MustParseAddr("10.255.0.2")); r.Nexthop != 10 {
		t.Errorf("nexthop %d, want 10", r.Nexthop)
	}
}

func TestFailedLine(t *testing.T) {
	if got := failedLine("link set a up\nlink set b up\n", "Cannot find device \"b\"\nCommand failed -:2\n"); !strings.HasSuffix(got, "(link set b up)") {
		t.Errorf("%q", got)
	}
	if got := failedLine("x\n", "no such thing\n"); got != "no such thing" {
		t.Errorf("%q", got)
	}
}

// TestRunsAreTold verifies which namespaces belong to a lab, and when their lab has ended.
func TestRunsAreTold(t *testing.T) {
	for name, run := range map[string]string{"fared-12-server1": "12", "fared-12_3-leaf0": "12_3", "fared-12-3": "", "fared-x-server1": "", "fared-12-server1x": "", "clab-12-server1": ""} {
		got := ""
		if m := nodeNamespace.FindStringSubmatch(name); m != nil {
			got = m[1]
		}
		if got != run {
			t.Errorf("%s is of run %q, want %q", name, got, run)
		}
	}
	netnstest.Folder(t)
	dir, lock, err := newRun()
	if err != nil {
		t.Fatal(err)
	}
	run := strings.TrimPrefix(filepath.Base(dir), runDir)
	if abandoned(run) {
		t.Error("a run whose lock is held counts as abandoned")
	}
	lock.Close()
	if !abandoned(run) {
		t.Error("a run without a holder of its lock does not count as abandoned")
	}
	if !abandoned("4194305") { // above the largest process id
		t.Error("a run whose process is gone does not count as abandoned")
	}
	if abandoned("1") {
		t.Error("a process without a lock counts as gone")
	}
}
