package lab

import (
	"net"
	"net/netip"
	"path/filepath"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// Options describes a lab's fabric and selects its implementation. The zero value of each field means its default.
type Options struct {
	// Spec describes the fabric. The default of Servers is 4 if nodes have separate processes.
	topo.Spec
	// Netns selects network namespaces and processes, Containerlab containers; if both are nil, the fabric runs in this
	// process.
	Netns        *backend.Netns
	Containerlab *backend.Containerlab
	// Transport makes every server run a traffic node: queue pairs of "roce", "superp" or "tcp", which take their slots
	// from fared, carry verified WRITEs from every loopback to every other while scenarios are played. The lab itself
	// sends no packets then. "" disables traffic nodes.
	Transport string
	// MemoryPlane names a plane whose queue pairs use memory shared by all servers ("nupa"), in a fabric of namespaces
	// with a Transport. The plane keeps its cables, which determine its state and speed. "" means no such plane.
	MemoryPlane string
	// Quick shortens drain_delay, start.deadline and bgp.connect_retry, which otherwise have their defaults, as on
	// servers. It does not apply to containers, whose configurations exist already.
	Quick bool
	// Timeline adds timelines to the results. In one process, the lab then also subscribes to the daemons' weights.
	Timeline bool
	// Progress, if set, receives a line when more nodes of a starting fabric have reached their expected state, at most
	// one per second.
	Progress func(string)
}

// real reports whether nodes have separate processes, kernels and packets.
func (o Options) real() bool { return o.Netns != nil || o.Containerlab != nil }

// rate returns the number of packets per second that each server sends.
func (o Options) rate() int {
	switch {
	case o.Transport != "":
		return 0
	case o.Netns != nil:
		return rateOf(o.Netns.Rate)
	case o.Containerlab != nil:
		return rateOf(o.Containerlab.Rate)
	}
	return 0
}

func (o Options) withDefaults() Options {
	if o.Transport == Transports[0] {
		o.Transport = ""
	}
	if o.Transport != "" && o.Netns != nil && o.Speed == 0 {
		o.Speed = transferSpeed
	}
	if o.Netns != nil {
		if o.Servers == 0 {
			o.Servers = NetnsServers
		}
		n := o.Netns.WithDefaults()
		o.Netns = &n
	}
	if o.Containerlab != nil {
		c := o.Containerlab.WithDefaults()
		o.Containerlab = &c
	}
	if !o.real() {
		o.Underlay = netip.MustParsePrefix("127.0.0.0/8") // the only addresses that need no privilege
	}
	o.Spec = o.Spec.WithDefaults()
	return o
}

// transferSpeed is the default of Options.Speed for queue pair traffic. It is low enough that the cables are the
// bottleneck, and not the processor that all nodes share.
const transferSpeed = 50 * fare.Gigabit

// validate rejects options that this kind of lab does not support.
func (o Options) validate() error {
	if o.Addresses != topo.IPv4 {
		return backend.NewOptionError("{Addresses} %s: labs send and check only IPv4 packets: use ipv4, or run the files of fared topo generate", o.Addresses)
	}
	if err := o.validateTransport(); err != nil {
		return err
	}
	if o.Quick && o.Containerlab != nil {
		return backend.NewOptionError("{Quick}: the configurations of a fabric of containers exist already, use {Netns}")
	}
	switch {
	case o.Netns != nil:
		return o.validateNetns()
	case o.Containerlab != nil:
		return o.validateReal()
	}
	if o.Cables == topo.Unnumbered {
		return backend.NewOptionError("{Cables} %s: in a single process cables have no devices, which unnumbered sessions need: use numbered, or {Netns}", o.Cables)
	}
	for _, software := range []struct{ field, value string }{{"Leaf", o.Leaf}, {"Spine", o.Spine}} {
		if software.value != topo.Fared {
			return backend.NewOptionError("{"+software.field+"} %s: a fabric in one process runs only fared, use {Netns}", software.value)
		}
	}
	return nil
}

// newPlan numbers a fabric whose leaves listen on port 179. It returns the options with their defaults.
func newPlan(o Options) (*backend.Plan, Options, error) {
	o = o.withDefaults()
	fabric, err := topo.New(o.Spec)
	if err != nil {
		return nil, o, err
	}
	if err := o.validate(); err != nil {
		return nil, o, err
	}
	p := &backend.Plan{Fabric: fabric, Transport: o.Transport, MemoryPlane: o.MemoryPlane, Dir: "/run/fared"}
	switch {
	case o.Netns != nil:
		p.Site = fabric.Site(topo.Containerlab) // the same, except for resources that all nodes of a machine share
		p.Site.RateScale, p.Site.Socket = backend.RateScale, p.Socket
		p.Site.Dataplane = func(node string) string { return "unix:" + filepath.Join(p.Dir, node, "dataplane.sock") }
		steer(&p.Site, o.Transport)
	case o.Containerlab != nil:
		p.Site = fabric.Site(topo.Containerlab)
	default:
		p.Site = topo.Site{AssumeUp: true, Dataplane: func(node string) string {
			if fabric.Node(node).Kind != topo.KindServer {
				return ""
			}
			return "memory:"
		}}
	}
	p.Site.Quick = o.Quick
	return p, o, nil
}

// freePort returns a TCP port on which no process listens at any IPv4 address; the leaves' addresses all use it. The
// leaves of another fabric listen at the same addresses of 127.0.0.0/8, so a port that is free at 127.0.0.1 is not
// enough.
func freePort() (int, error) {
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// File is a generated configuration file.
type File struct{ Name, Text string }

// Configs returns the configuration files of every node, servers first, with leaves that listen on port 179. Start runs
// these configurations; they also serve to run the fabric in separate processes.
func Configs(o Options) ([]File, error) {
	p, _, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	var files []File
	for _, n := range p.Nodes() {
		own := p.Files(n, p.Site)
		for _, f := range own {
			name := n.Name + filepath.Ext(f.Name)
			if len(own) > 1 {
				name = n.Name + "-" + f.Name
			}
			files = append(files, File{name, f.Text})
		}
	}
	return files, nil
}
