package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rtnl"
)

// rdmaOptions are the flags of `fared rdma`.
type rdmaOptions struct {
	file, config, sysfs string
	interval            time.Duration
}

func rdmaCommand(e *cli.Env) *cobra.Command {
	o := &rdmaOptions{}
	c := &cobra.Command{
		Use: "rdma", Short: "Show the RDMA devices, their planes and GIDs, and each fault with its remedy", Args: cli.NoArgs,
		Long: `Shows the RDMA ports of this machine with their netdevs and GIDs, the plane and sub-port of each,
and the faults that keep queue pairs off the slots: a loopback without a GID, RoCE v1, a port
that is down, unequal MTUs, a driver that ignores flow labels, and others. It reads sysfs and DCB
netlink, and needs neither a daemon nor rights. UNKNOWN means that the kernel does not show it.

Planes and loopbacks are those of the slot table, or with --config those of a configuration file.
Without both it shows the ports alone. MTU is the path MTU of queue pairs.

--interval compares the traffic of each plane with the weights: ASKED is the mean share of the
plane over all pairs of the slot table, CARRIED its part of the bytes that the sub-ports sent. An
RDMA port counts its RDMA packets; where it has no counter, or several sub-ports, the netdev
counts, in which many NICs leave out RDMA packets. Counters of the driver that changed follow.

Exit code 1: there is a problem. A note is none.`,
		Example: "  fared rdma\n  fared rdma --interval 5s\n  fared rdma --config /etc/fared/fared.yaml -o json",
		RunE:    func(c *cobra.Command, _ []string) error { return runRDMA(c.Context(), e, o) },
	}
	slotTableFlag(c, &o.file)
	c.Flags().StringVarP(&o.config, "config", "c", "", "take planes and loopbacks from this configuration file")
	c.Flags().StringVar(&o.sysfs, "sysfs", rdmadev.Sysfs, "root of sysfs, such as a copy of that of another machine")
	c.Flags().DurationVar(&o.interval, "interval", 0, "compare traffic with weights over this time")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
	_ = c.MarkFlagDirname("sysfs")
	c.MarkFlagsMutuallyExclusive("file", "config")
	return cli.ReadFlags(e, c)
}

// layout holds the planes and sub-ports that an RDMA command uses.
type layout struct {
	from     string // the origin, for people
	table    *slots.Table
	subPorts []rdmadev.SubPort
	tcpPorts string // dataplane.tcp_port_range; empty without a configuration
}

// readLayout reads planes and loopbacks from a configuration file, or else from the slot table. Without a table, and
// without a name for one, it is empty.
func readLayout(file, configFile string) (*layout, error) {
	if configFile != "" {
		c, err := config.Load(configFile)
		if err != nil {
			return nil, cli.Usage(err, "")
		}
		return &layout{from: "configuration " + configFile, subPorts: configuredSubPorts(c), tcpPorts: c.Dataplane.TCPPortRange}, nil
	}
	table, err := openSlots(file, "")
	if errors.Is(err, slots.ErrNoTable) && file == "" {
		return &layout{}, nil
	}
	if err != nil {
		return nil, err
	}
	subPorts, err := tableSubPorts(table)
	return &layout{from: "slot table " + table.Path(), table: table, subPorts: withOwnNetworks(subPorts, networks)}, explainSlots(err)
}

func configuredSubPorts(c *config.Config) (out []rdmadev.SubPort) {
	for _, p := range c.Planes {
		for i := range p.SubPorts {
			sp := rdmadev.SubPort{Device: p.SubPorts[i].Device, Plane: p.Name}
			for _, lo := range c.Loopbacks {
				if p.SubPorts[i].Serves(lo) {
					sp.Loopbacks = append(sp.Loopbacks, lo.Addr())
				}
			}
			out = append(out, sp)
		}
	}
	return out
}

// tableSubPorts returns the sub-ports of the slot table, each with the loopbacks of which a slot leads there. A
// loopback without pairs belongs to all.
func tableSubPorts(table *slots.Table) ([]rdmadev.SubPort, error) {
	list, err := table.SubPorts()
	if err != nil {
		return nil, err
	}
	type place struct {
		source  netip.Addr
		subPort int
	}
	uses, known := map[place]bool{}, map[netip.Addr]bool{}
	for p, err := range table.Pairs() {
		if err != nil {
			return nil, err
		}
		for _, s := range p.Slots {
			known[p.Source] = true
			for i := range list {
				if i == s.SubPort || s.SubPort < 0 && list[i].Plane == s.Plane {
					uses[place{p.Source, i}] = true
				}
			}
		}
	}
	var out []rdmadev.SubPort
	for i, sp := range list {
		next := rdmadev.SubPort{Device: sp.Device, Plane: table.Planes()[sp.Plane]}
		for _, a := range table.Sources() {
			if uses[place{a, i}] || !known[a] {
				next.Loopbacks = append(next.Loopbacks, a)
			}
		}
		out = append(out, next)
	}
	return out, nil
}

// networks returns the addresses of a device of this network namespace that have other hosts in their network.
func networks(device string) (out []netip.Addr) {
	ifi, err := net.InterfaceByName(device)
	if err != nil {
		return nil
	}
	addresses, err := ifi.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range addresses {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && !prefix.IsSingleIP() {
			out = append(out, prefix.Addr().Unmap())
		}
	}
	return out
}

// withOwnNetworks leaves out loopbacks that are in the network of another sub-port's device alone, as the addresses
// of a pod often are: the kernel makes no GID of them here.
func withOwnNetworks(subPorts []rdmadev.SubPort, networks func(device string) []netip.Addr) []rdmadev.SubPort {
	owners := map[netip.Addr][]string{}
	for _, sp := range subPorts {
		for _, a := range networks(sp.Device) {
			owners[a] = append(owners[a], sp.Device)
		}
	}
	for i := range subPorts {
		sp := &subPorts[i]
		sp.Loopbacks = slices.DeleteFunc(sp.Loopbacks, func(a netip.Addr) bool { return owners[a] != nil && !slices.Contains(owners[a], sp.Device) })
	}
	return subPorts
}

func runRDMA(ctx context.Context, e *cli.Env, o *rdmaOptions) error {
	l, err := readLayout(o.file, o.config)
	if err != nil {
		return err
	}
	pfc := rdmadev.PFC
	if o.sysfs != rdmadev.Sysfs {
		pfc = func(string) rdmadev.Setting { return rdmadev.Unknown } // netlink is this machine's
	}
	if o.sysfs == rdmadev.Sysfs { // which has the devices under their own names
		devices, err := hardware()
		if err != nil {
			return err
		}
		for i := range l.subPorts {
			name := &l.subPorts[i].Device
			if at := slices.IndexFunc(devices, func(d rtnl.Hardware) bool { return slices.Contains(d.Names(), *name) }); at >= 0 {
				*name = devices[at].Name
			}
		}
	}
	report, err := rdmadev.Inspect(o.sysfs, l.subPorts, pfc)
	if err != nil {
		return cli.Failed(err, "name the root of sysfs with --sysfs")
	}
	view := newRDMAView(l, report)
	if o.interval > 0 {
		if err := view.measure(ctx, l, report, o); err != nil {
			return err
		}
	}
	if err := view.print(e); err != nil {
		return err
	}
	problems := 0
	for _, f := range report.Findings {
		if f.Problem {
			problems++
		}
	}
	if problems > 0 {
		return cli.Failed(errors.New(cli.Several(problems, "problem")+" with RDMA"), "the output names each with its remedy")
	}
	return nil
}

// rdmaView is the output of `fared rdma -o json`.
type rdmaView struct {
	Source   string            `json:"planes_from"` // empty: unknown
	Ports    []rdmaPortView    `json:"ports"`
	Findings []rdmadev.Finding `json:"findings"`
	Traffic  *trafficView      `json:"traffic,omitempty"` // with --interval
}

type rdmaPortView struct {
	Netdev     string `json:"netdev"`
	Plane      string `json:"plane"`       // empty: of no plane
	RDMADevice string `json:"rdma_device"` // empty: none
	RDMAPort   int    `json:"rdma_port"`
	rdmadev.Status
	MTU       int             `json:"mtu"` // of the netdev
	PathMTU   int             `json:"path_mtu"`
	PFC       rdmadev.Setting `json:"pfc"`
	ECN       rdmadev.Setting `json:"ecn"`
	Loopbacks []netip.Addr    `json:"loopbacks"`
	GIDs      []rdmadev.GID   `json:"gids"` // of the netdev
}

func newRDMAView(l *layout, report *rdmadev.Report) *rdmaView {
	v := &rdmaView{Source: l.from, Ports: []rdmaPortView{}, Findings: report.Findings}
	if v.Findings == nil {
		v.Findings = []rdmadev.Finding{}
	}
	for i := range report.Rows {
		r := &report.Rows[i]
		p := rdmaPortView{
			Netdev: r.Device, Plane: r.Plane, Status: r.Status, MTU: r.Netdev.MTU, PathMTU: r.PathMTU(), PFC: r.PFC, ECN: r.Netdev.ECN,
			Loopbacks: append([]netip.Addr{}, r.Loopbacks...), GIDs: []rdmadev.GID{},
		}
		if r.Port != nil {
			p.RDMADevice, p.RDMAPort = r.Port.Device, r.Port.Port
			for _, g := range r.Port.GIDs {
				if g.Netdev == r.Device || r.Plane == "" {
					p.GIDs = append(p.GIDs, g)
				}
			}
		}
		v.Ports = append(v.Ports, p)
	}
	return v
}

func (v *rdmaView) print(e *cli.Env) error {
	if e.Output != "table" {
		return e.PrintValue(v)
	}
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	if v.Source == "" {
		fmt.Fprintf(w, "planes are unknown: there is no slot table; start 'fared run', or name a configuration with --config\n\n")
	}
	v.portTable(w)
	if v.Traffic != nil {
		v.Traffic.table(w)
	}
	for _, f := range v.Findings {
		kind := "note"
		if f.Problem {
			kind = "PROBLEM"
		}
		fmt.Fprintf(w, "\n%s %s\n  %s\n", kind, strings.TrimPrefix(f.Device+": "+f.Text, ": "), f.Remedy)
	}
	return w.Flush()
}

func (v *rdmaView) portTable(w *tabwriter.Writer) {
	cli.Row(w, "PLANE", "NETDEV", "RDMA PORT", "DRIVER", "STATE", "RATE", "MTU", "PFC", "ECN", "FLOW LABEL")
	for _, p := range v.Ports {
		rate, _, _ := strings.Cut(p.Rate, " (")
		mtu := "-"
		if p.PathMTU > 0 {
			mtu = fmt.Sprint(p.PathMTU)
		}
		cli.Row(w, cli.Dash(p.Plane), cli.Dash(p.Netdev), p.name(), cli.Dash(p.Driver), cli.Dash(p.State), cli.Dash(rate), mtu, p.PFC.String(), p.ECN.String(), p.Label.String())
	}
	if !slices.ContainsFunc(v.Ports, func(p rdmaPortView) bool { return len(p.GIDs) > 0 }) {
		return
	}
	fmt.Fprintln(w)
	cli.Row(w, "RDMA PORT", "GID INDEX", "TYPE", "ADDRESS", "NETDEV", "LOOPBACK")
	for _, p := range v.Ports {
		for _, g := range p.GIDs {
			cli.Row(w, p.name(), fmt.Sprint(g.Index), string(g.Type), g.Address.String(), cli.Dash(g.Netdev), cli.YesNo(slices.Contains(p.Loopbacks, g.Address)))
		}
	}
}

func (p *rdmaPortView) name() string {
	if p.RDMADevice == "" {
		return "-"
	}
	return fmt.Sprintf("%s/%d", p.RDMADevice, p.RDMAPort)
}
