package main

import (
	"bytes"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

// sourced returns a row of a source group with separate planes.
func sourced(destination string, planes []string, weights []uint32, sources ...string) *farev1.DestinationWeights {
	d := &farev1.DestinationWeights{Destination: destination, Reachable: true, Sources: sources}
	for i, name := range planes {
		d.Planes = append(d.Planes, &farev1.PlaneWeight{Plane: name, Weight: weights[i], BandwidthBps: uint64(weights[i]) * 400e9, InEffect: true})
	}
	return d
}

// TestRowsOfSources checks that rows name their sources only if there are several source groups, and that cells of
// planes without the source group are empty.
func TestRowsOfSources(t *testing.T) {
	one := []*farev1.DestinationWeights{sourced("10.255.1.1/32", []string{"p0", "p2"}, []uint32{1, 1}, "10.255.0.1/32", "fd00::1/128")}
	two := append(one, sourced("10.255.1.1/32", []string{"p0", "p1", "p2"}, []uint32{1, 2, 0}, "10.255.0.2/32"))
	for _, test := range []struct {
		rows []*farev1.DestinationWeights
		want []string
	}{
		{one, []string{
			"DESTINATION WEIGHTS P0 P2 STATE",
			"10.255.1.1/32 1:1 400G 400G in effect",
		}},
		{two, []string{
			"DESTINATION SOURCE WEIGHTS P0 P1 P2 STATE",
			"10.255.1.1/32 10.255.0.1/32,fd00::1/128 1:1 400G - 400G in effect",
			"10.255.1.1/32 10.255.0.2/32 1:2:0 400G 800G 0 in effect",
		}},
	} {
		var out bytes.Buffer
		if err := printWeights(&cli.Env{Out: &out, Output: "table"}, &weightList{destinations: test.rows}, false); err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(out.String()) {
			got = append(got, strings.Join(strings.Fields(line), " "))
		}
		if strings.Join(got, "\n") != strings.Join(test.want, "\n") {
			t.Errorf("%d rows:\n%s\nwant\n%s", len(test.rows), strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}

// TestWatchOfSources checks that a removed row names its sources, and that the other source group's row of the
// destination stays.
func TestWatchOfSources(t *testing.T) {
	var out bytes.Buffer
	w := &weightWatch{e: &cli.Env{Out: &out, Output: "table"}, known: map[rowKey]bool{}}
	w.text(&farev1.WatchWeightsResponse{Revision: 1, Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{
		sourced("10.255.1.1/32", []string{"p0"}, []uint32{1}, "10.255.0.1/32"), sourced("10.255.1.1/32", []string{"p0"}, []uint32{1}, "10.255.0.2/32"),
	}})
	w.text(&farev1.WatchWeightsResponse{Revision: 2, Complete: true, Removed: []*farev1.WeightKey{{Destination: "10.255.1.1/32", Sources: []string{"10.255.0.2/32"}}}})
	// After a break the snapshot has no row.
	w.text(&farev1.WatchWeightsResponse{Revision: 3, Snapshot: true, Complete: true})
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	want := []string{
		"1 10.255.1.1/32 from 10.255.0.1/32 1 in effect", "1 10.255.1.1/32 from 10.255.0.2/32 1 in effect",
		"2 10.255.1.1/32 from 10.255.0.2/32 gone", "3 10.255.1.1/32 from 10.255.0.1/32 gone",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("printed\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
