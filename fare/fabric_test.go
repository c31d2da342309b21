package fare

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"
)

// fabric is the draft's Figure 1 in pure tables. Every server is wired to every
// leaf by a Y-cable. A table in the role leaf represents each leaf and one in
// the role server each server; each end decodes the other end's encoding.
type fabric struct {
	t        *testing.T
	servers  []*Table
	leaves   []*Table
	subPorts int // per plane
	speed    Bandwidth
	gen      uint64
	changes  []Change // of the first server, in the last command
}

const (
	leafAS   = 65000
	serverAS = 64000
)

func (f *fabric) loopback(server int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 0, byte(server)}), 32)
}

func newFabric(t *testing.T, servers, leaves, subPorts int, speed Bandwidth) *fabric {
	f := &fabric{t: t, subPorts: subPorts, speed: speed}
	server, leaf := Config{}, Config{Role: RoleLeaf, Planes: []string{"down"}}
	for p := range leaves {
		server.Planes = append(server.Planes, fmt.Sprintf("p%d", p+1))
		for k := range subPorts {
			name := fmt.Sprintf("p%ds%d", p+1, k+1)
			server.SubPorts = append(server.SubPorts, SubPort{Device: name, Plane: p, Speed: speed})
			server.Sessions = append(server.Sessions, Session{Name: name, SubPort: p*subPorts + k})
		}
	}
	for s := range servers {
		for k := range subPorts {
			name := fmt.Sprintf("g%ds%d", s+1, k+1)
			leaf.SubPorts = append(leaf.SubPorts, SubPort{Device: name, Speed: speed})
			leaf.Sessions = append(leaf.Sessions, Session{Name: name, SubPort: s*subPorts + k})
		}
	}
	make1 := func(c Config) *Table {
		table, err := NewTable(c)
		if err != nil {
			t.Fatal(err)
		}
		return table
	}
	for range leaves {
		f.leaves = append(f.leaves, make1(leaf))
	}
	for range servers {
		f.servers = append(f.servers, make1(server))
	}
	for p := range leaves {
		for s := range servers {
			for k := range subPorts {
				f.cable(s, p, k, true)
			}
		}
	}
	return f
}

// cable connects or disconnects sub-cable k between a server and a leaf.
func (f *fabric) cable(server, leaf, k int, up bool) {
	atServer, atLeaf := leaf*f.subPorts+k, server*f.subPorts+k
	f.gen++
	f.server(server, LinkState{SubPort: atServer, Up: up})
	f.leaf(leaf, LinkState{SubPort: atLeaf, Up: up})
	if !up {
		s, l := f.servers[server].sessions[atServer], f.leaves[leaf].sessions[atLeaf]
		f.server(server, SessionDown{Session: atServer, Generation: s.generation})
		f.leaf(leaf, SessionDown{Session: atLeaf, Generation: l.generation})
		return
	}
	f.server(server, SessionUp{Session: atServer, Generation: f.gen, Node: netip.AddrFrom4([4]byte{10, 0, 0, byte(leaf + 1)}), PeerAS: leafAS + uint32(leaf)})
	f.leaf(leaf, SessionUp{Session: atLeaf, Generation: f.gen, Node: netip.AddrFrom4([4]byte{10, 1, 0, byte(server + 1)}), PeerAS: serverAS + uint32(server)})
	for prefix := range f.leaves[leaf].Destinations {
		f.advertise(leaf, prefix, server, k)
	}
	f.server(server, EndOfRIB{Session: atServer, Generation: f.gen})
	f.leaf(leaf, RouteUpdate{Session: atLeaf, Generation: f.gen, Prefix: f.loopback(server + 1), Attrs: &Attributes{
		Communities: []Community{Codec{}.Encode(f.speed, netip.Addr{})}, ASPath: []uint32{serverAS + uint32(server)}}})
	f.leaf(leaf, EndOfRIB{Session: atLeaf, Generation: f.gen})
}

func (f *fabric) server(i int, e Event) {
	changes := f.servers[i].Step(e)
	if i == 0 {
		f.changes = append(f.changes, changes...)
	}
}

// leaf steps a leaf and delivers its readvertisements to every server.
func (f *fabric) leaf(i int, e Event) {
	for _, c := range append([]Change(nil), f.leaves[i].Step(e)...) {
		if c.Kind != Readvertise {
			continue
		}
		for s := range f.servers {
			for k := range f.subPorts {
				f.advertise(i, c.Destination, s, k)
			}
		}
	}
}

// advertise sends one route, or its withdrawal, over sub-cable k.
func (f *fabric) advertise(leaf int, prefix netip.Prefix, server, k int) {
	if prefix == f.loopback(server+1) {
		return // the server's own route; AS_PATH loop detection would refuse it
	}
	index := leaf*f.subPorts + k
	s := f.servers[server].sessions[index]
	if !s.up {
		return
	}
	bandwidth, path, ok := f.leaves[leaf].Readvertise(prefix)
	if !ok {
		f.server(server, RouteWithdraw{Session: index, Generation: s.generation, Prefix: prefix})
		return
	}
	f.server(server, RouteUpdate{Session: index, Generation: s.generation, Prefix: prefix, Attrs: &Attributes{
		Communities: []Community{Codec{}.Encode(bandwidth, netip.Addr{})},
		ASPath:      append([]uint32{leafAS + uint32(leaf)}, path...)}})
}

// fail applies a failure or its repair and returns the first server's changes.
func (f *fabric) fail(what string, a args) string {
	f.changes = f.changes[:0]
	server, plane, k := a.number(f.t, "server", 0)-1, a.number(f.t, "plane", 0)-1, a.number(f.t, "sub", 0)-1
	up := a.words[len(a.words)-1] == "up"
	switch what {
	case "sub-cable":
		f.cable(server, plane, k, up)
	case "port":
		for k := range f.subPorts {
			f.cable(server, plane, k, up)
		}
	case "leaf":
		for s := range f.servers {
			for k := range f.subPorts {
				f.cable(s, plane, k, up)
			}
		}
	case "drain-server":
		f.server(server, Drain{Scope: DrainPlane, Index: plane, On: !up})
	}
	return "ok\n"
}

func (f *fabric) pair(from, to int) string {
	table := f.servers[from-1]
	id, ok := table.Destination(f.loopback(to))
	if !ok {
		return "unknown"
	}
	v := table.Group(id)
	if !v.Reachable {
		return "unreachable: " + v.Reason.String()
	}
	return weightsOf(v)
}

// weights implements the command "weights A B": it returns the pair's weights
// in both directions.
func (f *fabric) weights(a args) string {
	from, err := strconv.Atoi(a.word(1))
	if err != nil {
		f.t.Fatal(err)
	}
	to, err := strconv.Atoi(a.word(2))
	if err != nil {
		f.t.Fatal(err)
	}
	return fmt.Sprintf("%d->%d %s\n%d->%d %s\n", from, to, f.pair(from, to), to, from, f.pair(to, from))
}

// allWeights counts all pairs by their weights.
func (f *fabric) allWeights() string {
	counts := map[string]int{}
	var order []string
	for from := range f.servers {
		for to := range f.servers {
			if from == to {
				continue
			}
			w := f.pair(from+1, to+1)
			if counts[w] == 0 {
				order = append(order, w)
			}
			counts[w]++
		}
	}
	var b strings.Builder
	for _, w := range order {
		fmt.Fprintf(&b, "%s for %d pairs\n", w, counts[w])
	}
	return b.String()
}
