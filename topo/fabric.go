package topo

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/fared/fared/fare"
)

// Kind is what a node is.
type Kind uint8

// The kinds.
const (
	KindServer Kind = iota
	KindLeaf
	KindSpine
)

// String is a word for people.
func (k Kind) String() string { return [...]string{"server", "leaf", "spine"}[k] }

// Node is a BGP speaker of the fabric.
type Node struct {
	Kind  Kind
	Index int // among its kind, over the whole fabric
	Plane int // of a leaf or spine; -1: a server is in all
	Name  string
	AS    uint32
	ID    netip.Addr // BGP identifier
}

// End is one end of a cable.
type End struct {
	Node   *Node
	Device string
	Addr   netip.Addr // in a /31 network with the other end's
}

// Cable is a cable between a server and a leaf, or between a leaf and a spine. It carries one BGP session.
type Cable struct {
	// Index is its place in Fabric.Cables.
	Index int
	Plane int
	// Sub is the server's sub-port in the plane; of an uplink the spine's number in the plane.
	Sub   int
	Down  End // the server's, or the leaf's of an uplink
	Up    End // the leaf's, or the spine's
	Speed fare.Bandwidth
}

// Uplink says that the cable is between a leaf and a spine.
func (c *Cable) Uplink() bool { return c.Up.Node.Kind == KindSpine }

// At returns the cable's end at a node and the other one; the node has to be at one of them.
func (c *Cable) At(n *Node) (here, there *End) {
	if c.Down.Node == n {
		return &c.Down, &c.Up
	}
	return &c.Up, &c.Down
}

// Fabric is a numbered fabric. It is immutable.
type Fabric struct {
	Spec
	Server []*Node // servers
	Leaf   []*Node // leaves, those of plane 0 first
	Spine  []*Node
	// Cables are those of servers, by plane, server and sub-port, and after them the uplinks, by leaf and spine.
	Cables []*Cable

	at     map[*Node][]*Cable
	byName map[string]*Node
}

// routerIDs is the network from which leaves and spines have their BGP identifiers.
var routerIDs = netip.AddrFrom4([4]byte{10, 254, 0, 0})

// New numbers a fabric. The error is Problems.
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
		add(&f.Server, Node{Kind: KindServer, Plane: -1, Name: fmt.Sprintf("server%d", i+1), AS: s.ServerAS + uint32(i), ID: f.Loopback(i, 0).Addr()})
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

// switchName is leaf2 where a plane has one, leaf2-0 where it has several.
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
	add := func(c Cable, n int) {
		c.Index = len(f.Cables)
		// Block 0 stays free: in 127.0.0.0/8 it holds 127.0.0.1.
		c.Down.Addr = offset(f.Underlay.Addr(), uint32(c.Plane+1)<<f.planeBits()+uint32(2*n))
		c.Up.Addr = c.Down.Addr.Next()
		f.Cables = append(f.Cables, &c)
		f.at[c.Down.Node] = append(f.at[c.Down.Node], &c)
		f.at[c.Up.Node] = append(f.at[c.Up.Node], &c)
	}
	for p := range f.Planes {
		for s, server := range f.Server {
			for sub := range f.SubPorts {
				leaf := f.Leaf[p*f.Leaves+f.leafOf(s, sub)]
				add(Cable{Plane: p, Sub: sub, Speed: f.Speed,
					Down: End{Node: server, Device: f.Device(p, sub)},
					Up:   End{Node: leaf, Device: fmt.Sprintf("s%d.%d", s+1, sub)}}, s*f.SubPorts+sub)
			}
		}
	}
	for _, leaf := range f.Leaf {
		for i := range f.Spines {
			in := leaf.Index % f.Leaves
			add(Cable{Plane: leaf.Plane, Sub: i, Speed: f.UplinkSpeed,
				Down: End{Node: leaf, Device: fmt.Sprintf("up%d", i)},
				Up:   End{Node: f.Spine[leaf.Plane*f.Spines+i], Device: fmt.Sprintf("down%d", in)}},
				f.Servers*f.SubPorts+in*f.Spines+i)
		}
	}
}

// leafOf is which leaf of a plane a server's sub-port is wired to.
func (f *Fabric) leafOf(server, sub int) int {
	if f.Cabling == Split {
		return sub % f.Leaves
	}
	return server / ceil(f.Servers, f.Leaves)
}

// PlaneName names a plane, and Device a sub-port at every server.
func (f *Fabric) PlaneName(plane int) string   { return "p" + strconv.Itoa(plane) }
func (f *Fabric) Device(plane, sub int) string { return fmt.Sprintf("p%d.%d", plane, sub) }

// Loopback is the address of a server's GPU.
func (f *Fabric) Loopback(server, gpu int) netip.Prefix {
	return netip.PrefixFrom(offset(f.Loopbacks.Addr(), uint32(server*f.GPUs+gpu+1)), 32)
}

// Cable is that of a server's sub-port in a plane.
func (f *Fabric) Cable(plane, server, sub int) *Cable {
	return f.Cables[(plane*f.Servers+server)*f.SubPorts+sub]
}

// At are a node's cables, in the order of their indexes.
func (f *Fabric) At(n *Node) []*Cable { return f.at[n] }

// Nodes are all nodes: servers, leaves, spines.
func (f *Fabric) Nodes() []*Node {
	all := make([]*Node, 0, len(f.Server)+len(f.Leaf)+len(f.Spine))
	return append(append(append(all, f.Server...), f.Leaf...), f.Spine...)
}

// Node finds a node by its name; nil: there is none.
func (f *Fabric) Node(name string) *Node { return f.byName[name] }

// Software is what runs on a node: "fared", "frr" or "bird".
func (f *Fabric) Software(n *Node) string {
	switch n.Kind {
	case KindLeaf:
		return f.Spec.Leaf
	case KindSpine:
		return f.Spec.Spine
	}
	return Fared
}

// Find returns the cables that a name stands for, at least one: of a node ("leaf2", "server1": all of its cables), of a plane
// ("p2"), of a node's plane, sub-port or device ("server1/p2", "server1/p2.0", "leaf0-1/up0", "spine0/down1").
func (f *Fabric) Find(name string) ([]*Cable, error) {
	owner, part, inside := strings.Cut(name, "/")
	var found []*Cable
	if n := f.byName[owner]; n != nil {
		for _, c := range f.at[n] {
			here, _ := c.At(n)
			if !inside || here.Device == part || n.Kind == KindServer && f.PlaneName(c.Plane) == part {
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
			f.names(), f.span("p", 0, f.Planes-1), f.Server[0].Name, f.PlaneName(0), f.Server[0].Name, f.Device(0, 0), f.Leaf[0].Name, f.at[f.Leaf[0]][0].Up.Device)
	}
	return found, nil
}

// names are the nodes' names for an error.
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
