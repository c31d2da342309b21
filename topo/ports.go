package topo

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/fare"
)

// Values of Spec.GPUPorts: a server's sub-ports serve all of its GPUs, or each GPU owns ports in every plane
// (draft-xu-rtgwg-fare-in-sun-02, Section 1).
const (
	Shared = "shared"
	Own    = "own"
)

// Values of Spec.SharedAS.
const (
	SharedNone    = "none"
	SharedServers = "servers"
)

// Overrides lists exceptions to a Spec's sub_ports and speed, separated by semicolons:
//
//	server2 speed=200G; server3/g1/p2 sub_ports=1 speed=800G; */g5/p0 sub_ports=0
//
// Each names a server ("*": every server), a GPU (from g0) if GPUs own their ports, and a plane; an absent part means
// all. If several match a port, the last one wins, separately for count and speed. The zero value has none.
type Overrides string

// maxOverrides limits the cost of numbering a fabric.
const maxOverrides = 256

// override is one exception. server, gpu and plane are -1 for all; subPorts -1 and speed 0 leave a value unchanged.
type override struct {
	server, gpu, plane int
	subPorts           int
	speed              fare.Bandwidth
}

// String returns the override in the notation of Overrides.
func (o override) String() string {
	text := "*"
	if o.server >= 0 {
		text = "server" + strconv.Itoa(o.server+1)
	}
	if o.gpu >= 0 {
		text += "/" + gpuName(o.gpu)
	}
	if o.plane >= 0 {
		text += "/p" + strconv.Itoa(o.plane)
	}
	if o.subPorts >= 0 {
		text += " sub_ports=" + strconv.Itoa(o.subPorts)
	}
	if o.speed > 0 {
		text += " speed=" + speedText(o.speed)
	}
	return text
}

// parseOverrides parses the text of Overrides.
func parseOverrides(text string) (list []override, err error) {
	for _, item := range strings.Split(text, ";") {
		words := strings.Fields(item)
		if len(words) == 0 {
			continue
		}
		o := override{subPorts: -1}
		if o.server, o.gpu, o.plane, err = parseSelector(words[0]); err != nil {
			return nil, err
		}
		if len(words) == 1 {
			return nil, fmt.Errorf("%s changes nothing", quote(words[0]))
		}
		for _, word := range words[1:] {
			if err := o.set(word); err != nil {
				return nil, err
			}
		}
		list = append(list, o)
	}
	return list, nil
}

// set parses sub_ports=N or speed=SPEED.
func (o *override) set(word string) error {
	key, value, _ := strings.Cut(word, "=")
	switch key {
	case "sub_ports":
		n, err := strconv.ParseUint(value, 10, 16)
		if err != nil {
			return fmt.Errorf("%s is not a number of sub-ports", quote(word))
		}
		o.subPorts = int(n)
	case "speed":
		b, err := fare.ParseBandwidth(value)
		if err != nil || b < minSpeed || b > maxSpeed || strings.Trim(value, "0123456789.") == "" {
			return fmt.Errorf("%s is not a speed from %s to %s with a unit", quote(word), minSpeed, maxSpeed)
		}
		o.speed = b
	default:
		return fmt.Errorf("%s is neither sub_ports=N nor speed=SPEED", quote(word))
	}
	return nil
}

// parseSelector parses SERVER[/GPU][/PLANE]; -1 means all.
func parseSelector(text string) (server, gpu, plane int, err error) {
	number := func(part, prefix string, first int) (int, bool) {
		digits, ok := strings.CutPrefix(part, prefix)
		n, err := strconv.ParseUint(digits, 10, 16)
		return int(n) - first, ok && err == nil && int(n) >= first && digits == strconv.FormatUint(n, 10)
	}
	parts := strings.Split(text, "/")
	server, gpu, plane = -1, -1, -1
	ok := parts[0] == "*"
	if !ok {
		server, ok = number(parts[0], "server", 1)
	}
	rest := parts[1:]
	if ok && len(rest) > 0 && strings.HasPrefix(rest[0], "g") {
		gpu, ok = number(rest[0], "g", 0)
		rest = rest[1:]
	}
	if ok && len(rest) > 0 {
		plane, ok = number(rest[0], "p", 0)
		rest = rest[1:]
	}
	if !ok || len(rest) > 0 {
		return 0, 0, 0, fmt.Errorf("%s does not name ports: write SERVER, SERVER/GPU, SERVER/PLANE or SERVER/GPU/PLANE", quote(text))
	}
	return server, gpu, plane, nil
}

// canonical returns the same overrides in their shortest spelling.
func (o Overrides) canonical() (Overrides, error) {
	list, err := parseOverrides(string(o))
	texts := make([]string, len(list))
	for i := range list {
		texts[i] = list[i].String()
	}
	return Overrides(strings.Join(texts, "; ")), err
}

// gpuName returns the name of a GPU of a server.
func gpuName(gpu int) string { return "g" + strconv.Itoa(gpu) }

// owners returns the number of owners of ports in a server: its GPUs, or 1 for the server itself.
func (s *Spec) owners() int {
	if s.GPUPorts == Own {
		return s.GPUs
	}
	return 1
}

// port returns an owner's port in a plane: its number of sub-ports, and their speed.
func (s *Spec) port(list []override, server, owner, plane int) (subPorts int, speed fare.Bandwidth) {
	subPorts, speed = s.SubPorts, s.Speed
	for _, o := range list {
		if o.server >= 0 && o.server != server || o.gpu >= 0 && o.gpu != owner || o.plane >= 0 && o.plane != plane {
			continue
		}
		if o.subPorts >= 0 {
			subPorts = o.subPorts
		}
		if o.speed > 0 {
			speed = o.speed
		}
	}
	return subPorts, speed
}

// leafOf returns the leaf of a plane, numbered from 0, to which sub-port sub of a port is wired.
func (s *Spec) leafOf(server, sub int) int {
	if s.Cabling == Split {
		return sub % s.Leaves
	}
	return server * s.Leaves / s.Servers
}

// sizes holds the numbers of cables that follow from a Spec.
type sizes struct {
	leaf      []int            // servers' cables, by plane and leaf
	leafSpeed []fare.Bandwidth // sum of their speeds
	server    []int            // cables by server
	port      int              // maximum number of a server's cables in one plane
	plane     int              // number of servers' cables in the fullest plane
	bare      string           // an owner without a port; "" if there is none
}

// sizes counts cables. The Spec's numbers must be in range.
func (s *Spec) sizes() sizes {
	list, _ := parseOverrides(string(s.Overrides)) // Validate rejects an invalid list
	z := sizes{leaf: make([]int, s.Planes*s.Leaves), leafSpeed: make([]fare.Bandwidth, s.Planes*s.Leaves), server: make([]int, s.Servers)}
	planes := make([]int, s.Planes)
	for server := range s.Servers {
		for owner := range s.owners() {
			before := z.server[server]
			for plane := range s.Planes {
				n, speed := s.port(list, server, owner, plane)
				for sub := range n {
					leaf := plane*s.Leaves + s.leafOf(server, sub)
					z.leaf[leaf]++
					z.leafSpeed[leaf] = z.leafSpeed[leaf].Add(speed)
				}
				planes[plane] += n
				z.server[server] += n
			}
			if z.server[server] == before && z.bare == "" {
				z.bare = groupName(s, server, owner)
			}
		}
		for plane := range s.Planes {
			n := 0
			for owner := range s.owners() {
				k, _ := s.port(list, server, owner, plane)
				n += k
			}
			z.port = max(z.port, n)
		}
	}
	z.plane = slices.Max(planes)
	return z
}

// groupName returns the name of a server's source group: the server, or a GPU that owns its ports.
func groupName(s *Spec, server, owner int) string {
	name := "server" + strconv.Itoa(server+1)
	if s.owners() > 1 {
		name += "/" + gpuName(owner)
	}
	return name
}

// validatePorts reports numbers of ports that do not fit.
func (s *Spec) validatePorts(z sizes, bad func(key, remedy, format string, args ...any)) {
	list, _ := parseOverrides(string(s.Overrides))
	if len(list) > maxOverrides {
		bad("overrides", "use * for identical ports", "%d of them, more than %d", len(list), maxOverrides)
	}
	for _, o := range list {
		switch {
		case o.server >= s.Servers || o.plane >= s.Planes || o.gpu >= s.GPUs:
			bad("overrides", "name a server, GPU and plane of the fabric", "%s is not in the fabric", quote(o.String()))
		case o.gpu >= 0 && s.GPUPorts != Own:
			bad("overrides", "leave the GPU out, or use gpu_ports: own", "%s names a GPU, and GPUs share the server's ports", quote(o.String()))
		}
	}
	if z.bare != "" {
		bad("overrides", "give it a sub-port in a plane", "%s would have no port at all", z.bare)
	}
	if i := slices.Index(z.leaf, 0); i >= 0 && len(list) > 0 && (s.Spines == 0 || s.Leaf == Fared) { // fared refuses to be a leaf with uplinks alone
		bad("overrides", "wire a server to it", "%s would have no server", switchName("leaf", i/s.Leaves, i%s.Leaves, s.Leaves))
	}
}

// fullest returns the largest sum of speeds of a leaf's cables to servers.
func (z sizes) fullest() fare.Bandwidth { return slices.MaxFunc(z.leafSpeed, cmp.Compare) }

// Group is a source group: a set of loopbacks that the same sub-ports serve, and that therefore share one table of path
// bandwidth and one set of weights. It is a server, or a GPU that owns its ports.
type Group struct {
	Index     int // index among all groups of the fabric
	Server    *Node
	Name      string // "server2" or "server2/g3"
	GPU, GPUs int    // the first of its GPUs, and their number
	// Planes holds its cables by plane; nil for a plane in which it has no port.
	Planes [][]*Cable
	Cables []*Cable // all of its cables
}

// Groups returns the source groups of all servers, in the order of servers and GPUs; each server has GroupsEach.
func (f *Fabric) Groups() []*Group { return f.groups }

// GroupsEach returns the number of source groups of each server.
func (f *Fabric) GroupsEach() int { return f.owners() }

// GroupOf returns the source group of a server's GPU.
func (f *Fabric) GroupOf(server, gpu int) *Group {
	return f.groups[server*f.owners()+min(gpu, f.owners()-1)]
}

// Group returns the source group with a name, or, by the name of a server, its only or first one; nil if there is none.
func (f *Fabric) Group(name string) *Group {
	server, gpu, plane, err := parseSelector(name)
	if err != nil || plane >= 0 || server < 0 || server >= f.Servers || gpu >= f.GPUs || gpu >= 0 && f.owners() == 1 {
		return nil
	}
	return f.GroupOf(server, max(gpu, 0))
}

// LoopbacksOf returns the addresses of a group's GPUs.
func (f *Fabric) LoopbacksOf(g *Group) (all []netip.Prefix) {
	for i := range g.GPUs {
		all = append(all, f.LoopbacksAt(g.Server.Index, g.GPU+i)...)
	}
	return all
}

// ServerSessions returns the number of BGP sessions of all servers together. The Spec must be valid, with its defaults.
func (s Spec) ServerSessions() (n int) {
	for _, of := range s.sizes().server {
		n += of * s.sessionsEach()
	}
	return n
}
