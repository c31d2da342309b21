package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// known is where destinations and sources are listed.
const known = "'fared weights' lists the destinations there are, 'fared status' the local loopbacks"

func weightsCommand(e *env) *cobra.Command {
	var destinations, sources []string
	var explain bool
	c := &cobra.Command{
		Use: "weights", Short: "Show what traffic to each GPU is split by", Args: noArgs,
		Long: `Shows, for every destination, the weight of each plane in lowest terms, and with -o json
or yaml also the queue pair slots and UDP source ports of each pair.`,
		Example: "  fared weights\n  fared weights --destination 10.255.0.2 --explain\n  fared weights --source 10.255.0.1 -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			client := farev1.NewWeightServiceClient(conn)
			if explain {
				if len(destinations) != 1 {
					return &exitError{exitUsage, errors.New("--explain wants one destination"), "fared weights --destination 10.255.0.2 --explain"}
				}
				resp, err := client.GetWeights(c.Context(), &farev1.GetWeightsRequest{Destination: destinations[0], Sources: sources, Explain: true})
				if err != nil {
					return e.explain(err, known)
				}
				return e.print(resp, func(w *tabwriter.Writer) { explainTable(w, resp.Weights) })
			}
			filter := &farev1.WeightFilter{Destinations: destinations, Sources: sources, OmitPairs: e.output == "table"}
			all := &weightList{}
			for token := ""; ; {
				page, err := client.ListWeights(c.Context(), &farev1.ListWeightsRequest{Filter: filter, PageToken: token})
				if err != nil {
					return e.explain(err, known)
				}
				all.revision, all.destinations = page.Revision, append(all.destinations, page.Weights...)
				if token = page.NextPageToken; token == "" {
					break
				}
			}
			if len(destinations) > 0 && len(all.destinations) == 0 {
				return &exitError{exitNotFound, fmt.Errorf("no destination within %s", strings.Join(destinations, ", ")), known}
			}
			return e.printWeights(all)
		},
	}
	c.Flags().StringSliceVarP(&destinations, "destination", "d", nil, "only these destinations: an address or a covering prefix; repeatable")
	c.Flags().StringSliceVarP(&sources, "source", "s", nil, "only pairs from these local loopbacks; repeatable")
	c.Flags().BoolVar(&explain, "explain", false, "show each route, community, link and rule behind one destination's weights")
	e.pairFlags(c)
	return readFlags(e, c)
}

// weightList is what `fared weights -o json` prints.
type weightList struct {
	revision     uint64
	destinations []*farev1.DestinationWeights
}

func (l *weightList) json() []byte {
	b := fmt.Appendf(nil, `{"revision":%d,"destinations":[`, l.revision)
	for i, d := range l.destinations {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendJSON(b, d.ProtoReflect())
	}
	return append(b, "]}"...)
}

func (e *env) printWeights(l *weightList) error {
	if e.output != "table" {
		return printJSON(e.out, e.output, l.json())
	}
	w := tabwriter.NewWriter(e.out, 0, 0, 2, ' ', 0)
	weightsHeader(w, l.destinations)
	for _, d := range l.destinations {
		weightsRow(w, d)
	}
	return w.Flush()
}

func weightsHeader(w io.Writer, list []*farev1.DestinationWeights) {
	cells := []string{"DESTINATION", "WEIGHTS"}
	if len(list) > 0 {
		for _, p := range list[0].Planes {
			cells = append(cells, strings.ToUpper(p.Plane))
		}
	}
	row(w, append(cells, "STATE")...)
}

func weightsRow(w io.Writer, d *farev1.DestinationWeights) {
	cells := []string{d.Destination, ratio(d)}
	for _, p := range d.Planes {
		cells = append(cells, bandwidth(p.BandwidthBps))
	}
	row(w, append(cells, effect(d))...)
}

// ratio writes the plane weights as the field does: 2:2:1:2.
func ratio(d *farev1.DestinationWeights) string {
	var b strings.Builder
	for i, p := range d.Planes {
		if i > 0 {
			b.WriteByte(':')
		}
		fmt.Fprint(&b, p.Weight)
	}
	return b.String()
}

// effect says in a word whether packets obey the weights yet.
func effect(d *farev1.DestinationWeights) string {
	if !d.Reachable {
		return "unreachable: " + d.Reason
	}
	for _, p := range d.Planes {
		if !p.InEffect {
			return "wanted"
		}
	}
	return "in effect"
}

// counts says whether something is used, or why not.
func counts(reason string) string {
	if reason == "" {
		return "yes"
	}
	return "no: " + reason
}

func explainTable(w *tabwriter.Writer, d *farev1.DestinationWeights) {
	state := "reachable"
	if !d.Reachable {
		state = "UNREACHABLE: " + d.Reason
	}
	fmt.Fprintf(w, "%s is %s, weights %s (group %d, revision %d)\n", d.Destination, state, ratio(d), d.Group, d.Revision)
	x := d.Explanation
	fmt.Fprintln(w, "\nroutes")
	row(w, "  SESSION", "DEVICE", "NODE", "ADVERTISED", "AS PATH", "COUNTS")
	for _, r := range x.GetRoutes() {
		advertised := "none"
		if r.HasBandwidth {
			advertised = bandwidth(r.AdvertisedBps)
		}
		row(w, "  "+r.Session, r.Device, r.Node, advertised, strings.Trim(fmt.Sprint(r.AsPath), "[]"), counts(r.Reason))
	}
	fmt.Fprintln(w, "\ncommunities")
	row(w, "  SESSION", "RAW", "MEANING", "COUNTS")
	for _, r := range x.GetRoutes() {
		for _, cm := range r.Communities {
			row(w, "  "+r.Session, cm.Raw, cm.Meaning, counts(cm.Reason))
		}
	}
	fmt.Fprintln(w, "\nplanes")
	for i, p := range x.GetPlanes() {
		row(w, "  "+p.Plane, bandwidth(p.BandwidthBps), p.Rule)
		for _, n := range p.Nodes {
			advertised := "not advertised"
			if n.HasBandwidth {
				advertised = bandwidth(n.AdvertisedBps) + " advertised"
			}
			row(w, "    node "+n.Node, bandwidth(n.BandwidthBps), fmt.Sprintf("= min(%s over %s, %s)", bandwidth(n.LocalBps), dash(strings.Join(n.Devices, "+")), advertised))
		}
		if i < len(d.Planes) {
			row(w, "    weight", fmt.Sprint(d.Planes[i].Weight), dash(d.Planes[i].Reason))
		}
	}
	fmt.Fprintln(w, "\nrules")
	for _, r := range x.GetRules() {
		fmt.Fprintln(w, "  "+r)
	}
}
