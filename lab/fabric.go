package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// Options is the fabric of a lab and what it is made of. The zero value of each field means its default.
type Options struct {
	// Spec is the fabric. Servers is 4 by default where nodes have processes of their own.
	topo.Spec
	// Netns makes the fabric of network namespaces and processes, Containerlab of containers; both nil: all of it is in this process.
	Netns        *Netns
	Containerlab *Containerlab
	// Transport has every server run a traffic node: queue pairs of "roce", "superp" or "tcp", which take their slots from fared, carry
	// verified WRITEs from every loopback to every other while scenarios are played. The lab itself sends no packets then. "": none.
	Transport string
	// MemoryPlane names a plane whose queue pairs go through memory that all servers share ("nupa"), in a fabric of namespaces with a
	// Transport. The plane has its cables all the same, which say whether it is there and how fast it is. "": none.
	MemoryPlane string
	// Timeline says that results have timelines. In one process, daemons are listened to for it.
	Timeline bool
}

// real says that nodes have processes of their own, kernels and packets.
func (o Options) real() bool { return o.Netns != nil || o.Containerlab != nil }

// rate is how many packets a second each server sends.
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
		n := o.Netns.withDefaults()
		o.Netns = &n
	}
	if o.Containerlab != nil {
		c := o.Containerlab.withDefaults()
		o.Containerlab = &c
	}
	if !o.real() {
		o.Underlay = netip.MustParsePrefix("127.0.0.0/8") // the only addresses that need nobody's leave
	}
	o.Spec = o.Spec.WithDefaults()
	return o
}

// transferSpeed is the default of Options.Speed where queue pairs carry bytes: so slow that cables are scarce, and not the processor
// that all nodes share.
const transferSpeed = 50 * fare.Gigabit

// validate refuses what this kind of lab cannot be.
func (o Options) validate() error {
	if err := o.validateTransport(); err != nil {
		return err
	}
	switch {
	case o.Netns != nil:
		return o.Netns.validate(o)
	case o.Containerlab != nil:
		return o.Containerlab.validate(o)
	}
	for _, software := range []struct{ flag, value string }{{"leaf", o.Leaf}, {"spine", o.Spine}} {
		if software.value != topo.Fared {
			return fmt.Errorf("--%s %s: in one process there is fared only, use --netns", software.flag, software.value)
		}
	}
	return nil
}

// plan is a numbered fabric and where its nodes are.
type plan struct {
	*topo.Fabric
	options Options
	// site is what configurations say of the place.
	site topo.Site
	// dir is where nodes with processes of their own keep their files; each has a folder there.
	dir string
	// prefix begins the names of nodes' network namespaces.
	prefix string
}

// newPlan numbers a fabric whose leaves listen on port 179.
func newPlan(o Options) (*plan, error) {
	o = o.withDefaults()
	fabric, err := topo.New(o.Spec)
	if err != nil {
		return nil, flagErrors(err)
	}
	if err := o.validate(); err != nil {
		return nil, err
	}
	p := &plan{Fabric: fabric, options: o, dir: "/run/fared"}
	switch {
	case o.Netns != nil:
		p.site = fabric.Site(topo.Containerlab) // the same, but for what every node of a machine shares
		p.site.Speeds, p.site.Socket = "tbf", p.socket
		p.site.Dataplane = func(node string) string { return "unix:" + filepath.Join(p.dir, node, "dataplane.sock") }
		steer(&p.site, p.options.Transport)
	case o.Containerlab != nil:
		p.site = fabric.Site(topo.Containerlab)
	default:
		p.site = topo.Site{Lab: true, AssumeUp: true, Dataplane: func(node string) string {
			if fabric.Node(node).Kind != topo.KindServer {
				return ""
			}
			return "memory:"
		}}
	}
	return p, nil
}

// flagErrors names what is wrong with a fabric by the command's flags.
func flagErrors(err error) error {
	var problems topo.Problems
	if !errors.As(err, &problems) {
		return err
	}
	var lines []string
	for _, p := range problems {
		if p.Key != "" {
			p.Key = "--" + strings.ReplaceAll(p.Key, "_", "-")
		}
		lines = append(lines, p.Error())
	}
	return errors.New(strings.Join(lines, "\n"))
}

// pairs is how many GPUs send to how many others.
func (p *plan) pairs() int { n := p.Servers * p.GPUs; return n * (p.Servers - 1) * p.GPUs }

// socket is where a node's daemon answers.
func (p *plan) socket(node string) string { return filepath.Join(p.dir, node, "fared.sock") }

// dataplane is where a server's data plane answers.
func (p *plan) dataplane(node string) string {
	return strings.TrimPrefix(p.site.Dataplane(node), "unix:")
}

// port is a cable's place among those of a node, which is that of its sub-port in the configuration.
func (p *plan) port(n *topo.Node, c *topo.Cable) int {
	for i, at := range p.At(n) {
		if at == c {
			return i
		}
	}
	panic("a cable of another node")
}

// freePort returns a TCP port that nothing on this machine listens on; the leaves' addresses are all on it.
func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// File is a generated configuration file.
type File struct{ Name, Text string }

// Configs returns the configuration files of every node, servers first: what Start runs, for reading and for running the
// same fabric in processes of their own. Leaves listen on port 179.
func Configs(o Options) ([]File, error) {
	p, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	var files []File
	for _, n := range p.Nodes() {
		own := p.Files(n, p.site)
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
