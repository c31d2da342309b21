package topo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// Simulation is a fabric in which every server has its real fare.Table and wecmp.Engine, every leaf and spine with fared its
// real fare.Table in the role leaf, and BGP between them is an exchange of messages in rounds until nobody has anything to say.
// What FRR and BIRD pass on is modelled (see said). It is deterministic, and for one goroutine.
//
// # Servers alike
//
// Servers that are wired to the same leaves and whose own cables are in the same state can be swapped without anybody else
// noticing. So of such a class two are simulated, the second one to be what the first one sees of its own kind; the others
// count by multiplication. GPUs of one server share its fate, and one loopback stands for all. A change that treats members of
// a class differently makes classes of its own for them first. Nothing is approximated by that, and time and memory depend on
// leaves, spines and failures, and hardly on servers.
type Simulation struct {
	fabric *Fabric
	full   bool // every server is a class of its own: the dumb twin in tests
	failed []string
	state  []cableState // by Cable.Index
	net    *network
}

// cableState is what failures and drains make of a cable.
type cableState uint8

const (
	dark    cableState = 1 << iota // no light at both ends, and so no session
	drained                        // its server's operator has taken it out of service
)

// drainPrefix before a name drains instead of failing.
const drainPrefix = "drain:"

// Simulate brings a fabric up without failures.
func Simulate(f *Fabric) *Simulation { return simulate(f, false) }

func simulate(f *Fabric, full bool) *Simulation {
	s := &Simulation{fabric: f, full: full, state: make([]cableState, len(f.Cables))}
	s.net = newNetwork(f, s.classes(s.state), s.state)
	return s
}

// Fabric is what is simulated.
func (s *Simulation) Fabric() *Fabric { return s.fabric }

// Failed are the names that are failed or drained now, in the order in which they were.
func (s *Simulation) Failed() []string { return slices.Clone(s.failed) }

// Fail takes the light from all cables of the names (see [Fabric.Find]), at both ends and all at once, and returns what the
// fabric did about it. "drain:NAME" drains instead: servers set their shares on the cables of NAME to zero, then say bandwidth
// zero, then withdraw. A cable is dark as long as any name that it belongs to is failed, and drained likewise. A name that is
// failed already changes nothing. An error means that nothing was done.
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

// Heal undoes Fail for the names, which have to be failed. Without names it undoes everything.
func (s *Simulation) Heal(names ...string) (Cost, error) {
	failed := slices.Clone(s.failed)
	if len(names) == 0 {
		failed = nil
	}
	for _, name := range names {
		i := slices.Index(failed, name)
		if i < 0 {
			return Cost{}, fmt.Errorf("%q is not failed: heal what is, [%s]", name, strings.Join(s.failed, " "))
		}
		failed = slices.Delete(failed, i, i+1)
	}
	return s.change(failed), nil
}

// cables are those that a name of Fail is about, and what becomes of them.
func (s *Simulation) cables(name string) ([]*Cable, cableState, error) {
	rest, drain := strings.CutPrefix(name, drainPrefix)
	found, err := s.fabric.Find(rest)
	if err != nil || !drain {
		return found, dark, err
	}
	found = slices.DeleteFunc(slices.Clone(found), (*Cable).Uplink)
	if len(found) == 0 {
		return nil, drained, fmt.Errorf("%q: %w: servers drain their sub-ports, and none has one there", name, errNotFound)
	}
	return found, drained, nil
}

// change moves the fabric from the present failures to others.
func (s *Simulation) change(failed []string) Cost {
	after := make([]cableState, len(s.state))
	for _, name := range failed {
		found, state, _ := s.cables(name) // Fail has looked it up
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

// classes numbers classes of servers that are alike, now and after a change: by server, from 0, in the order of first members.
func (s *Simulation) classes(after []cableState) []int {
	of := make([]int, s.fabric.Servers)
	number := map[string]int{}
	var key []byte
	for i, server := range s.fabric.Server {
		key = key[:0]
		for _, c := range s.fabric.At(server) {
			if c.Sub == 0 || s.fabric.Cabling == Split {
				leaf := c.Up.Node.Index
				key = append(key, byte(leaf), byte(leaf>>8))
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

// Weights are the integer weights of the planes from one server to another, in lowest terms, as the daemon's WeightService
// gives them; all zero where nothing is reachable. Servers are counted from 0; from a server to itself there are none (nil).
func (s *Simulation) Weights(src, dst int) []uint32 {
	weights, _ := s.net.weights(src, dst)
	return weights
}

// SubPortWeights are, by plane, the weights of the sub-ports there, in lowest terms within each plane.
func (s *Simulation) SubPortWeights(src, dst int) [][]uint32 {
	_, weights := s.net.weights(src, dst)
	return weights
}

// PairWeights is a vector of weights over the planes, and how many pairs of servers have it.
type PairWeights struct {
	Weights []uint32 `json:"weights"`
	Pairs   int      `json:"pairs"`
}

// Summary is every distinct vector of weights over the planes; the one of most pairs first, of equally many the greater one.
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

// Single are the names of all single failures: every sub-port, port, server, uplink, leaf, spine and plane. What is the same
// cables as a name before it is left out: the port of a plane where it has one sub-port, a leaf that is all of its plane.
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
	for _, server := range f.Server {
		for p := range f.Planes {
			add(server.Name + "/" + f.PlaneName(p))
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

// speedOf is what a cable carries in each direction now: nothing when it is dark or drained.
func (s *Simulation) speedOf(c *Cable) fare.Bandwidth {
	if s.state[c.Index] != 0 {
		return 0
	}
	return c.Speed
}
