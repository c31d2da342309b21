package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/plainjson"
)

// known names the commands that list destinations and sources.
const known = "'fared weights' lists the destinations, 'fared status' the local loopbacks"

const sourceUsage = "only weights and pairs of these local loopbacks; repeatable"

func weightsCommand(e *cli.Env) *cobra.Command {
	var destinations, sources, services []string
	var explain, all bool
	var diff string
	c := &cobra.Command{
		Use: "weights", Short: "Show how traffic to each GPU is split", Args: cli.NoArgs,
		Long: `Shows, for every destination, the weight of each plane in lowest terms, and with -o json
or yaml also the queue pair slots and source ports of each pair, with --service those for
other services too (PairSlots.services).

On a terminal, more than 100 destinations are summed up: one row for each distinct vector of
weights and state, with an example; --all shows a row for each, as a pipe and -o json do.

--diff compares with an earlier 'fared weights -o json': it lists the destinations whose
weights or bandwidths changed, and exits with 1 if there are any.`,
		Example: "  fared weights\n  fared weights --destination 10.255.0.2 --explain\n  fared weights --source 10.255.0.1 -o json\n  fared weights --all\n" +
			"  fared weights -o json > before.json; fared weights --diff before.json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			of, err := parseServices(e, services)
			if err != nil {
				return err
			}
			client := farev1.NewWeightServiceClient(conn)
			if explain {
				if len(destinations) != 1 {
					return cli.Usage(errors.New("--explain needs one destination"), "fared weights --destination 10.255.0.2 --explain")
				}
				resp, err := client.GetWeights(c.Context(), &farev1.GetWeightsRequest{Destination: destinations[0], Sources: sources, Explain: true, Services: of})
				if err != nil {
					return e.Explain(err, known)
				}
				return e.Print(resp, func(w *tabwriter.Writer) { explainTables(w, resp.Weights) })
			}
			filter := &farev1.WeightFilter{Destinations: destinations, Sources: sources, OmitPairs: e.Output == "table" || diff != ""}
			list := &weightList{}
			for token := ""; ; {
				page, err := client.ListWeights(c.Context(), &farev1.ListWeightsRequest{Filter: filter, PageToken: token, Services: of})
				if err != nil {
					return e.Explain(err, known)
				}
				list.revision, list.destinations = page.Revision, append(list.destinations, page.Weights...)
				if token = page.NextPageToken; token == "" {
					break
				}
			}
			if len(destinations) > 0 && len(list.destinations) == 0 {
				return cli.NotFound(fmt.Errorf("no destination within %s", strings.Join(destinations, ", ")), known)
			}
			if diff != "" {
				return printDiff(e, diff, list)
			}
			return printWeights(e, list, all)
		},
	}
	c.Flags().StringSliceVarP(&destinations, "destination", "d", nil, "only these destinations: an address or a covering prefix; repeatable")
	c.Flags().StringSliceVarP(&sources, "source", "s", nil, sourceUsage)
	c.Flags().StringSliceVar(&services, "service", nil, "with -o json or yaml, add the source ports for this service, such as udp/4444; repeatable")
	c.Flags().BoolVar(&explain, "explain", false, "show the routes, communities, links and rules behind one destination's weights")
	c.Flags().BoolVarP(&all, "all", "a", false, "on a terminal, a row for each of more than 100 destinations too")
	c.Flags().StringVar(&diff, "diff", "", "list the changes since this file, an output of 'fared weights -o json'; - is standard input")
	_ = c.MarkFlagFilename("diff", "json")
	for _, flag := range []string{"explain", "destination", "source", "service"} {
		c.MarkFlagsMutuallyExclusive("diff", flag)
	}
	pairFlags(e, c)
	return cli.ReadFlags(e, c)
}

// parseServices parses the values of --service, which the table does not show.
func parseServices(e *cli.Env, texts []string) (out []*farev1.Service, _ error) {
	if len(texts) > 0 && e.Output == "table" {
		return nil, cli.Usage(errors.New("--service adds source ports, which the table does not have"), "fared weights --service udp/4444 -o json")
	}
	for _, text := range texts {
		service, err := parseService(text)
		if err != nil {
			return nil, err
		}
		out = append(out, &farev1.Service{Protocol: uint32(service.Protocol), Port: uint32(service.Port)})
	}
	return out, nil
}

// weightList is the output of `fared weights -o json`.
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
		b = plainjson.Append(b, d.ProtoReflect())
	}
	return append(b, "]}"...)
}

// mostRows is the greatest number of destinations that a terminal shows one by one.
const mostRows = 100

func printWeights(e *cli.Env, l *weightList, all bool) error {
	if e.Output != "table" {
		return cli.PrintJSON(e.Out, e.Output, l.json())
	}
	if e.Terminal != nil && !all && len(l.destinations) > mostRows {
		return sumWeights(e, l)
	}
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	planes, several := planesOf(l.destinations), severalSources(l.destinations)
	proofs := slices.ContainsFunc(l.destinations, func(d *farev1.DestinationWeights) bool { return d.Proof != nil })
	weightsHeader(w, planes, several, proofs)
	for _, d := range l.destinations {
		weightsRow(w, d, planes, several, proofs)
	}
	return w.Flush()
}

// sumWeights prints a row for each group of destinations with the same sources, weights and state, the largest group
// first.
func sumWeights(e *cli.Env, l *weightList) error {
	planes, several := planesOf(l.destinations), severalSources(l.destinations)
	type group struct {
		cells []string // sources, weights and state
		first string
		size  int
	}
	var groups []*group
	of := map[string]*group{}
	for _, d := range l.destinations {
		var cells []string
		if several {
			cells = append(cells, strings.Join(d.Sources, ","))
		}
		for _, name := range planes {
			cell := "-"
			if i := slices.IndexFunc(d.Planes, func(p *farev1.PlaneWeight) bool { return p.Plane == name }); i >= 0 {
				cell = fmt.Sprint(d.Planes[i].Weight)
			}
			cells = append(cells, cell)
		}
		cells = append(cells, effect(d))
		key := strings.Join(cells, "\t")
		if of[key] == nil {
			of[key] = &group{cells: cells, first: d.Destination}
			groups = append(groups, of[key])
		}
		of[key].size++
	}
	slices.SortStableFunc(groups, func(a, b *group) int { return cmp.Compare(b.size, a.size) })
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	cells := []string{"DESTINATIONS", "SUCH AS"}
	if several {
		cells = append(cells, "SOURCE")
	}
	for _, p := range planes {
		cells = append(cells, strings.ToUpper(p))
	}
	cli.Row(w, append(cells, "STATE")...)
	for _, g := range groups {
		cli.Row(w, append([]string{fmt.Sprint(g.size), g.first}, g.cells...)...)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(e.Out, "weights of each plane; --all shows each of the %d rows with bandwidths\n", len(l.destinations))
	return err
}

// planesOf lists the planes of all rows, each between its neighbors: source groups may have different ones.
func planesOf(list []*farev1.DestinationWeights) []string {
	var names []string
	for _, d := range list {
		at := 0
		for _, p := range d.Planes {
			if i := slices.Index(names, p.Plane); i >= 0 {
				at = i + 1
			} else {
				names, at = slices.Insert(names, at, p.Plane), at+1
			}
		}
	}
	return names
}

// severalSources reports whether rows differ in their sources.
func severalSources(list []*farev1.DestinationWeights) bool {
	return slices.ContainsFunc(list, func(d *farev1.DestinationWeights) bool { return !slices.Equal(d.Sources, list[0].Sources) })
}

func weightsHeader(w io.Writer, planes []string, sources, proofs bool) {
	cells := []string{"DESTINATION"}
	if sources {
		cells = append(cells, "SOURCE")
	}
	cells = append(cells, "WEIGHTS")
	for _, p := range planes {
		cells = append(cells, strings.ToUpper(p))
	}
	if proofs {
		cells = append(cells, "PROVED")
	}
	cli.Row(w, append(cells, "STATE")...)
}

func weightsRow(w io.Writer, d *farev1.DestinationWeights, planes []string, sources, proofs bool) {
	cells := []string{d.Destination}
	if sources {
		cells = append(cells, strings.Join(d.Sources, ","))
	}
	cells = append(cells, ratio(d))
	for _, name := range planes {
		cell := "-"
		if i := slices.IndexFunc(d.Planes, func(p *farev1.PlaneWeight) bool { return p.Plane == name }); i >= 0 {
			if cell = cli.Bandwidth(d.Planes[i].BandwidthBps); d.Planes[i].Reason == fare.ReasonAvoided.String() {
				cell = d.Planes[i].Reason
			}
		}
		cells = append(cells, cell)
	}
	if proofs {
		cells = append(cells, proved(d.Proof))
	}
	cli.Row(w, append(cells, effect(d))...)
}

// proved describes the results of probes of a destination: the planes that are proved, of those with a share.
func proved(p *farev1.DestinationProof) string {
	switch {
	case p == nil:
		return "-"
	case p.Reason != "":
		return fmt.Sprintf("%d/%d (%s)", p.PlanesProved, p.Planes, p.Reason)
	}
	text := fmt.Sprintf("%d/%d", p.PlanesProved, p.Planes)
	if p.LossPpb > 0 {
		text += fmt.Sprintf(", %.1f %% lost", float64(p.LossPpb)/1e7)
	}
	return text
}

// ratio writes the plane weights in the usual notation: 2:2:1:2.
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

// effect describes whether packets follow the weights, with the data plane's reason if they do not.
func effect(d *farev1.DestinationWeights) string {
	if !d.Reachable {
		return "unreachable: " + d.Reason
	}
	state := "in effect"
	for _, p := range d.Planes {
		if !p.InEffect {
			state = cmp.Or(d.NotInEffect, "wanted")
		}
	}
	if d.BandwidthIgnored != "" {
		state += ", bandwidth IGNORED: " + d.BandwidthIgnored
	}
	return state
}

// counts describes whether an object is used, or the reason why not.
func counts(reason string) string {
	if reason == "" {
		return "yes"
	}
	return "no: " + reason
}

// explainTables explains a destination from each source group.
func explainTables(w *tabwriter.Writer, rows []*farev1.DestinationWeights) {
	for i, d := range rows {
		from := ""
		if len(rows) > 1 {
			from = " from " + strings.Join(d.Sources, ", ")
		}
		if i > 0 {
			fmt.Fprintln(w)
		}
		explainTable(w, d, from)
	}
}

func explainTable(w *tabwriter.Writer, d *farev1.DestinationWeights, from string) {
	state := "reachable"
	if !d.Reachable {
		state = "UNREACHABLE: " + d.Reason
	}
	fmt.Fprintf(w, "%s is %s%s, weights %s (vector %d, revision %d)\n", d.Destination, state, from, ratio(d), d.Vector, d.Revision)
	if d.NotInEffect != "" {
		fmt.Fprintln(w, "not in effect, "+d.NotInEffect)
	}
	if d.BandwidthIgnored != "" {
		fmt.Fprintln(w, "bandwidth ignored, "+d.BandwidthIgnored)
	}
	x := d.Explanation
	fmt.Fprintln(w, "\nroutes")
	cli.Row(w, "  SESSION", "DEVICE", "NODE", "ADVERTISED", "AS PATH", "COUNTS")
	for _, r := range x.GetRoutes() {
		advertised := "none"
		if r.HasBandwidth {
			advertised = cli.Bandwidth(r.AdvertisedBps)
		}
		cli.Row(w, "  "+r.Session, r.Device, r.Node, advertised, strings.Trim(fmt.Sprint(r.AsPath), "[]"), counts(r.Reason))
	}
	fmt.Fprintln(w, "\ncommunities")
	cli.Row(w, "  SESSION", "RAW", "MEANING", "COUNTS")
	for _, r := range x.GetRoutes() {
		for _, cm := range r.Communities {
			cli.Row(w, "  "+r.Session, cm.Raw, cm.Meaning, counts(cm.Reason))
		}
	}
	fmt.Fprintln(w, "\nplanes")
	for i, p := range x.GetPlanes() {
		cli.Row(w, "  "+p.Plane, cli.Bandwidth(p.BandwidthBps), p.Rule)
		for _, n := range p.Nodes {
			advertised := "not advertised"
			if n.HasBandwidth {
				advertised = cli.Bandwidth(n.AdvertisedBps) + " advertised"
			}
			cli.Row(w, "    node "+n.Node, cli.Bandwidth(n.BandwidthBps), fmt.Sprintf("= min(%s over %s, %s)", cli.Bandwidth(n.LocalBps), cli.Dash(strings.Join(n.Devices, "+")), advertised))
		}
		if i < len(d.Planes) {
			cli.Row(w, "    weight", fmt.Sprint(d.Planes[i].Weight), cli.Dash(d.Planes[i].Reason))
		}
	}
	fmt.Fprintln(w, "\nrules")
	for _, r := range x.GetRules() {
		fmt.Fprintln(w, "  "+r)
	}
}
