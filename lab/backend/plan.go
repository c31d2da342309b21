package backend

import (
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/topo"
)

// Plan is a numbered fabric with the places of its nodes.
type Plan struct {
	*topo.Fabric
	// Transport is the transport of traffic nodes, "" without them. MemoryPlane is the plane whose queue pairs use
	// memory that all servers share, "" for none.
	Transport, MemoryPlane string
	// Site holds the parts of configurations that depend on the kind of lab.
	Site topo.Site
	// Dir holds a folder for each node with separate processes.
	Dir string
	// prefix is the prefix of the nodes' network namespaces.
	prefix string
}

// Socket returns the path of the daemon's socket of a node.
func (p *Plan) Socket(node string) string { return filepath.Join(p.Dir, node, "fared.sock") }

// dataplane returns the path of the data plane's socket of a server.
func (p *Plan) dataplane(node string) string {
	return strings.TrimPrefix(p.Site.Dataplane(node), "unix:")
}

// port returns a cable's index among those of a node, which equals the index of its sub-port in the configuration.
func (p *Plan) port(n *topo.Node, c *topo.Cable) int {
	for i, at := range p.At(n) {
		if at == c {
			return i
		}
	}
	panic("a cable of another node")
}

// Namespace returns a node's network namespace.
func (p *Plan) Namespace(node string) Namespace { return Namespace(p.prefix + node) }

// leavesFirst returns all nodes in the order in which they start.
func (p *Plan) leavesFirst() []*topo.Node { return slices.Concat(p.Spine, p.Leaf, p.Server) }

// StartTimeout returns the time limit for starting a fabric; it grows with the cables, because every session costs
// processor time at both ends.
func (p *Plan) StartTimeout() time.Duration {
	return time.Minute + time.Duration(len(p.Cables))*time.Second/2
}

// nameTraffic is the name of the traffic node among a server's processes.
const nameTraffic = "traffic"

// nodeArgs returns the arguments of `fared` that start a server's traffic node.
func (p *Plan) nodeArgs(listen string) []string {
	args := []string{nameTraffic, "node", "--transport", p.Transport, "--listen", "unix:" + listen}
	if plane := p.MemoryPlane; plane != "" {
		args = append(args, "--plane", plane+"=nupa", "--nupa-file", filepath.Join(p.Dir, plane+".memory"))
	}
	return args
}

// Established is the API's name of a session state in which both ends exchange messages.
const Established = "established"
