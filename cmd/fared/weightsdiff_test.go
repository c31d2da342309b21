package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
)

// TestCompareWeights checks each kind of difference, and that equal weights, whatever else changed, are none.
func TestCompareWeights(t *testing.T) {
	d := func(name string, weights ...uint32) savedDestination {
		out := savedDestination{Destination: name, Reachable: len(weights) > 0}
		for i, w := range weights {
			out.Planes = append(out.Planes, savedPlane{[]string{"p0", "p1", "p2"}[i], w, uint64(w) * 400e9})
		}
		return out
	}
	from := func(d savedDestination, source string) savedDestination {
		d.Sources = []string{source}
		return d
	}
	list := func(all ...savedDestination) *savedWeights { return &savedWeights{all} }
	slower := d("a", 1, 1)
	slower.Planes[0].BandwidthBps, slower.Planes[1].BandwidthBps = 200e9, 200e9
	for what, c := range map[string]struct {
		before, now *savedWeights
		want        []string
	}{
		"nothing":           {list(), list(), nil},
		"equal":             {list(d("a", 1, 1), d("b")), list(d("b"), d("a", 1, 1)), nil},
		"weights":           {list(d("a", 1, 1), d("b", 1, 1)), list(d("a", 2, 1), d("b", 1, 1)), []string{"a: 1:1 -> 2:1; p0"}},
		"bandwidth alone":   {list(d("a", 1, 1)), list(slower), []string{"a: 1:1 -> 1:1; p0 p1"}},
		"new":               {list(), list(d("a", 1, 0)), []string{"a: absent -> 1:0; p0"}},
		"gone":              {list(d("a", 1, 0), d("b", 1, 1)), list(d("b", 1, 1)), []string{"a: 1:0 -> absent; p0"}},
		"lost":              {list(d("a", 1, 1)), list(d("a")), []string{"a: 1:1 -> unreachable; p0 p1"}},
		"a plane more":      {list(d("a", 1)), list(d("a", 1, 1)), []string{"a: 1 -> 1:1; p1"}},
		"another source":    {list(from(d("a", 1), "x")), list(from(d("a", 1), "y")), []string{"a: absent -> 1; p0", "a: 1 -> absent; p0"}},
		"one source of two": {list(from(d("a", 1, 1), "x"), from(d("a", 1, 1), "y")), list(from(d("a", 1, 1), "x"), from(d("a", 1, 2), "y")), []string{"a: 1:1 -> 1:2; p1"}},
	} {
		var got []string
		for _, change := range compareWeights(c.before, c.now) {
			var planes []string
			for _, p := range change.Planes {
				planes = append(planes, p.Plane)
			}
			got = append(got, change.Destination+": "+change.Before+" -> "+change.Now+"; "+strings.Join(planes, " "))
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %q, want %q", what, got, c.want)
		}
	}
}

// TestWeightsDiff checks that the command's own output is no difference to itself, and a changed one is.
func TestWeightsDiff(t *testing.T) {
	socket, _ := startFake(t)
	file := filepath.Join(t.TempDir(), "before.json")
	before := fared(t, "--socket", socket, "weights", "-o", "json").Out
	save := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	save(before)
	if o := fared(t, "--socket", socket, "weights", "--diff", file); o.Code != cli.ExitOK || o.Out != "" {
		t.Errorf("without a change: exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
	changed := strings.Replace(before, `"bandwidth_bps": 800000000000`, `"bandwidth_bps": 400000000000`, 1)
	if changed == before {
		t.Fatal("the output has no bandwidth to change")
	}
	save(changed)
	o := fared(t, "--socket", socket, "weights", "--diff", file)
	if o.Code != cli.ExitFailed || !strings.Contains(o.Out, "p0 400G -> 800G") || strings.Count(o.Out, "\n") != 2 || !strings.Contains(o.Err, "1 destination of 2 changed") {
		t.Errorf("with a change: exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
	if o := fared(t, "--socket", socket, "weights", "--diff", file, "-o", "json"); !strings.Contains(o.Out, `"before_bandwidth_bps": 400000000000`) {
		t.Errorf("as JSON: %s%s", o.Out, o.Err)
	}
	for what, text := range map[string]string{"no JSON": "x", "another document": `{"sessions": []}`} {
		save(text)
		if o := fared(t, "--socket", socket, "weights", "--diff", file); o.Code != cli.ExitUsage || !strings.Contains(o.Err, "fared weights -o json > FILE") {
			t.Errorf("%s: exit code %d: %s", what, o.Code, o.Err)
		}
	}
	if o := fared(t, "--socket", socket, "weights", "--diff", file+"x"); o.Code != cli.ExitUsage {
		t.Errorf("without the file: exit code %d: %s", o.Code, o.Err)
	}
}
