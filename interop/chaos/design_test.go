package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// Size of the largest fabric. The numbers of servers and planes are fixed; a design sets the others.
const (
	planes   = 4
	servers  = 3
	mostGPUs = 2                      // GPUs of a server
	groups   = servers * mostGPUs     // owners of ports: GPUs, or servers with one GPU
	subPorts = 3                      // sub-ports of an owner in a plane
	ends     = groups * len(families) // loopbacks
)

// families are the possible address families of loopbacks.
var families = [2]int{4, 6}

// unit is the unit of design.speed.
const unit = 100 * fare.Gigabit

// design is a fabric as the test builds it, and as the judge knows it.
type design struct {
	gpus     int     // GPUs per server, 1 to mostGPUs; several own their ports
	family   [2]bool // address families of the loopbacks, as in families
	driver   [servers]string
	leaf     [planes]string // software, as in topo
	spray    bool           // servers with driver bpf have mode per-packet
	sharedAS bool           // all servers have one AS number
	// speed is each cable's speed, by plane, owner and sub-port, in units; 0 means that there is no cable. Owner g is
	// GPU g%gpus of server g/gpus.
	speed [planes][groups][subPorts]int
}

func (d *design) owners() int { return servers * d.gpus }

// cables returns the number of cables of an owner.
func (d *design) cables(group int) (n int) {
	for p := range d.speed {
		for _, speed := range d.speed[p][group] {
			n += min(speed, 1)
		}
	}
	return n
}

// equal gives every owner the same number of sub-ports of 400G in a plane.
func (d *design) equal(plane, n int) {
	for g := range d.owners() {
		d.speed[plane][g] = [subPorts]int{}
		for i := range n {
			d.speed[plane][g][i] = 4
		}
	}
}

// plain is the fabric from which the others are derived: Y-cables, in plane 2 with a fast and a slow half, leaves of
// fared and FRR.
func plain(gpus int) *design {
	d := &design{gpus: gpus, family: [2]bool{true, false}, driver: [servers]string{"linux", "bpf", "linux"},
		leaf: [planes]string{topo.Fared, topo.FRR, topo.Fared, topo.FRR}}
	for p := range planes {
		d.equal(p, 2)
	}
	for g := range d.owners() {
		d.speed[2][g][1] = 2
	}
	return d
}

// designs are the named fabrics.
var designs = map[string]func() *design{
	"plain":     func() *design { return plain(1) },
	"own-ports": func() *design { return plain(2) },
	"ipv6": func() *design {
		d := plain(1)
		d.family = [2]bool{false, true}
		return d
	},
	// A server has one value of path_bandwidth.advertise. Behind leaves that do not sum it must be "node" if a port has
	// several sub-ports, so either all leaves are BIRD's, or the planes of BIRD have one sub-port for each owner.
	"bird": func() *design {
		d := plain(1)
		d.leaf = [planes]string{topo.BIRD, topo.BIRD, topo.BIRD, topo.BIRD}
		return d
	},
	"spray": func() *design {
		d := plain(1)
		d.spray, d.driver = true, [servers]string{"bpf", "bpf", "linux"}
		return d
	},
	"mixed": func() *design {
		d := plain(2)
		d.family = [2]bool{true, true}
		d.leaf[3] = topo.BIRD
		d.equal(3, 1)
		return d
	},
}

// draw returns a random fabric: owners differ in the number and speed of their sub-ports, and may lack planes.
func draw(r *rand.Rand) *design {
	coin := func() bool { return r.IntN(2) == 0 }
	for {
		d := &design{gpus: 1 + r.IntN(mostGPUs), spray: r.IntN(4) == 0, sharedAS: coin()}
		d.family = [][2]bool{{true, false}, {false, true}, {true, true}}[r.IntN(3)]
		for s := range servers {
			d.driver[s] = []string{"linux", "bpf"}[r.IntN(2)]
		}
		d.driver[r.IntN(servers)] = "bpf"
		all := r.IntN(8) == 0 // all leaves are BIRD's
		for p := range planes {
			d.leaf[p] = []string{topo.Fared, topo.FRR, topo.BIRD}[r.IntN(3)]
			if all {
				d.leaf[p] = topo.BIRD
			}
			for g := range d.owners() {
				n := 1 + r.IntN(subPorts)
				if d.leaf[p] == topo.BIRD && !all {
					n = 1
				}
				if r.IntN(8) == 0 {
					n = 0
				}
				speed := 1 << r.IntN(4)
				for i := range n {
					d.speed[p][g][i] = speed
				}
			}
		}
		if is := allUp(d); d.bird() && !d.homogeneous() && slices.ContainsFunc(d.wide(), func(p int) bool { return d.leaf[p] == topo.BIRD }) || !enough(&is, keptPlanes+1) ||
			validate(d, topo.Fared) != nil { // a leaf without servers
			continue
		}
		return d
	}
}

// bird reports whether a leaf is BIRD's.
func (d *design) bird() bool { return slices.Contains(d.leaf[:], topo.BIRD) }

// homogeneous reports whether all leaves have the same software.
func (d *design) homogeneous() bool {
	return !slices.ContainsFunc(d.leaf[:], func(s string) bool { return s != d.leaf[0] })
}

// wide returns the planes in which an owner has several sub-ports.
func (d *design) wide() (all []int) {
	for p := range planes {
		if slices.ContainsFunc(d.speed[p][:], func(s [subPorts]int) bool { return s[1] > 0 }) {
			all = append(all, p)
		}
	}
	return all
}

// spec returns the design's description for topo, with one software on all leaves. If the sub-ports of a port differ,
// they get the speed of the first.
func (d *design) spec(leaf string) topo.Spec {
	s := topo.Spec{Name: "chaos", Planes: planes, Servers: servers, GPUs: d.gpus, Leaf: leaf}
	if d.gpus > 1 {
		s.GPUPorts = topo.Own
	}
	s.Addresses = map[[2]bool]string{{true, false}: topo.IPv4, {false, true}: topo.IPv6, {true, true}: topo.Dual}[d.family]
	if d.sharedAS {
		s.SharedAS = topo.SharedServers
	}
	var list []string
	for p := range planes {
		for g := range d.owners() {
			name := fmt.Sprintf("server%d", g/d.gpus+1)
			if d.gpus > 1 {
				name += fmt.Sprintf("/g%d", g%d.gpus)
			}
			n := len(d.subs(p, g))
			text := fmt.Sprintf("%s/p%d sub_ports=%d", name, p, n)
			if n > 0 {
				text += fmt.Sprintf(" speed=%v", fare.Bandwidth(d.speed[p][g][0])*unit)
			}
			list = append(list, text)
		}
	}
	s.Overrides = topo.Overrides(strings.Join(list, "; "))
	return s
}

// subs returns the speeds of an owner's sub-ports in a plane.
func (d *design) subs(plane, group int) []int {
	all := d.speed[plane][group][:]
	if n := slices.Index(all, 0); n >= 0 {
		return all[:n]
	}
	return all
}

// sessions returns the number of BGP sessions of a server.
func (d *design) sessions(server int) (n int) {
	for p := range planes {
		for gpu := range d.gpus {
			n += len(d.subs(p, server*d.gpus+gpu))
		}
	}
	if d.family == [2]bool{true, true} {
		n *= 2
	}
	return n
}

// loopbacks returns the ends of the design, by owner and address family.
func (d *design) loopbacks() (all []int) {
	for i, has := range d.family {
		for g := range d.owners() {
			if has {
				all = append(all, i*groups+g)
			}
		}
	}
	return all
}

// groupOf, serverOf and familyOf return the owner, server and family of an end.
func groupOf(end int) int { return end % groups }

func (d *design) serverOf(end int) int { return groupOf(end) / d.gpus }

func familyOf(end int) int { return families[end/groups] }

// nameOf returns the name of an end for messages.
func (d *design) nameOf(end int) string {
	name := fmt.Sprintf("server%d", d.serverOf(end)+1)
	if d.gpus > 1 {
		name += fmt.Sprintf("/g%d", groupOf(end)%d.gpus)
	}
	if familyOf(end) == 6 {
		name += " (IPv6)"
	}
	return name
}

// pairs returns all (source, destination) of one family on different servers.
func (d *design) pairs() (all [][2]int) {
	for _, src := range d.loopbacks() {
		for _, dst := range d.loopbacks() {
			if familyOf(src) == familyOf(dst) && d.serverOf(src) != d.serverOf(dst) {
				all = append(all, [2]int{src, dst})
			}
		}
	}
	return all
}

// String describes the design in one line.
func (d *design) String() string {
	var speeds []string
	for p := range planes {
		var of []string
		for g := range d.owners() {
			of = append(of, strings.Trim(strings.ReplaceAll(fmt.Sprint(d.subs(p, g)), " ", "+"), "[]"))
		}
		speeds = append(speeds, strings.Join(of, ","))
	}
	return fmt.Sprintf("%d GPUs a server, IPv4 %v, IPv6 %v, drivers %v, leaves %v, spray %v, shared AS %v, 100G by plane and owner %s",
		d.gpus, d.family[0], d.family[1], d.driver, d.leaf, d.spray, d.sharedAS, strings.Join(speeds, " "))
}

// validate returns topo's errors for the design.
func validate(d *design, software string) error {
	_, err := topo.New(d.spec(software))
	return err
}
