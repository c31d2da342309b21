package lab

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// Options is the size and the manner of a lab fabric. The zero value of each field means its default.
type Options struct {
	// Planes is the number of planes, each with one leaf; default 4, at most 64.
	Planes int
	// Servers is the number of GPU servers; default 8, or NetnsServers, at most 250.
	Servers int
	// GPUs is the number of GPUs, and so of loopbacks, of a server; default 1, at most 8.
	GPUs int
	// SubPorts is the number of sub-ports of a plane's port at each server; default 2 (a Y-cable), at most 60.
	SubPorts int
	// Speed is a sub-port's speed; default 400G.
	Speed fare.Bandwidth
	// Mode, Policy and Ordering are the values of the configuration's weights section; default: its defaults.
	Mode, Policy, Ordering string
	// Netns makes the fabric of network namespaces and processes; nil: all of it is in this process.
	Netns *Netns
}

func (o Options) withDefaults() Options {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.Planes, 4)
	if o.Netns == nil {
		def(&o.Servers, 8)
	} else {
		def(&o.Servers, NetnsServers)
		n := o.Netns.withDefaults()
		o.Netns = &n
	}
	def(&o.GPUs, 1)
	def(&o.SubPorts, 2)
	if o.Speed == 0 {
		o.Speed = 400e9
	}
	if o.Mode == "" {
		o.Mode = "per-flow"
	}
	if o.Policy == "" {
		o.Policy = "reweight"
	}
	if o.Ordering == "" {
		o.Ordering = "weak"
	}
	return o
}

// validate refuses what the address plan or a server cannot hold.
func (o Options) validate() error {
	bounds := []struct {
		flag            string
		value, low, top int
	}{
		{"planes", o.Planes, 1, 64}, {"servers", o.Servers, 2, 250}, {"gpus", o.GPUs, 1, 8}, {"sub-ports", o.SubPorts, 1, 60},
	}
	for _, b := range bounds {
		if b.value < b.low || b.value > b.top {
			return fmt.Errorf("--%s %d: not within %d to %d", b.flag, b.value, b.low, b.top)
		}
	}
	if n := o.Planes * o.SubPorts; n > config.MaxSessions {
		return fmt.Errorf("--planes %d with --sub-ports %d: %d sessions a server, more than %d", o.Planes, o.SubPorts, n, config.MaxSessions)
	}
	if n := o.Servers * o.SubPorts; n > config.MaxLeafSessions {
		return fmt.Errorf("--servers %d with --sub-ports %d: %d sessions a leaf, more than %d", o.Servers, o.SubPorts, n, config.MaxLeafSessions)
	}
	if o.Netns != nil {
		return o.Netns.validate(o)
	}
	return nil
}

// plan is the fabric's numbering: names, addresses, AS numbers. Every server, leaf and cable follows from Options alone
// but for the TCP port in one process, which is one that is free now.
type plan struct {
	Options
	port int
	// dir is where the processes of a fabric of namespaces keep their files; each node has a folder there.
	dir string
}

// newPlan numbers a fabric whose leaves listen on port 179.
func newPlan(o Options) (*plan, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	return &plan{Options: o, port: 179, dir: "/run/fared"}, nil
}

// The address plan: a cable's two ends are 127.<1+plane>.<server>.<2k+2> (server) and .<2k+3> (leaf), servers counted
// from 1, with 10 in place of 127 between network namespaces; loopbacks are in 10.255.0.0/16, GPUs counted from 1 over the whole fabric.
func (p *plan) planeName(plane int) string   { return fmt.Sprintf("p%d", plane) }
func (p *plan) serverName(server int) string { return fmt.Sprintf("server%d", server+1) }
func (p *plan) leafName(plane int) string    { return fmt.Sprintf("leaf%d", plane) }
func (p *plan) serverEnd(plane, server, sub int) netip.Addr {
	network := byte(127)
	if p.Netns != nil {
		network = 10
	}
	return netip.AddrFrom4([4]byte{network, byte(1 + plane), byte(1 + server), byte(2*sub + 2)})
}
func (p *plan) leafEnd(plane, server, sub int) netip.Addr {
	return p.serverEnd(plane, server, sub).Next()
}
func (p *plan) loopback(server, gpu int) netip.Prefix {
	n := server*p.GPUs + gpu + 1
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(n >> 8), byte(n)}), 32)
}
func (p *plan) serverAS(server int) uint32 { return 4200001000 + uint32(server) }
func (p *plan) leafAS(plane int) uint32    { return 4200000000 + uint32(plane) }
func (p *plan) leafID(plane int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 1, 0, byte(plane + 1)})
}

// device names a sub-port at a server; leafDevice names the port at the leaf that the cable ends in.
func (p *plan) device(plane, sub int) string      { return fmt.Sprintf("p%d.%d", plane, sub) }
func (p *plan) leafDevice(server, sub int) string { return fmt.Sprintf("s%d.%d", server+1, sub) }
func (p *plan) serverSubPort(plane, sub int) int  { return plane*p.SubPorts + sub }
func (p *plan) leafSubPort(server, sub int) int   { return server*p.SubPorts + sub }
func (p *plan) pairs() int                        { n := p.Servers * p.GPUs; return n * (p.Servers - 1) * p.GPUs }

// serverConfig writes the configuration of a server, the file a real one would have.
func (p *plan) serverConfig(server int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s of a lab fabric: %d planes, %d servers.\n", p.serverName(server), p.Planes, p.Servers)
	fmt.Fprintf(&b, "role: server\nrouter_id: %s\nas: %d\nloopbacks:\n", p.loopback(server, 0).Addr(), p.serverAS(server))
	for g := range p.GPUs {
		fmt.Fprintf(&b, "  - %s\n", p.loopback(server, g))
	}
	p.common(&b, p.serverName(server))
	if p.Netns != nil {
		// So that a leaf which can keeps the routes of a server whose control plane has crashed (RFC 4724).
		fmt.Fprintf(&b, "bgp: {connect_retry: 200ms, restart_time: %s}\n", restartTime)
	}
	fmt.Fprintf(&b, "weights: {mode: %s, policy: %s, ordering: %s}\ndataplane: {address: %q}\nplanes:\n", p.Mode, p.Policy, p.Ordering, p.dataplane(server))
	for plane := range p.Planes {
		fmt.Fprintf(&b, "  - name: %s\n    sub_ports:\n", p.planeName(plane))
		for sub := range p.SubPorts {
			p.subPort(&b, p.device(plane, sub))
			fmt.Fprintf(&b, "          - {peer: %s, local: %s, port: %d, peer_as: %d, families: [ipv4]}\n",
				p.leafEnd(plane, server, sub), p.serverEnd(plane, server, sub), p.port, p.leafAS(plane))
		}
	}
	return b.String()
}

// leafConfig writes the configuration of a plane's leaf.
func (p *plan) leafConfig(plane int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s of a lab fabric: %d planes, %d servers.\n", p.leafName(plane), p.Planes, p.Servers)
	fmt.Fprintf(&b, "role: leaf\nrouter_id: %s\nas: %d\n", p.leafID(plane), p.leafAS(plane))
	p.common(&b, p.leafName(plane))
	if p.Netns != nil {
		b.WriteString("bgp: {connect_retry: 200ms}\n")
	}
	fmt.Fprintf(&b, "planes:\n  - name: %s\n    sub_ports:\n", p.planeName(plane))
	for server := range p.Servers {
		for sub := range p.SubPorts {
			p.subPort(&b, p.leafDevice(server, sub))
			fmt.Fprintf(&b, "          - {peer: %s, local: %s, port: %d, peer_as: %d, passive: true, families: [ipv4]}\n",
				p.serverEnd(plane, server, sub), p.leafEnd(plane, server, sub), p.port, p.serverAS(server))
		}
	}
	return b.String()
}

func (p *plan) common(b *strings.Builder, node string) {
	b.WriteString("accept: [10.255.0.0/16]\ndrain_delay: 200ms\nstart: {deadline: 20s}\n")
	if p.Netns != nil {
		fmt.Fprintf(b, "api: {socket: %q}\n", p.socket(node))
	}
}

// restartTime is longer than any step keeps a server's control plane dead.
const restartTime = 10 * time.Minute

// subPort begins a sub-port. A simulated cable has no device that could be asked; a real one is, for its speed too.
func (p *plan) subPort(b *strings.Builder, device string) {
	fmt.Fprintf(b, "      - device: %s\n", device)
	if p.Netns == nil {
		fmt.Fprintf(b, "        speed: %s\n        link_state: assume-up\n", p.Speed)
	} else {
		b.WriteString("        speed_source: tbf\n")
	}
	b.WriteString("        sessions:\n")
}

// socket is where a node's daemon answers; dataplane the address of a server's data plane.
func (p *plan) socket(node string) string { return filepath.Join(p.dir, node, "fared.sock") }
func (p *plan) dataplane(server int) string {
	if p.Netns == nil {
		return "memory:"
	}
	return "unix:" + filepath.Join(p.dir, p.serverName(server), "dataplane.sock")
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

// Configs returns the configuration file of every node, leaves first: what Start runs, for reading and for running the
// same fabric in processes of their own. Leaves listen on port 179.
func Configs(o Options) ([]File, error) {
	p, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	var files []File
	for plane := range p.Planes {
		files = append(files, File{p.leafName(plane) + ".yaml", p.leafConfig(plane)})
	}
	for s := range p.Servers {
		files = append(files, File{p.serverName(s) + ".yaml", p.serverConfig(s)})
	}
	return files, nil
}
