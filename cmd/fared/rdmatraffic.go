package main

import (
	"context"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/rdmadev"
)

// trafficView compares the traffic of planes with their weights.
type trafficView struct {
	Seconds  float64                 `json:"seconds"`
	Planes   []planeTraffic          `json:"planes"`
	Counters []rdmadev.CounterChange `json:"counters"`
	// WeightsChanged means that the slot table changed during the measurement.
	WeightsChanged bool `json:"weights_changed"`
}

type planeTraffic struct {
	Plane string `json:"plane"`
	// Asked is nil without a slot table with weights. Its unit is parts per billion.
	Asked   *askedShare `json:"asked,omitempty"`
	Carried uint64      `json:"carried_ppb"`
	Bytes   uint64      `json:"bytes"`
	Counter string      `json:"counter"` // rdma, netdev, or none
}

// askedShare is a plane's share of the traffic of pairs, parts per billion: the mean, the least and the greatest.
type askedShare struct {
	Mean  uint64 `json:"mean_ppb"`
	Least uint64 `json:"least_ppb"`
	Most  uint64 `json:"most_ppb"`
}

// measure samples the counters before and after the interval.
func (v *rdmaView) measure(ctx context.Context, l *layout, report *rdmadev.Report, o *rdmaOptions) error {
	revision := func() (r uint64) {
		if l.table != nil {
			r = l.table.Status().Revision
		}
		return r
	}
	before, start, from := revision(), time.Now(), report.Sample(o.sysfs)
	select {
	case <-ctx.Done():
		return cli.Interrupted()
	case <-time.After(o.interval):
	}
	to := report.Sample(o.sysfs)
	asked, err := askedShares(l.table)
	if err != nil {
		return explainSlots(err)
	}
	planes, counters := report.Traffic(from, to)
	v.Traffic = newTrafficView(planes, asked)
	v.Traffic.Seconds, v.Traffic.Counters, v.Traffic.WeightsChanged = time.Since(start).Seconds(), append(v.Traffic.Counters, counters...), revision() != before
	return nil
}

// askedShares returns the share of each plane over the reachable pairs of a table, by name. A nil table has none.
func askedShares(table *slots.Table) (map[string]*askedShare, error) {
	out, pairs := map[string]*askedShare{}, uint64(0)
	if table == nil {
		return out, nil
	}
	for p, err := range table.Pairs() {
		if err != nil {
			return nil, err
		}
		if !p.Reachable {
			continue
		}
		sums := make([]uint64, len(table.Planes()))
		for _, s := range p.Slots {
			sums[s.Plane] += uint64(s.Share)
		}
		for i, name := range table.Planes() {
			a := out[name]
			if a == nil {
				a = &askedShare{Least: sums[i], Most: sums[i]}
				out[name] = a
			}
			a.Mean, a.Least, a.Most = a.Mean+sums[i], min(a.Least, sums[i]), max(a.Most, sums[i])
		}
		pairs++
	}
	for _, a := range out {
		a.Mean /= pairs
	}
	return out, nil
}

func newTrafficView(planes []rdmadev.PlaneTraffic, asked map[string]*askedShare) *trafficView {
	v := &trafficView{Planes: []planeTraffic{}, Counters: []rdmadev.CounterChange{}}
	var total uint64
	for _, p := range planes {
		if p.Known {
			total += p.Bytes
		}
	}
	for _, p := range planes {
		next := planeTraffic{Plane: p.Plane, Asked: asked[p.Plane], Bytes: p.Bytes, Counter: "netdev"}
		switch {
		case !p.Known:
			next.Counter, next.Bytes = "none", 0
		case p.PortCounters:
			next.Counter = "rdma"
		}
		if total > 0 {
			next.Carried = uint64(float64(next.Bytes) / float64(total) * 1e9)
		}
		v.Planes = append(v.Planes, next)
	}
	return v
}

func (v *trafficView) table(w *tabwriter.Writer) {
	fmt.Fprintf(w, "\ntraffic of %.1f s\n", v.Seconds)
	cli.Row(w, "PLANE", "ASKED", "CARRIED", "BYTES", "COUNTER")
	for _, p := range v.Planes {
		carried := "-"
		if p.Counter != "none" {
			carried = shareOf(p.Carried)
		}
		cli.Row(w, p.Plane, p.Asked.String(), carried, fmt.Sprint(p.Bytes), p.Counter)
	}
	if v.WeightsChanged {
		fmt.Fprintln(w, "the weights changed meanwhile")
	}
	if len(v.Counters) == 0 {
		return
	}
	fmt.Fprintln(w)
	cli.Row(w, "RDMA PORT", "COUNTER OF THE DRIVER", "CHANGE")
	for _, c := range v.Counters {
		cli.Row(w, fmt.Sprintf("%s/%d", c.Device, c.Port), c.Name, fmt.Sprint(c.Change))
	}
}

// String returns the share for people, with the range over the pairs if they differ.
func (a *askedShare) String() string {
	switch {
	case a == nil:
		return "-"
	case a.Least == a.Most:
		return shareOf(a.Mean)
	}
	return fmt.Sprintf("%s (%s to %s)", shareOf(a.Mean), shareOf(a.Least), shareOf(a.Most))
}
