package main

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
)

// TestRDMATraffic compares traffic with a slot table whose pairs ask for 60 % and 80 % on p0, and with one whose pairs
// all ask for a seventh.
func TestRDMATraffic(t *testing.T) {
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 6e8, "10.255.0.3": 8e8})
	table, err := slots.Open(w.path)
	if err != nil {
		t.Fatal(err)
	}
	show := func(planes ...rdmadev.PlaneTraffic) string {
		t.Helper()
		asked, err := askedShares(table)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		tab := tabwriter.NewWriter(&b, 0, 0, 1, ' ', 0)
		newTrafficView(planes, asked).table(tab)
		tab.Flush()
		var lines []string
		for line := range strings.Lines(b.String()) {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
		return strings.Join(lines[3:], "\n")
	}
	got := show(rdmadev.PlaneTraffic{Plane: "p0", Bytes: 7100, Known: true, PortCounters: true}, rdmadev.PlaneTraffic{Plane: "p1", Bytes: 2900, Known: true, PortCounters: true})
	if want := "p0 70.0 % (60.0 % to 80.0 %) 71.0 % 7100 rdma\np1 30.0 % (20.0 % to 40.0 %) 29.0 % 2900 rdma"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	w.set(map[string]uint32{"10.255.0.2": 142857143, "10.255.0.3": 142857143})
	got = show(rdmadev.PlaneTraffic{Plane: "p0", Bytes: 142, Known: true}, rdmadev.PlaneTraffic{Plane: "p1", Bytes: 858, Known: true}, rdmadev.PlaneTraffic{Plane: "p2"})
	if want := "p0 14.3 % 14.2 % 142 netdev\np1 85.7 % 85.8 % 858 netdev\np2 - - 0 none"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestRDMAInterval measures planes of a slot table on a tree whose counters stand still.
func TestRDMAInterval(t *testing.T) {
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 25e7})
	root := rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/faults.txt")
	o := fared(t, "rdma", "--file", w.path, "--sysfs", root, "--interval", "1ms", "-o", "json")
	var v rdmaView
	if err := json.Unmarshal([]byte(o.Out), &struct {
		Traffic **trafficView `json:"traffic"`
	}{&v.Traffic}); err != nil || v.Traffic == nil {
		t.Fatalf("exit %d, %v: %s", o.Code, err, o.Out)
	}
	p := v.Traffic.Planes
	if o.Code != cli.ExitFailed || len(p) != 2 || p[0].Plane != "p0" || p[0].Asked.Mean != 25e7 || p[0].Bytes != 0 || p[0].Counter != "rdma" || p[1].Asked.Most != 75e7 || v.Traffic.WeightsChanged {
		t.Errorf("exit %d: %+v", o.Code, v.Traffic)
	}
	if !strings.Contains(o.Out, "RoCE v1 alone") { // eth1
		t.Errorf("findings:\n%s", o.Out)
	}
}

// TestTableSubPorts checks that a loopback belongs to the sub-ports of its slots.
func TestTableSubPorts(t *testing.T) {
	table, _ := endedTable(t)
	l, err := readLayout(table, "")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"10.255.0.1 2001:db8::1", "10.255.0.1 2001:db8::1", "10.255.0.1 2001:db8::1", "10.255.0.1 2001:db8::1"} {
		var got []string
		for _, a := range l.subPorts[i].Loopbacks {
			got = append(got, a.String())
		}
		if strings.Join(got, " ") != want {
			t.Errorf("sub-port %d: %s, want %s", i, got, want)
		}
	}
	w := newSlotWriter(t)
	w.set(map[string]uint32{"10.255.0.2": 25e7})
	if l, err := readLayout(w.path, ""); err != nil || len(l.subPorts) != 2 || len(l.subPorts[1].Loopbacks) != 1 || l.subPorts[1].Plane != "p1" {
		t.Errorf("%+v, %v", l, err)
	}
}

// TestOwnNetworks checks that an address in the network of some sub-ports belongs to these alone.
func TestOwnNetworks(t *testing.T) {
	parse := func(text string) (out []netip.Addr) {
		for _, f := range strings.Fields(text) {
			out = append(out, netip.MustParseAddr(f))
		}
		return out
	}
	const all = "10.255.7.1 172.16.0.9 172.16.1.9 fd00:16::9"
	in := map[string]string{"net1": "172.16.0.9 fd00:16::9", "net2": "172.16.1.9", "net3": "fd00:16::9"}
	subPorts := []rdmadev.SubPort{{Device: "net1", Loopbacks: parse(all)}, {Device: "net2", Loopbacks: parse(all)}, {Device: "net3", Loopbacks: parse(all)}}
	for i, sp := range withOwnNetworks(subPorts, func(device string) []netip.Addr { return parse(in[device]) }) {
		want := []string{"10.255.7.1 172.16.0.9 fd00:16::9", "10.255.7.1 172.16.1.9", "10.255.7.1 fd00:16::9"}[i]
		if !slices.Equal(sp.Loopbacks, parse(want)) {
			t.Errorf("%s: %v, want %s", sp.Device, sp.Loopbacks, want)
		}
	}
}
