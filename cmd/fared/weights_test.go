package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

// TestWeightsOfManyDestinations prints 100 and 400 destinations: a terminal shows more than 100 as one row for each
// distinct vector and state, the most frequent first; with --all, in a pipe and in JSON each destination has its row.
func TestWeightsOfManyDestinations(t *testing.T) {
	list := func(n int) *weightList {
		l := &weightList{}
		for i := range n {
			d := &farev1.DestinationWeights{Destination: fmt.Sprintf("10.255.%d.%d/32", i/256, i%256), Reachable: i%100 != 7, Sources: []string{"10.254.0.1/32"}}
			for p := range 2 {
				w := uint32(1)
				if i%4 == 1 && p == 0 {
					w = 2
				}
				d.Planes = append(d.Planes, &farev1.PlaneWeight{Plane: fmt.Sprintf("p%d", p), Weight: w, BandwidthBps: uint64(w) * 400e9, InEffect: true})
			}
			if !d.Reachable {
				d.Reason, d.Planes[0].Weight, d.Planes[1].Weight = "no route", 0, 0
			}
			l.destinations = append(l.destinations, d)
		}
		return l
	}
	print := func(l *weightList, output string, terminal *os.File, all bool) string {
		t.Helper()
		var b bytes.Buffer
		e := &cli.Env{Out: &b, Output: output, Terminal: terminal}
		if err := printWeights(e, l, all); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	const summed = `DESTINATIONS  SUCH AS        P0  P1  STATE
296           10.255.0.0/32  1   1   in effect
100           10.255.0.1/32  2   1   in effect
4             10.255.0.7/32  0   0   unreachable: no route
weights of each plane; --all shows each of the 400 rows with bandwidths
`
	if got := print(list(400), "table", os.Stdout, false); got != summed {
		t.Errorf("a terminal shows\n%s\nwant\n%s", got, summed)
	}
	for name, got := range map[string]string{
		"--all": print(list(400), "table", os.Stdout, true), "a pipe": print(list(400), "table", nil, false), "JSON": print(list(400), "json", os.Stdout, false),
	} {
		if n := strings.Count(got, "10.255."); n != 400 {
			t.Errorf("%s has %d destinations, want 400", name, n)
		}
	}
	if got := print(list(100), "table", os.Stdout, false); strings.Count(got, "\n") != 101 {
		t.Errorf("100 destinations on a terminal:\n%s", got)
	}
	two := list(200)
	two.destinations[0].Sources = []string{"10.254.0.2/32"}
	if got := print(two, "table", os.Stdout, false); !strings.Contains(got, "SOURCE") || !strings.Contains(got, "1             10.255.0.0/32  10.254.0.2/32  1   1   in effect") {
		t.Errorf("two source groups:\n%s", got)
	}
}

// TestAvoidedPlaneInTheTable shows an avoided plane by its reason in place of its bandwidth.
func TestAvoidedPlaneInTheTable(t *testing.T) {
	var b bytes.Buffer
	list := &weightList{destinations: []*farev1.DestinationWeights{{Destination: "10.255.1.0/32", Reachable: true, Planes: []*farev1.PlaneWeight{
		{Plane: "p0", Reason: "avoided", InEffect: true}, {Plane: "p1", Weight: 1, BandwidthBps: 400e9, InEffect: true}, {Plane: "p2", Reason: "link-down", InEffect: true},
	}}}}
	if err := printWeights(&cli.Env{Out: &b, Output: "table"}, list, false); err != nil {
		t.Fatal(err)
	}
	const want = `DESTINATION    WEIGHTS  P0       P1    P2  STATE
10.255.1.0/32  0:1:0    avoided  400G  0   in effect
`
	if b.String() != want {
		t.Errorf("%s, want\n%s", b.String(), want)
	}
}
