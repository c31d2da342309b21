package topo

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/fared/fared/fare"
)

// Kind is the kind of a node.
type Kind uint8

// The kinds.
const (
	KindServer Kind = iota
	KindLeaf
	KindSpine
)

// String returns the kind's name for display.
func (k Kind) String() string { return [...]string{"server", "leaf", "spine"}[k] }

// Node is a BGP speaker of the fabric.
type Node struct {
	Kind  Kind
	Index int // index among the nodes of its kind, over the whole fabric
	Plane int // plane of a leaf or spine; -1 for a server, which is in all planes
	Name  string
	AS    uint32
	ID    netip.Addr // BGP identifier
}

// End is one end of a cable.
type End struct {
	Node   *Node
	Device string
	// Addr is the IPv4 address, in a /31 network with the other end's, and Addr6 the IPv6 address, in a /127; the zero
	// value if Spec.Addresses excludes the family.
	Addr, Addr6 netip.Addr
}

// Cable is a cable between a server and a leaf, or between a leaf and a spine. It carries one BGP session for each
// address family.
type Cable struct {
	// Index is the index in Fabric.Cables.
	Index int
	Plane int
	// Sub is the sub-port's number in its port, or for an uplink the spine's number in the plane.
	Sub int
	// Group is the source group that the sub-port serves; nil for an uplink.
	Group *Group
	Down  End // the server's end, or for an uplink the leaf's
	Up    End // the leaf's end, or for an uplink the spine's
	Speed fare.Bandwidth
}

// Uplink reports whether the cable is between a leaf and a spine.
func (c *Cable) Uplink() bool { return c.Up.Node.Kind == KindSpine }

// At returns the cable's end at n and the other end; n must be at one of them.
func (c *Cable) At(n *Node) (here, there *End) {
	if c.Down.Node == n {
		return &c.Down, &c.Up
	}
	return &c.Up, &c.Down
}

// Fabric is a numbered fabric. It is immutable.
type Fabric struct {
	Spec
	Server []*Node
	Leaf   []*Node // in the order of their planes
	Spine  []*Node
	// Cables holds the servers' cables, by plane, server, GPU (if GPUs own their ports) and sub-port, followed by the
	// uplinks, by leaf and spine.
	Cables []*Cable

	groups []*Group
	at     map[*Node][]*Cable
	byName map[string]*Node
}

// routerIDs is the network of the BGP identifiers of leaves and spines.
var routerIDs = netip.AddrFrom4([4]byte{10, 254, 0, 0})

// New numbers a fabric. The error is of type Problems.
func New(s Spec) (*Fabric, error) {
	s = s.WithDefaults()
	if err := s.Validate(); err != nil {
		return nil, err
	}
	f := &Fabric{Spec: s, at: map[*Node][]*Cable{}, byName: map[string]*Node{}}
	add := func(list *[]*Node, n Node) {
		n.Index = len(*list)
		*list = append(*list, &n)
		f.byName[n.Name] = &n
	}
	for i := range s.Servers {
		as := s.ServerAS
		if s.SharedAS == SharedNone {
			as += uint32(i)
		}
		add(&f.Server, Node{Kind: KindServer, Plane: -1, Name: fmt.Sprintf("server%d", i+1), AS: as, ID: f.Loopback(i, 0).Addr()})
	}
	for p := range s.Planes {
		for i := range s.Leaves {
			n := len(f.Leaf)
			add(&f.Leaf, Node{Kind: KindLeaf, Plane: p, Name: switchName("leaf", p, i, s.Leaves), AS: s.LeafAS + uint32(n), ID: offset(routerIDs, uint32(n+1))})
		}
	}
	for p := range s.Planes {
		for i := range s.Spines {
			n := len(f.Spine)
			add(&f.Spine, Node{Kind: KindSpine, Plane: p, Name: switchName("spine", p, i, s.Spines), AS: s.SpineAS + uint32(p), ID: offset(routerIDs, uint32(0x8000+n+1))})
		}
	}
	f.wire()
	return f, nil
}

// switchName returns leaf2 in a plane with one leaf, leaf2-0 in a plane with several.
func switchName(kind string, plane, i, of int) string {
	if of == 1 {
		return kind + strconv.Itoa(plane)
	}
	return fmt.Sprintf("%s%d-%d", kind, plane, i)
}

func offset(a netip.Addr, n uint32) netip.Addr {
	b := a.As4()
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, binary.BigEndian.Uint32(b[:])+n)))
}

func (f *Fabric) wire() {
	z := f.sizes()
	bits, inPlane := f.planeBits(z), make([]int, f.Planes)
	add := func(c Cable) *Cable {
		c.Index = len(f.Cables)
		// Block 0 stays free: in 127.0.0.0/8 it holds 127.0.0.1.
		at := uint32(c.Plane+1)<<bits + uint32(2*inPlane[c.Plane])
		if f.has(4) && !f.unnumbered() {
			c.Down.Addr, c.Up.Addr = offset(f.Underlay.Addr(), at), offset(f.Underlay.Addr(), at+1)
		}
		if f.has(6) && !f.unnumbered() {
			c.Down.Addr6, c.Up.Addr6 = offset6(f.Underlay6.Addr(), at), offset6(f.Underlay6.Addr(), at+1)
		}
		inPlane[c.Plane]++
		f.Cables = append(f.Cables, &c)
		f.at[c.Down.Node] = append(f.at[c.Down.Node], &c)
		f.at[c.Up.Node] = append(f.at[c.Up.Node], &c)
		return &c
	}
	f.makeGroups()
	list, _ := parseOverrides(string(f.Overrides)) // Validate has parsed them
	made := make([]int, f.Servers)                 // number of sub-ports of each server so far
	for p := range f.Planes {
		for _, g := range f.groups {
			server, owner := g.Server.Index, g.Index%f.owners()
			subs, speed := f.port(list, server, owner, p)
			for sub := range subs {
				leaf := f.Leaf[p*f.Leaves+f.leafOf(server, sub)]
				upper := fmt.Sprintf("s%d", server+1)
				if f.owners() > 1 {
					upper += gpuName(owner)
				}
				c := add(Cable{Plane: p, Sub: sub, Speed: speed, Group: g,
					Down: End{Node: g.Server, Device: f.subPortDevice(p, owner, sub, made[server])},
					Up:   End{Node: leaf, Device: fmt.Sprintf("%s.%d", upper, sub)}})
				made[server]++
				g.Planes[p], g.Cables = append(g.Planes[p], c), append(g.Cables, c)
			}
		}
	}
	for _, leaf := range f.Leaf {
		for i := range f.Spines {
			add(Cable{Plane: leaf.Plane, Sub: i, Speed: f.UplinkSpeed,
				Down: End{Node: leaf, Device: fmt.Sprintf("up%d", i)},
				Up:   End{Node: f.Spine[leaf.Plane*f.Spines+i], Device: fmt.Sprintf("down%d", leaf.Index%f.Leaves)}})
		}
	}
}

// makeGroups creates the source groups, without cables.
func (f *Fabric) makeGroups() {
	for _, server := range f.Server {
		for owner := range f.owners() {
			f.groups = append(f.groups, &Group{Index: len(f.groups), Server: server, Name: groupName(&f.Spec, server.Index, owner),
				GPU: owner, GPUs: f.GPUs / f.owners(), Planes: make([][]*Cable, f.Planes)})
		}
	}
}

// PlaneName returns the name of a plane.
func (f *Fabric) PlaneName(plane int) string { return planeName(plane) }

// Loopback returns the IPv4 address of a server's GPU. With addresses: ipv6 it is used only for the BGP identifier,
// with the first GPU's.
func (f *Fabric) Loopback(server, gpu int) netip.Prefix {
	return netip.PrefixFrom(offset(f.Loopbacks.Addr(), uint32(server*f.GPUs+gpu+1)), 32)
}

// At returns a node's cables, in the order of their indexes.
func (f *Fabric) At(n *Node) []*Cable { return f.at[n] }

// Nodes returns all nodes: servers, leaves, spines.
func (f *Fabric) Nodes() []*Node {
	all := make([]*Node, 0, len(f.Server)+len(f.Leaf)+len(f.Spine))
	return append(append(append(all, f.Server...), f.Leaf...), f.Spine...)
}

// Node returns the node with a name, or nil.
func (f *Fabric) Node(name string) *Node { return f.byName[name] }

// Software returns the software of a node: "fared", "frr" or "bird".
func (f *Fabric) Software(n *Node) string {
	switch n.Kind {
	case KindLeaf:
		return f.Spec.Leaf
	case KindSpine:
		return f.Spec.Spine
	}
	return Fared
}

// Find returns the cables that a name selects, at least one: those of a node ("leaf2", "server1"), of a plane ("p2"),
// of a node's plane, sub-port or device ("server1/p2", "server1/p2.0", "leaf0-1/up0", "spine0/down1"), and, if GPUs own
// their ports, those of a GPU, its port in a plane and a sub-port ("server1/g3", "server1/g3p2", "server1/g3p2.0").
func (f *Fabric) Find(name string) ([]*Cable, error) {
	owner, part, inside := strings.Cut(name, "/")
	var found []*Cable
	if n := f.byName[owner]; n != nil {
		for _, c := range f.at[n] {
			here, _ := c.At(n)
			if !inside || here.Device == part || n.Kind == KindServer && f.covers(c, part) {
				found = append(found, c)
			}
		}
	} else if !inside {
		for _, c := range f.Cables {
			if f.PlaneName(c.Plane) == owner {
				found = append(found, c)
			}
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("%q: %w: name a node (%s), a plane (%s), or a port of a node (%s/%s, %s/%s, %s/%s)", name, errNotFound,
			f.names(), f.span("p", 0, f.Planes-1), f.Server[0].Name, f.PlaneName(0), f.Server[0].Name, f.at[f.Server[0]][0].Down.Device, f.Leaf[0].Name, f.at[f.Leaf[0]][0].Up.Device)
	}
	return found, nil
}

// covers reports whether a server's cable belongs to a plane ("p2"), to a GPU that owns its ports ("g3") or to its port
// ("g3p2").
func (f *Fabric) covers(c *Cable, part string) bool {
	plane := f.PlaneName(c.Plane)
	if f.owners() == 1 {
		return part == plane
	}
	gpu := gpuName(c.Group.GPU)
	return part == plane || part == gpu || part == gpu+plane
}

// names returns the nodes' names for an error.
func (f *Fabric) names() string {
	parts := []string{f.span("server", 1, f.Servers)}
	for _, list := range [][]*Node{f.Leaf, f.Spine} {
		if n := len(list); n == 1 {
			parts = append(parts, list[0].Name)
		} else if n > 1 {
			parts = append(parts, list[0].Name+" to "+list[n-1].Name)
		}
	}
	return strings.Join(parts, ", ")
}

func (f *Fabric) span(word string, first, last int) string {
	if first == last {
		return fmt.Sprintf("%s%d", word, first)
	}
	return fmt.Sprintf("%s%d to %s%d", word, first, word, last)
}
