package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/fared/fared/cmd/internal/cli"
)

// savedWeights is the part of `fared weights -o json` that a comparison needs.
type savedWeights struct {
	Destinations []savedDestination `json:"destinations"`
}

type savedDestination struct {
	Destination string       `json:"destination"`
	Sources     []string     `json:"sources"`
	Reachable   bool         `json:"reachable"`
	Planes      []savedPlane `json:"planes"`
}

type savedPlane struct {
	Plane        string `json:"plane"`
	Weight       uint32 `json:"weight"`
	BandwidthBps uint64 `json:"bandwidth_bps"`
}

// weights writes the plane weights: "2:2:1:2".
func (d *savedDestination) weights() string {
	if d == nil {
		return "absent"
	}
	if !d.Reachable {
		return "unreachable"
	}
	parts := make([]string, len(d.Planes))
	for i, p := range d.Planes {
		parts[i] = fmt.Sprint(p.Weight)
	}
	return strings.Join(parts, ":")
}

func (d *savedDestination) plane(name string) (out savedPlane) {
	if d != nil {
		if i := slices.IndexFunc(d.Planes, func(p savedPlane) bool { return p.Plane == name }); i >= 0 {
			out = d.Planes[i]
		}
	}
	out.Plane = name
	return out
}

// weightChange is a destination whose weights, or whose bandwidth by some plane, differ.
type weightChange struct {
	Destination string        `json:"destination"`
	Sources     []string      `json:"sources"`
	Before      string        `json:"before"`
	Now         string        `json:"now"`
	Planes      []planeChange `json:"planes"`
}

// planeChange is a plane whose weight or bandwidth differs; 0 where it is absent.
type planeChange struct {
	Plane              string `json:"plane"`
	BeforeWeight       uint32 `json:"before_weight"`
	NowWeight          uint32 `json:"now_weight"`
	BeforeBandwidthBps uint64 `json:"before_bandwidth_bps"`
	NowBandwidthBps    uint64 `json:"now_bandwidth_bps"`
}

// readWeights reads a file with the output of `fared weights -o json`; "-" is standard input.
func readWeights(in io.Reader, file string) (*savedWeights, error) {
	remedy := "make the file with: fared weights -o json > FILE"
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, cli.Usage(err, remedy)
		}
		defer f.Close()
		in = f
	}
	var out struct {
		Destinations *[]savedDestination `json:"destinations"`
	}
	if err := json.NewDecoder(in).Decode(&out); err != nil {
		return nil, cli.Usage(fmt.Errorf("%s: %w", file, err), remedy)
	}
	if out.Destinations == nil {
		return nil, cli.Usage(fmt.Errorf("%s: it has no list \"destinations\"", file), remedy)
	}
	return &savedWeights{*out.Destinations}, nil
}

// saved converts the daemon's present answer.
func (l *weightList) saved() *savedWeights {
	out := &savedWeights{}
	for _, d := range l.destinations {
		to := savedDestination{Destination: d.Destination, Sources: d.Sources, Reachable: d.Reachable}
		for _, p := range d.Planes {
			to.Planes = append(to.Planes, savedPlane{p.Plane, p.Weight, p.BandwidthBps})
		}
		out.Destinations = append(out.Destinations, to)
	}
	return out
}

// compareWeights returns the destinations that differ: those of now in their order, then those that are gone.
func compareWeights(before, now *savedWeights) []weightChange {
	name := func(d *savedDestination) string { return d.Destination + " " + strings.Join(d.Sources, ",") }
	known := map[string]*savedDestination{}
	for i := range before.Destinations {
		known[name(&before.Destinations[i])] = &before.Destinations[i]
	}
	out := []weightChange{}
	add := func(b, n *savedDestination) {
		is := cmp.Or(n, b)
		c := weightChange{Destination: is.Destination, Sources: append([]string{}, is.Sources...), Before: b.weights(), Now: n.weights(), Planes: []planeChange{}}
		var planes []string
		for _, d := range []*savedDestination{n, b} {
			if d == nil {
				continue
			}
			for _, p := range d.Planes {
				if !slices.Contains(planes, p.Plane) {
					planes = append(planes, p.Plane)
				}
			}
		}
		for _, p := range planes {
			if x, y := b.plane(p), n.plane(p); x != y {
				c.Planes = append(c.Planes, planeChange{p, x.Weight, y.Weight, x.BandwidthBps, y.BandwidthBps})
			}
		}
		if c.Before != c.Now || len(c.Planes) > 0 {
			out = append(out, c)
		}
	}
	for i := range now.Destinations {
		d := &now.Destinations[i]
		add(known[name(d)], d)
		delete(known, name(d))
	}
	for i := range before.Destinations {
		if d := &before.Destinations[i]; known[name(d)] != nil {
			add(d, nil)
		}
	}
	return out
}

// printDiff prints the differences from a file. Differences are exit code 1, as of diff(1).
func printDiff(e *cli.Env, file string, now *weightList) error {
	before, err := readWeights(e.In, file)
	if err != nil {
		return err
	}
	changes := compareWeights(before, now.saved())
	if e.Output != "table" {
		b, err := json.Marshal(map[string]any{"revision": now.revision, "changes": changes})
		if err == nil {
			err = cli.PrintJSON(e.Out, e.Output, b)
		}
		if err != nil {
			return err
		}
	} else if len(changes) > 0 {
		printDiffTable(e, changes)
	}
	if len(changes) > 0 {
		return cli.Failed(fmt.Errorf("%s of %d changed since %s", cli.Several(len(changes), "destination"), max(len(before.Destinations), len(now.destinations)), file), "")
	}
	return nil
}

func printDiffTable(e *cli.Env, changes []weightChange) {
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	defer w.Flush()
	sources := slices.ContainsFunc(changes, func(c weightChange) bool { return !slices.Equal(c.Sources, changes[0].Sources) })
	cells := func(destination, source string, rest ...string) []string {
		if sources {
			return append([]string{destination, source}, rest...)
		}
		return append([]string{destination}, rest...)
	}
	cli.Row(w, cells("DESTINATION", "SOURCE", "BEFORE", "NOW", "PLANES")...)
	for _, c := range changes {
		var planes []string
		for _, p := range c.Planes {
			planes = append(planes, fmt.Sprintf("%s %s -> %s", p.Plane, cli.Bandwidth(p.BeforeBandwidthBps), cli.Bandwidth(p.NowBandwidthBps)))
		}
		cli.Row(w, cells(c.Destination, strings.Join(c.Sources, ","), c.Before, c.Now, cli.Dash(strings.Join(planes, ", ")))...)
	}
}
