package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/wecmp"
)

// slotsOptions are the flags and arguments of `fared slots`.
type slotsOptions struct {
	file                string
	service             string
	source, destination netip.Addr // the zero address selects all
	running, watch      bool
}

func slotsCommand(e *cli.Env) *cobra.Command {
	o := &slotsOptions{}
	c := &cobra.Command{
		Use: "slots [SOURCE [DESTINATION]]", Short: "Show the slot table: what programs that own queue pairs read",
		Long: `Reads the slot table, the file of shared memory in which 'fared run' publishes the queue pair
slots of every pair of loopbacks (/usr/share/doc/fared/slots.md). It needs no daemon, and no rights but those
to read the file.

Without DESTINATION each pair has one line, with the share of each plane. With it, each slot of
the pair has a line; -o json and yaml always have the slots. STATE is 'in effect' where the data
plane forwards by the weights, otherwise 'wanted'.

A table that its daemon no longer maintains is shown, and its state reported: the kernel still
forwards by it. --require-running makes that an error, with exit code 3. --watch prints every
change, until Ctrl-C; it waits by futex. Exit code 4: the table has no such pair.

Source ports are those for flows to --service, one of slots.services in the configuration. Where
the data plane places flows by a hash (driver linux), each service has different ones. Where it
steers by source port (driver bpf), --service may be any that it steers.`,
		Example: "  fared slots\n  fared slots 10.255.0.1 10.255.0.2\n  fared slots 10.255.0.1 10.255.0.2 --service udp/4444\n  fared slots 10.255.0.1 --watch -o json",
		Args:    func(c *cobra.Command, args []string) error { return o.parse(c, args) },
		RunE:    func(c *cobra.Command, _ []string) error { return printSlots(c.Context(), e, o) },
	}
	slotTableFlag(c, &o.file)
	c.Flags().BoolVar(&o.running, "require-running", false, "exit with 3 if no daemon maintains the table")
	c.Flags().BoolVarP(&o.watch, "watch", "w", false, "print every change; -o json prints one object per line")
	c.Flags().StringVar(&o.service, "service", "", "show the source ports for this service, such as udp/4444 (default: the first one of the table)")
	_ = c.RegisterFlagCompletionFunc("service", func(*cobra.Command, []string, string) (out []cobra.Completion, _ cobra.ShellCompDirective) {
		if table, err := slots.Open(o.file); err == nil {
			for _, s := range table.Services() {
				out = append(out, s.String())
			}
			for _, r := range table.Steered() {
				if text := r.String(); r.First == r.Last && !slices.Contains(out, text) {
					out = append(out, text)
				}
			}
			table.Close()
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	})
	c.ValidArgsFunction = o.complete
	return cli.ReadFlags(e, c)
}

// slotTableFlag adds --file to a command that reads the slot table.
func slotTableFlag(c *cobra.Command, file *string) {
	c.Flags().StringVarP(file, "file", "f", "", "file of the slot table (default $FARED_SLOTS, or else "+slots.DefaultPath+")")
}

// parse reads the arguments.
func (o *slotsOptions) parse(c *cobra.Command, args []string) (err error) {
	if len(args) > 2 {
		return cli.Usage(fmt.Errorf("%s takes two addresses, but got %q as well", c.CommandPath(), args[2]), "fared slots 10.255.0.1 10.255.0.2")
	}
	for i, arg := range args {
		a, err := netip.ParseAddr(arg)
		if err != nil {
			return cli.Usage(fmt.Errorf("%q is not an address", arg), "fared slots 10.255.0.1 10.255.0.2")
		}
		if i == 0 {
			o.source = a
		} else {
			o.destination = a
		}
	}
	return nil
}

// complete completes a source, then a destination.
func (o *slotsOptions) complete(_ *cobra.Command, args []string, _ string) (out []cobra.Completion, _ cobra.ShellCompDirective) {
	table, err := slots.Open(o.file)
	if err != nil || len(args) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	if len(args) == 0 {
		for _, a := range table.Sources() {
			out = append(out, a.String())
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
	for p, err := range table.Pairs() {
		if err == nil && p.Source.String() == args[0] {
			out = append(out, p.Destination.String())
		}
	}
	slices.Sort(out)
	return out, cobra.ShellCompDirectiveNoFileComp
}

// openSlots opens the slot table for a service, "" for its first one, with an exit code and a remedy for every error.
func openSlots(file, service string) (*slots.Table, error) {
	var of slots.Service
	if service != "" {
		parsed, err := parseService(service)
		if err != nil {
			return nil, err
		}
		of = slots.Service(parsed)
	}
	table, err := slots.OpenFor(file, of)
	return table, explainSlots(err)
}

// parseService parses the value of --service.
func parseService(text string) (wecmp.Service, error) {
	service, err := config.ParseService(text)
	if err != nil {
		return service, cli.Usage(err, "write one such as udp/4791 or tcp/4793")
	}
	return service, nil
}

// explainSlots turns an error of the slot table into an exit code and a remedy.
func explainSlots(err error) error {
	var layout *slots.LayoutError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, slots.ErrDeleted):
		return cli.Unreachable(err, "mount /run/fared/table, which a restart of fared keeps")
	case errors.Is(err, slots.ErrNoTable):
		return cli.Unreachable(err, "is fared running? start it with 'fared run --config FILE'; name another path of slots.file with --file")
	case errors.As(err, &layout):
		return cli.Failed(err, "compare 'fared version' with 'fared status'")
	case errors.Is(err, slots.ErrService):
		return cli.NotFound(err, "add it to slots.services of the configuration and restart fared")
	case errors.Is(err, fs.ErrPermission):
		return cli.Failed(err, "slots.mode of the configuration determines who reads the table")
	case errors.Is(err, slots.ErrFormat), errors.Is(err, slots.ErrTruncated):
		return cli.Failed(err, "name the path of slots.file with --file; a running daemon replaces a damaged table within a second")
	case errors.Is(err, slots.ErrBusy):
		return cli.Failed(err, "run it again; if the daemon was killed, its next run publishes another table")
	}
	return cli.Failed(err, "name the path of slots.file with --file")
}

func printSlots(ctx context.Context, e *cli.Env, o *slotsOptions) error {
	table, err := openSlots(o.file, o.service)
	if err != nil {
		return err
	}
	defer table.Close()
	mark := table.Mark()
	view, err := readSlots(table, o)
	if err != nil {
		return explainSlots(err)
	}
	if o.running && !view.Live {
		return cli.Unreachable(fmt.Errorf("no daemon maintains %s: %s", table.Path(), view.state()), "start it with 'fared run --config FILE'")
	}
	if len(view.Pairs)+view.Changing == 0 && o.source.IsValid() {
		return cli.NotFound(fmt.Errorf("the slot table has no pair from %s", o.selection()), "'fared slots' lists the pairs")
	}
	if !o.watch {
		return view.print(e, o, true)
	}
	return followSlots(ctx, e, table, mark, view, o)
}

// selection writes the arguments for people.
func (o *slotsOptions) selection() string {
	if o.destination.IsValid() {
		return fmt.Sprintf("%s to %s", o.source, o.destination)
	}
	return o.source.String()
}

// followSlots prints a view, then every change, until ctx ends.
func followSlots(ctx context.Context, e *cli.Env, table *slots.Table, mark slots.Mark, view *slotsView, o *slotsOptions) error {
	for changed, head := view, true; ; changed, head = nil, false {
		if changed == nil {
			next, err := readSlots(table, o)
			if err != nil {
				return explainSlots(err)
			}
			changed, head = next.since(view)
			view = next
		}
		if head || len(changed.Pairs)+len(changed.Removed) > 0 {
			if err := changed.print(e, o, head); err != nil {
				return err
			}
		}
		// No process wakes readers when the daemon is killed: the age of the heartbeat shows it.
		slice, cancel := context.WithTimeout(ctx, time.Second)
		next, err := table.Wait(slice, mark)
		cancel()
		if ctx.Err() != nil {
			return nil // the user ended the watch
		}
		if err == nil {
			mark = next
		}
	}
}

// slotsView is the output of `fared slots -o json`.
type slotsView struct {
	File         string        `json:"file"`
	State        string        `json:"state"` // of slots.State
	Live         bool          `json:"live"`
	HeartbeatAge *float64      `json:"heartbeat_age_s,omitempty"` // nil unless State is live
	Instance     string        `json:"instance"`
	Run          uint64        `json:"run"`
	Revision     uint64        `json:"revision"`
	Weights      uint64        `json:"weights_revision"`
	Planes       []string      `json:"planes"`
	SubPorts     []subPortView `json:"sub_ports"`
	Services     []string      `json:"services"`          // those that the table has source ports for
	Steered      []string      `json:"steered,omitempty"` // those with the source ports of the first one, as ranges
	Pairs        []pairView    `json:"pairs"`
	// Removed has the pairs that the table no longer has, with --watch.
	Removed []pairKey `json:"removed,omitempty"`
	// Changing counts pairs that could not be read, because they were being changed.
	Changing int `json:"changing,omitempty"`

	age     time.Duration
	deleted bool // slots.ErrDeleted
	sources []netip.Addr
}

type subPortView struct {
	Device     string    `json:"device"`
	Plane      string    `json:"plane"`
	RDMADevice string    `json:"rdma_device"` // empty: none
	RDMAPort   int       `json:"rdma_port"`
	GIDs       []gidView `json:"gids"` // of the loopbacks that have one
}

type gidView struct {
	Source string `json:"source"`
	Index  int    `json:"index"`
}

type pairKey struct {
	Source      netip.Addr `json:"source"`
	Destination netip.Addr `json:"destination"`
}

type pairView struct {
	pairKey
	Vector    uint32     `json:"vector"`
	Revision  uint64     `json:"revision"`
	Reachable bool       `json:"reachable"`
	InEffect  bool       `json:"in_effect"`
	Placement string     `json:"port_placement"`
	Slots     []slotView `json:"slots"`
}

type slotView struct {
	Slot     int    `json:"slot"`
	Plane    string `json:"plane"`
	Device   string `json:"device"` // empty: sprayed over the plane
	Port     uint16 `json:"source_port"`
	Share    uint32 `json:"share_ppb"`
	Parked   bool   `json:"parked"`
	Drain    bool   `json:"drain_before_move"`
	InEffect bool   `json:"in_effect"`
	Wrong    bool   `json:"wrong"`
}

// readSlots reads the table and the selected pairs, sorted by address.
func readSlots(table *slots.Table, o *slotsOptions) (*slotsView, error) {
	status := table.Status()
	v := &slotsView{
		File: table.Path(), State: status.State.String(), Live: status.Live, Instance: status.Instance, Run: status.Run,
		Revision: status.Revision, Weights: status.StatusRevision, Planes: table.Planes(), Pairs: []pairView{}, Services: []string{}, age: status.HeartbeatAge, sources: table.Sources(),
		deleted: errors.Is(table.Check(), slots.ErrDeleted),
	}
	for _, s := range table.Services() {
		v.Services = append(v.Services, s.String())
	}
	for _, r := range table.Steered() {
		v.Steered = append(v.Steered, r.String())
	}
	if status.State == slots.Live {
		seconds := status.HeartbeatAge.Seconds()
		v.HeartbeatAge = &seconds
	}
	subPorts, err := table.SubPorts()
	if err != nil {
		return nil, err
	}
	for _, sp := range subPorts {
		v.SubPorts = append(v.SubPorts, v.subPort(sp))
	}
	add := func(p slots.Pair, err error) error {
		switch {
		case errors.Is(err, slots.ErrBusy):
			v.Changing++
		case err != nil && !errors.Is(err, slots.ErrNotFound):
			return err
		case err == nil && (!o.source.IsValid() || p.Source == o.source.Unmap()):
			v.Pairs = append(v.Pairs, v.pair(&p))
		}
		return nil
	}
	if o.destination.IsValid() {
		return v, add(table.Lookup(o.source, o.destination, nil))
	}
	for p, err := range table.Pairs() {
		if err := add(p, err); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(v.Pairs, func(a, b pairView) int { return a.compare(b.pairKey) })
	return v, nil
}

func (k pairKey) compare(with pairKey) int {
	return cmp.Or(k.Source.Compare(with.Source), k.Destination.Compare(with.Destination))
}

func (v *slotsView) subPort(sp slots.SubPort) subPortView {
	out := subPortView{Device: sp.Device, Plane: v.Planes[sp.Plane], RDMADevice: sp.RDMADevice, RDMAPort: sp.RDMAPort, GIDs: []gidView{}}
	for i, index := range sp.GIDs {
		if index >= 0 {
			out.GIDs = append(out.GIDs, gidView{v.sources[i].String(), index})
		}
	}
	return out
}

func (v *slotsView) pair(p *slots.Pair) pairView {
	out := pairView{
		pairKey: pairKey{p.Source, p.Destination}, Vector: p.Vector, Revision: p.Revision, Reachable: p.Reachable, InEffect: p.InEffect, Placement: p.Placement.String(),
		Slots: []slotView{},
	}
	for i, s := range p.Slots {
		slot := slotView{Slot: i, Plane: v.Planes[s.Plane], Port: s.SourcePort, Share: s.Share, Parked: s.Parked, Drain: s.Drain, InEffect: s.InEffect, Wrong: s.Wrong}
		if s.SubPort >= 0 {
			slot.Device = v.SubPorts[s.SubPort].Device
		}
		out.Slots = append(out.Slots, slot)
	}
	return out
}

// since returns the differences from an earlier view, and whether the state of the table or its sub-ports differ.
func (v *slotsView) since(old *slotsView) (*slotsView, bool) {
	out := *v
	out.Pairs, out.Removed = []pairView{}, nil
	var i int
	for _, p := range v.Pairs {
		for ; i < len(old.Pairs) && old.Pairs[i].compare(p.pairKey) < 0; i++ {
			out.Removed = append(out.Removed, old.Pairs[i].pairKey)
		}
		if i < len(old.Pairs) && old.Pairs[i].pairKey == p.pairKey {
			i++
			if old.Pairs[i-1].equal(&p) {
				continue
			}
		}
		out.Pairs = append(out.Pairs, p)
	}
	for _, p := range old.Pairs[i:] {
		out.Removed = append(out.Removed, p.pairKey)
	}
	head := v.Run != old.Run || v.Live != old.Live || v.State != old.State || !slices.EqualFunc(v.SubPorts, old.SubPorts, func(a, b subPortView) bool {
		return a.Device == b.Device && a.RDMADevice == b.RDMADevice && a.RDMAPort == b.RDMAPort && slices.Equal(a.GIDs, b.GIDs)
	})
	return &out, head
}

// equal ignores the revisions, which change without the rest when another run publishes the same pair.
func (p *pairView) equal(q *pairView) bool {
	return p.pairKey == q.pairKey && p.Vector == q.Vector && p.Reachable == q.Reachable && p.InEffect == q.InEffect && p.Placement == q.Placement && slices.Equal(p.Slots, q.Slots)
}

// print prints a view in the requested format; head includes the table's state and sub-ports in the table.
func (v *slotsView) print(e *cli.Env, o *slotsOptions, head bool) error {
	if e.Output != "table" {
		text, err := json.Marshal(v)
		if err != nil {
			return err
		}
		if o.watch && e.Output == "json" {
			_, err = fmt.Fprintf(e.Out, "%s\n", text)
			return err
		}
		if o.watch {
			fmt.Fprintln(e.Out, "---")
		}
		return cli.PrintJSON(e.Out, e.Output, text)
	}
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	if head {
		v.headTable(w)
	}
	if o.destination.IsValid() {
		for i := range v.Pairs {
			v.Pairs[i].table(w)
		}
	} else if len(v.Pairs) > 0 {
		v.pairsTable(w)
	}
	for _, k := range v.Removed {
		fmt.Fprintf(w, "\n%s to %s: removed\n", k.Source, k.Destination)
	}
	if v.Changing > 0 {
		fmt.Fprintf(w, "\n%s: being changed, not shown\n", cli.Several(v.Changing, "pair"))
	}
	return w.Flush()
}

// state describes whether a daemon maintains the table.
func (v *slotsView) state() string {
	switch {
	case v.deleted:
		return "NO DAEMON: " + slots.ErrDeleted.Error()
	case v.Live:
		return fmt.Sprintf("live, heartbeat %s ago", cli.Age(uint64(max(v.age, 0).Round(10*time.Millisecond))))
	case v.State != slots.Live.String():
		return v.State + ": the daemon has ended, and the table has its last state"
	case v.age < 0:
		return "NO DAEMON: the table is from an earlier boot"
	}
	return fmt.Sprintf("NO DAEMON: the last heartbeat was %s ago, and the table has its last state", cli.Age(uint64(v.age)))
}

func (v *slotsView) headTable(w *tabwriter.Writer) {
	cli.Row(w, "table", v.File)
	cli.Row(w, "state", v.state())
	cli.Row(w, "instance", fmt.Sprintf("%s, file %d", v.Instance, v.Run))
	cli.Row(w, "revision", fmt.Sprintf("%d, of the weights %d", v.Revision, v.Weights))
	cli.Row(w, "planes", strings.Join(v.Planes, ", "))
	fmt.Fprintln(w)
	cli.Row(w, "SUB-PORT", "PLANE", "RDMA DEVICE", "GID INDEX")
	for _, sp := range v.SubPorts {
		device := "-"
		if sp.RDMADevice != "" {
			device = fmt.Sprintf("%s/%d", sp.RDMADevice, sp.RDMAPort)
		}
		var gids []string
		for _, g := range sp.GIDs {
			gids = append(gids, fmt.Sprintf("%d (%s)", g.Index, g.Source))
		}
		cli.Row(w, sp.Device, sp.Plane, device, cli.Dash(strings.Join(gids, ", ")))
	}
}

func (v *slotsView) pairsTable(w *tabwriter.Writer) {
	cells := []string{"SOURCE", "DESTINATION", "SLOTS", "PARKED"}
	for _, p := range v.Planes {
		cells = append(cells, strings.ToUpper(p))
	}
	fmt.Fprintln(w)
	cli.Row(w, append(cells, "STATE")...)
	for i := range v.Pairs {
		p := &v.Pairs[i]
		shares, parked := map[string]uint64{}, 0
		for _, s := range p.Slots {
			shares[s.Plane] += uint64(s.Share)
			if s.Parked {
				parked++
			}
		}
		cells := []string{p.Source.String(), p.Destination.String(), fmt.Sprint(len(p.Slots)), fmt.Sprint(parked)}
		for _, plane := range v.Planes {
			cells = append(cells, shareOf(shares[plane]))
		}
		cli.Row(w, append(cells, p.state())...)
	}
}

// shareOf writes parts per billion for people.
func shareOf(ppb uint64) string { return fmt.Sprintf("%.1f %%", float64(ppb)/1e7) }

func (p *pairView) state() string {
	switch {
	case len(p.Slots) == 0:
		return "no weights"
	case !p.Reachable:
		return "unreachable"
	case p.InEffect:
		return "in effect"
	}
	return "wanted"
}

func (p *pairView) table(w *tabwriter.Writer) {
	fmt.Fprintf(w, "\n%s to %s: %s (vector %d, revision %d, ports %s)\n", p.Source, p.Destination, p.state(), p.Vector, p.Revision, p.Placement)
	if len(p.Slots) == 0 {
		return
	}
	cli.Row(w, "SLOT", "PLANE", "SUB-PORT", "SOURCE PORT", "SHARE", "STATE")
	for _, s := range p.Slots {
		cli.Row(w, fmt.Sprint(s.Slot), s.Plane, cli.Dash(s.Device), fmt.Sprint(s.Port), shareOf(uint64(s.Share)), s.state())
	}
}

func (s *slotView) state() string {
	words := []string{"wanted"}
	if s.InEffect {
		words[0] = "in effect"
	}
	if s.Parked {
		words = append(words, "parked")
	}
	if s.Drain {
		words = append(words, "drain before move")
	}
	if s.Wrong {
		words = append(words, "packets go wrong")
	}
	return strings.Join(words, ", ")
}
