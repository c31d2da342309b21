package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/topo"
)

// simulation has the options of `fared topo simulate`.
type simulation struct {
	fail    []string
	single  bool
	doubles int
	seed    uint64
	show    string
}

func simulateCommand(e *cli.Env) *cobra.Command {
	var s simulation
	c := &cobra.Command{Use: "simulate", Short: "Simulate failures: weights, messages, and how fair all-to-all traffic stays"}
	a := addFabricArgs(c)
	c.Long = `Runs the fabric in memory: servers, and leaves and spines that run fared, with the code of
fared; FRR and BIRD as models. It applies failures, and shows

  the weights of all pairs of servers, and the number of pairs with each;
  the number of UPDATE messages and octets that the failure causes, on all sessions;
  whether a node advertises or requests more bandwidth than the cables have;
  how far all-to-all traffic is from the possible max-min fair rates.

A failure is named by its cables: server2/p1.0 (half a Y-cable), server2/p1 (a port), server2,
leaf1, leaf0-1/up0 (an uplink), spine0-0, p1 (a plane); where GPUs own their ports server2/g3
(a GPU's ports), server2/g3p1, server2/g3p1.0; drain:server2/p1 drains instead.
Without a failure the fabric is shown intact. /usr/share/doc/fared/topo.md explains each number.
Exit code 1 if a rule of conservation is broken.`
	c.Example = "  fared topo simulate --example figure1 --fail server2/p2.0 --show server1:server2\n" +
		"  fared topo simulate fabric.yaml --leaf bird --all-single\n  fared topo simulate --example superpod --random-double 200 --seed 7 -o json"
	c.RunE = func(c *cobra.Command, args []string) error {
		f, err := a.load(args)
		if err != nil {
			return err
		}
		return runSimulation(c.Context(), e, f, s)
	}
	c.Flags().StringArrayVar(&s.fail, "fail", nil, "a failure; repeatable, and all failures happen at once")
	c.Flags().BoolVar(&s.single, "all-single", false, "simulate every single failure, one after the other, each in the intact fabric")
	c.Flags().IntVar(&s.doubles, "random-double", 0, "number of random pairs of failures to simulate, each in the intact fabric; at most 100000")
	c.Flags().Uint64Var(&s.seed, "seed", 1, "seed of --random-double: the same seed gives the same failures")
	c.Flags().StringVar(&s.show, "show", "", "a pair of servers whose weights are shown in addition: server1:server2, or server1/g0:server2/g3 where GPUs own their ports")
	return cli.ReadFlags(e, c)
}

// simulated is the result of one failure.
type simulated struct {
	Failed     []string           `json:"failed"`
	Weights    []topo.PairWeights `json:"weights"`
	Pair       *simulatedPair     `json:"pair,omitempty"`
	Cost       topo.Cost          `json:"cost"`
	Violations []topo.Violation   `json:"violations"`
	Fairness   topo.Fairness      `json:"fairness"`
}

type simulatedPair struct {
	From     string     `json:"from"`
	To       string     `json:"to"`
	Weights  []uint32   `json:"weights"`
	SubPorts [][]uint32 `json:"sub_ports"` // by plane
}

func runSimulation(ctx context.Context, e *cli.Env, f *topo.Fabric, o simulation) error {
	cases, err := o.cases(f)
	if err != nil {
		return err
	}
	from, to, err := o.pair(f)
	if err != nil {
		return err
	}
	s := topo.Simulate(f)
	begun := time.Now()
	reported := begun
	var all []simulated
	broken := 0
	for i, names := range cases {
		if ctx.Err() != nil {
			return cli.Interrupted()
		}
		if now := time.Now(); now.Sub(reported) > progressEvery {
			reported = now
			fmt.Fprintf(e.Err, "%d of %d after %s\n", i, len(cases), now.Sub(begun).Round(time.Second))
		}
		cost, err := s.Fail(names...)
		if err != nil {
			return cli.Usage(fmt.Errorf("--fail %w", err), "see fared topo simulate --help")
		}
		r := simulated{Failed: names, Weights: s.Summary(), Cost: cost, Violations: append([]topo.Violation{}, s.Check()...), Fairness: s.Fairness()}
		if from != nil {
			r.Pair = &simulatedPair{from.Name, to.Name, s.Weights(from.Index, to.Index), s.SubPortWeights(from.Index, to.Index)}
		}
		if len(r.Violations) > 0 {
			broken++
		}
		all = append(all, r)
		if _, err := s.Heal(); err != nil {
			return err
		}
	}
	if err := showSimulated(e, f, all); err != nil {
		return err
	}
	if broken > 0 {
		return cli.Failed(fmt.Errorf("rules of conservation are broken in %d of %d cases", broken, len(all)), "/usr/share/doc/fared/topo.md, section Simulation, explains the rules")
	}
	return nil
}

// progressEvery is the interval of progress reports of a long simulation.
const progressEvery = 5 * time.Second

// cases lists the failures to simulate, each a list of names.
func (o simulation) cases(f *topo.Fabric) ([][]string, error) {
	if o.doubles < 0 || o.doubles > 100_000 {
		return nil, cli.Usage(fmt.Errorf("--random-double %d: out of range", o.doubles), "use 0 to 100000")
	}
	var cases [][]string
	if len(o.fail) > 0 || !o.single && o.doubles == 0 {
		cases = append(cases, append([]string{}, o.fail...))
	}
	if !o.single && o.doubles == 0 {
		return cases, nil
	}
	names := f.Single()
	if o.single {
		for _, name := range names {
			cases = append(cases, []string{name})
		}
	}
	random := rand.New(rand.NewPCG(o.seed, 0))
	for range o.doubles {
		i, k := random.IntN(len(names)), random.IntN(len(names)-1)
		if k >= i {
			k++
		}
		cases = append(cases, []string{names[i], names[k]})
	}
	return cases, nil
}

// pair returns the source groups of --show, nil without the flag.
func (o simulation) pair(f *topo.Fabric) (from, to *topo.Group, err error) {
	if o.show == "" {
		return nil, nil, nil
	}
	a, b, _ := strings.Cut(o.show, ":")
	from, to = f.Group(a), f.Group(b)
	if from == nil || to == nil || from.Server == to.Server {
		what := "servers"
		if f.GroupsEach() > 1 {
			what = "GPUs of different servers"
		}
		return nil, nil, cli.Usage(fmt.Errorf("--show %q does not name two %s", o.show, what),
			fmt.Sprintf("for example --show %s:%s", f.Groups()[0].Name, f.Groups()[f.GroupsEach()].Name))
	}
	return from, to, nil
}

func showSimulated(e *cli.Env, f *topo.Fabric, all []simulated) error {
	if e.Output != "table" {
		compact, err := json.Marshal(struct {
			Fabric string      `json:"fabric"`
			Cases  []simulated `json:"cases"`
		}{f.Title(), all})
		if err != nil {
			return err
		}
		return cli.PrintJSON(e.Out, e.Output, compact)
	}
	fmt.Fprintf(e.Out, "%s\n\n", f.Title())
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	if len(all) == 1 {
		simulatedTable(w, f, &all[0])
	} else {
		simulatedTables(w, all)
	}
	return w.Flush()
}

// simulatedTable shows one case.
func simulatedTable(w io.Writer, f *topo.Fabric, r *simulated) {
	cli.Row(w, "FAILED", cli.Dash(strings.Join(r.Failed, " ")))
	fmt.Fprintln(w)
	pairs := "PAIRS OF SERVERS"
	if f.GroupsEach() > 1 {
		pairs = "PAIRS OF GPUS"
	}
	cli.Row(w, "WEIGHTS", pairs)
	for _, p := range r.Weights {
		cli.Row(w, colons(p.Weights), fmt.Sprint(p.Pairs))
	}
	fmt.Fprintln(w)
	if r.Pair != nil {
		header, cells := []string{"PAIR", "WEIGHTS"}, []string{r.Pair.From + " -> " + r.Pair.To, colons(r.Pair.Weights)}
		for p, weights := range r.Pair.SubPorts {
			header, cells = append(header, f.PlaneName(p)), append(cells, colons(weights))
		}
		cli.Row(w, header...)
		cli.Row(w, cells...)
		fmt.Fprintln(w)
	}
	c := &r.Cost
	cli.Row(w, "UPDATES", "OCTETS", "ROUNDS", "ANNOUNCED", "WITHDRAWN", "SUB-PORTS", "VECTORS", "DESTINATIONS")
	cli.Row(w, fmt.Sprint(c.Updates), fmt.Sprint(c.Bytes), fmt.Sprint(c.Rounds), fmt.Sprint(c.Announced), fmt.Sprint(c.Withdrawn),
		fmt.Sprint(c.SubPorts), fmt.Sprint(c.Vectors), fmt.Sprint(c.Destinations))
	fmt.Fprintln(w)
	if n := r.Fairness.TooMany; n > 0 {
		fmt.Fprintf(w, "No rates: there are %d kinds of paths, more than the limit of %d.\n", n, topo.MaxPaths)
	} else {
		cli.Row(w, "RECEIVER", "ALIKE", "RATE", "IDEAL", "RATIO")
	}
	for _, rc := range r.Fairness.Receivers {
		cli.Row(w, rc.Server, fmt.Sprint(rc.Servers), rate(rc.Actual), rate(rc.Ideal), percent(rc.Ratio))
	}
	if p := r.Fairness.Slowest; p != nil {
		cli.Row(w, p.From+" -> "+p.To, fmt.Sprint(p.Pairs), rate(p.Actual), rate(p.Ideal), percent(p.Ratio))
	}
	fmt.Fprintln(w)
	if len(r.Violations) == 0 {
		fmt.Fprintln(w, "No rule of conservation is broken.")
		return
	}
	const shown = 20
	for i, v := range r.Violations {
		if i == shown {
			fmt.Fprintf(w, "and %d more; -o json prints all\n", len(r.Violations)-i)
			break
		}
		fmt.Fprintln(w, v)
	}
}

// simulatedTables shows many cases, cases with equal numbers as one line.
func simulatedTables(w io.Writer, all []simulated) {
	type line struct {
		names string
		alike int
		cells []string
	}
	var lines []*line
	known := map[string]*line{}
	var worst *simulated
	broken := 0
	for i := range all {
		r := &all[i]
		if len(r.Violations) > 0 {
			broken++
		}
		least, slowest := "-", "-"
		if f := &r.Fairness; f.Worst != nil {
			least, slowest = percent(f.Worst.Ratio), percent(f.Slowest.Ratio)
			if worst == nil || f.Worst.Ratio < worst.Fairness.Worst.Ratio {
				worst = r
			}
		}
		cells := []string{fmt.Sprint(r.Cost.Pairs), fmt.Sprint(r.Cost.Updates), fmt.Sprint(r.Cost.Bytes), fmt.Sprint(r.Cost.Rounds),
			fmt.Sprint(len(r.Violations)), least, slowest}
		key := strings.Join(cells, " ")
		if known[key] == nil {
			known[key] = &line{names: cli.Dash(strings.Join(r.Failed, " ")), cells: cells}
			lines = append(lines, known[key])
		}
		known[key].alike++
	}
	cli.Row(w, "FAILED", "ALIKE", "PAIRS CHANGED", "UPDATES", "OCTETS", "ROUNDS", "VIOLATIONS", "WORST RECEIVER", "SLOWEST PAIR")
	for _, l := range lines {
		cli.Row(w, append([]string{l.names, fmt.Sprint(l.alike)}, l.cells...)...)
	}
	fmt.Fprintln(w)
	fmt.Fprintf(w, "%d cases, rules of conservation are broken in %d.", len(all), broken)
	if worst != nil {
		fmt.Fprintf(w, " The worst receiver is %s with %s failed: %s of the ideal.", worst.Fairness.Worst.Server,
			cli.Dash(strings.Join(worst.Failed, " ")), percent(worst.Fairness.Worst.Ratio))
	}
	fmt.Fprintln(w)
}

// colons joins weights in the usual notation.
func colons(weights []uint32) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(weights), "[]"), " ", ":")
}

// rate prints inexact bit/s.
func rate(bps float64) string {
	unit := ""
	for _, u := range []string{"k", "M", "G", "T", "P"} {
		if bps < 999.95 {
			break
		}
		bps, unit = bps/1000, u
	}
	return fmt.Sprintf("%.4g%s", bps, unit)
}

func percent(ratio float64) string { return fmt.Sprintf("%.2f %%", 100*ratio) }
