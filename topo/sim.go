package topo

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// Simulation is a simulated fabric. Every source group of a server has a real fare.Table and wecmp.Engine, and every
// leaf and spine with fared a real fare.Table in the role leaf. BGP between them is an exchange of messages in rounds,
// until no node has a change to announce. The readvertisement of FRR and BIRD is modeled (see said). A Simulation is
// deterministic, and not safe for concurrent use.
//
// # Servers alike
//
// Servers that are wired to the same leaves and whose cables are in the same state can be swapped without an effect on
// any other node. They form a class, of which two servers are simulated: the second one is the first one's peer of the
// same class. The other members count by multiplication. GPUs with the same ports share their state, and one loopback
// represents all of them. A change that affects members of a class differently first splits the class. None of this is
// an approximation. Time and memory depend on leaves, spines and failures, and hardly on servers.
type Simulation struct {
	fabric *Fabric
	full   bool // every server forms a separate class: the reference model in tests
	failed []string
	state  []cableState // by Cable.Index
	net    *network
}

// cableState is the state of a cable under failures and drains.
type cableState uint8

const (
	dark    cableState = 1 << iota // no carrier at both ends, and so no session
	drained                        // the server has drained it
)

// drainPrefix before a name means a drain instead of a failure.
const drainPrefix = "drain:"

// Simulate returns a fabric that is up, without failures.
func Simulate(f *Fabric) *Simulation { return simulate(f, false) }

func simulate(f *Fabric, full bool) *Simulation {
	s := &Simulation{fabric: f, full: full, state: make([]cableState, len(f.Cables))}
	s.net = newNetwork(f, s.classes(s.state), s.state)
	return s
}

// Fail takes all cables of the names (see [Fabric.Find]) down, at both ends and all at once, and returns the cost of
// the reaction. "drain:NAME" drains instead: servers set their shares on the cables of NAME to zero, then advertise
// bandwidth zero, then withdraw. A cable is down as long as any name that selects it is failed; drains work likewise. A
// name that is already failed changes nothing. If Fail returns an error, it has no effect.
func (s *Simulation) Fail(names ...string) (Cost, error) {
	failed := slices.Clone(s.failed)
	for _, name := range names {
		if _, _, err := s.cables(name); err != nil {
			return Cost{}, err
		}
		if !slices.Contains(failed, name) {
			failed = append(failed, name)
		}
	}
	return s.change(failed), nil
}

// Heal reverts Fail for the names, which must be failed. Without names it reverts everything.
func (s *Simulation) Heal(names ...string) (Cost, error) {
	failed := slices.Clone(s.failed)
	if len(names) == 0 {
		failed = nil
	}
	for _, name := range names {
		i := slices.Index(failed, name)
		if i < 0 {
			return Cost{}, fmt.Errorf("%q has not failed: the failures are [%s]", name, strings.Join(s.failed, " "))
		}
		failed = slices.Delete(failed, i, i+1)
	}
	return s.change(failed), nil
}

// cables returns the cables that a name of Fail selects, and their new state.
func (s *Simulation) cables(name string) ([]*Cable, cableState, error) {
	rest, drain := strings.CutPrefix(name, drainPrefix)
	found, err := s.fabric.Find(rest)
	if err != nil || !drain {
		return found, dark, err
	}
	found = slices.DeleteFunc(slices.Clone(found), (*Cable).Uplink)
	if len(found) == 0 {
		return nil, drained, fmt.Errorf("%q: %w: servers drain their sub-ports, and no server has a sub-port there", name, errNotFound)
	}
	return found, drained, nil
}

// change moves the fabric from the present failures to others.
func (s *Simulation) change(failed []string) Cost {
	after := make([]cableState, len(s.state))
	for _, name := range failed {
		found, state, _ := s.cables(name) // Fail has verified the name
		for _, c := range found {
			after[c.Index] |= state
		}
	}
	if classes := s.classes(after); !slices.Equal(classes, s.net.classOf) {
		s.net = newNetwork(s.fabric, classes, s.state)
	}
	cost := s.net.move(after)
	for i, c := range s.fabric.Cables {
		if !c.Uplink() && (s.state[i]^after[i])&dark != 0 {
			cost.SubPorts++
		}
	}
	s.failed, s.state = failed, after
	return cost
}

// classes numbers classes of servers that are alike, both now and after a change: by server, from 0, in the order of
// first members.
func (s *Simulation) classes(after []cableState) []int {
	of := make([]int, s.fabric.Servers)
	number := map[string]int{}
	var key []byte
	for i, server := range s.fabric.Server {
		key = key[:0]
		for _, c := range s.fabric.At(server) {
			if c.Sub == 0 || s.fabric.Cabling == Split {
				leaf := c.Up.Node.Index
				key = append(key, byte(leaf), byte(leaf>>8), byte(c.Group.GPU), byte(len(c.Group.Planes[c.Plane])))
				key = binary.BigEndian.AppendUint64(key, uint64(c.Speed)) // the same for the whole port
			}
			key = append(key, byte(s.state[c.Index]), byte(after[c.Index]))
		}
		if s.full {
			key = append(key, byte(i), byte(i>>8))
		}
		n, known := number[string(key)]
		if !known {
			n = len(number)
			number[string(key)] = n
		}
		of[i] = n
	}
	return of
}

// Weights returns the integer weights of the planes from one source group to another, in lowest terms, like the
// daemon's WeightService. All are zero if the destination is unreachable. Source groups are numbered from 0 (see
// [Fabric.Groups]); they are servers, unless GPUs own their ports. Weights returns nil from a server to itself.
func (s *Simulation) Weights(src, dst int) []uint32 {
	weights, _ := s.net.weights(src, dst)
	return weights
}

// SubPortWeights returns, by plane, the weights of the source group's sub-ports, in lowest terms within each plane.
func (s *Simulation) SubPortWeights(src, dst int) [][]uint32 {
	_, weights := s.net.weights(src, dst)
	return weights
}

// PathBandwidth returns, by plane, the bandwidth that a source group has learned toward another one, 0 without a route.
// It is nil from a server to itself.
func (s *Simulation) PathBandwidth(src, dst int) []fare.Bandwidth {
	if each := s.fabric.owners(); src/each == dst/each {
		return nil
	}
	from, to := s.net.rep(src, dst)
	learned := make([]fare.Bandwidth, s.fabric.Planes)
	if id, ok := from.node.table.Destination(to.prefix); ok {
		view := from.node.table.Group(id)
		for p, i := range from.node.index {
			if i >= 0 {
				learned[p] = view.Planes[i].Bandwidth
			}
		}
	}
	return learned
}

// Kinds yields two source groups for each kind of pair of source groups of different servers that are alike now and
// were alike before the last change, and the number of such pairs.
func (s *Simulation) Kinds(yield func(src, dst, count int)) { s.net.pairs(yield) }

// PairWeights is a vector of weights over the planes, and the number of pairs of source groups that have it.
type PairWeights struct {
	Weights []uint32 `json:"weights"`
	Pairs   int      `json:"pairs"`
}

// Summary returns every distinct vector of weights over the planes, the one with the most pairs first, and of equally
// many the greater one.
func (s *Simulation) Summary() []PairWeights {
	var all []PairWeights
	s.net.pairs(func(src, dst, count int) {
		w := s.Weights(src, dst)
		for i := range all {
			if slices.Equal(all[i].Weights, w) {
				all[i].Pairs += count
				return
			}
		}
		all = append(all, PairWeights{w, count})
	})
	slices.SortFunc(all, func(a, b PairWeights) int {
		if a.Pairs != b.Pairs {
			return b.Pairs - a.Pairs
		}
		return slices.Compare(b.Weights, a.Weights)
	})
	return all
}

// Single returns the names of all single failures: every sub-port, port, GPU that owns ports, server, uplink, leaf,
// spine and plane. A name that selects the same cables as an earlier one is omitted: the port of a plane in which it
// has one sub-port, a leaf that is alone in its plane.
func (f *Fabric) Single() []string {
	var names []string
	seen := map[string]bool{}
	add := func(name string) {
		found, _ := f.Find(name)
		key := make([]byte, 0, 3*len(found))
		for _, c := range found {
			key = append(key, byte(c.Index), byte(c.Index>>8), byte(c.Index>>16))
		}
		if !seen[string(key)] {
			seen[string(key)] = true
			names = append(names, name)
		}
	}
	for _, c := range f.Cables {
		add(c.Down.Node.Name + "/" + c.Down.Device)
	}
	for _, g := range f.groups {
		at := ""
		if f.owners() > 1 {
			at = gpuName(g.GPU)
			add(g.Name)
		}
		for p, cables := range g.Planes {
			if len(cables) > 0 {
				add(g.Server.Name + "/" + at + f.PlaneName(p))
			}
		}
	}
	for _, n := range f.Nodes() {
		add(n.Name)
	}
	for p := range f.Planes {
		add(f.PlaneName(p))
	}
	return names
}

// speedOf returns the present speed of a cable in each direction, 0 if it is down or drained.
func (s *Simulation) speedOf(c *Cable) fare.Bandwidth {
	if s.state[c.Index] != 0 {
		return 0
	}
	return c.Speed
}
