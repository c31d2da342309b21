package worker

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

// grace is the time for which the state of a node is kept without a stream.
const grace = 5 * time.Second

// own is the origin of states that nodes report to this worker itself.
const own = ""

// state is the last state of a node. Its messages are immutable once they are in it.
type state struct {
	report *fleetv1.ReportRequest
	view   *locate.View
	origin string    // own, or the address of another worker
	last   time.Time // time of the last message
	ended  time.Time // end of the stream; the zero value while it is open
}

// store has the states of all nodes.
type store struct {
	fabric   *topo.Fabric
	byID     map[string]*topo.Node
	devices  map[*topo.Node]map[string]int // indexes in topo.Fabric.At
	loopback map[netip.Addr]int            // number of the GPU in the fabric
	changed  chan struct{}                 // one slot

	mu        sync.Mutex // guards the fields below
	states    map[*topo.Node]*state
	followers map[*follower]bool
	streams   map[*topo.Node]chan struct{} // wakes the sender of a node's last stream; one slot
	revision  uint64
	strangers []stranger // the last one first
}

// follower is another worker that follows this one's own nodes.
type follower struct {
	dirty     map[*topo.Node]bool
	strangers bool          // some are new
	wake      chan struct{} // one slot
}

func newStore(f *topo.Fabric) *store {
	s := &store{fabric: f, byID: map[string]*topo.Node{}, devices: map[*topo.Node]map[string]int{}, loopback: map[netip.Addr]int{},
		changed: make(chan struct{}, 1), states: map[*topo.Node]*state{}, followers: map[*follower]bool{}, streams: map[*topo.Node]chan struct{}{}}
	for _, n := range f.Nodes() {
		s.byID[n.ID.String()] = n
		s.devices[n] = map[string]int{}
		for i, c := range f.At(n) {
			here, _ := c.At(n)
			s.devices[n][here.Device] = i
		}
	}
	for i := range f.Server {
		for gpu := range f.GPUs {
			s.loopback[f.LoopbacksAt(i, gpu)[0].Addr()] = i*f.GPUs + gpu
		}
	}
	return s
}

// node returns the node of a report.
func (s *store) node(id string) (*topo.Node, error) {
	if n := s.byID[id]; n != nil {
		return n, nil
	}
	return nil, fmt.Errorf("no node of the fabric %s has the BGP identifier %q: compare the worker's fabric file with the node's router_id", s.fabric.Name, id)
}

// set merges a message into a node's state. It returns false if the node has a newer state.
func (s *store) set(n *topo.Node, m *fleetv1.ReportRequest, origin string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.states[n]
	switch {
	case now == nil || m.ConnectionNs > now.report.ConnectionNs:
		now = &state{report: m, view: &locate.View{}, origin: origin}
		s.states[n] = now
	case m.ConnectionNs < now.report.ConnectionNs:
		return false
	case now.origin == own && origin != own || m.Revision < now.report.Revision:
		return true // an echo, or an old revision
	default:
		now.report, now.origin, now.ended = merged(now.report, m), origin, time.Time{}
	}
	now.view, now.last = s.convert(n, m, now.view), time.Now()
	s.touch(n, origin == own)
	return true
}

// merged returns a state with the sections of a message.
func merged(old, m *fleetv1.ReportRequest) *fleetv1.ReportRequest {
	return &fleetv1.ReportRequest{
		RouterId: m.RouterId, ConnectionNs: m.ConnectionNs, Revision: m.Revision,
		Ports: either(m.Ports, old.Ports), Paths: either(m.Paths, old.Paths), Proofs: either(m.Proofs, old.Proofs),
	}
}

func either[T any](a, b *T) *T {
	if a != nil {
		return a
	}
	return b
}

// touch notifies of a change. s.mu is held.
func (s *store) touch(n *topo.Node, ours bool) {
	s.revision++
	waits.Ring(s.changed)
	if !ours {
		return
	}
	if c := s.streams[n]; c != nil {
		waits.Ring(c)
	}
	for f := range s.followers {
		f.dirty[n] = true
		waits.Ring(f.wake)
	}
}

// end notes the end of a stream of a node, unless a later connection has replaced it.
func (s *store) end(n *topo.Node, connection uint64, origin string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.states[n]; now != nil && now.report.ConnectionNs == connection && now.origin == origin && now.ended.IsZero() {
		now.ended = time.Now()
		s.touch(n, origin == own)
	}
}

// endAll notes the end of the stream of another worker.
func (s *store) endAll(origin string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, now := range s.states {
		if now.origin == origin && now.ended.IsZero() {
			now.ended = time.Now()
			s.touch(n, false)
		}
	}
}

// expire removes states whose streams have ended for long. It reports whether there are others like them.
func (s *store) expire() (waiting bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, now := range s.states {
		switch {
		case now.ended.IsZero():
		case time.Since(now.ended) < grace:
			waiting = true
		default:
			delete(s.states, n)
			s.revision++
		}
	}
	return waiting
}

// views returns the views of all nodes, and the revision of the whole.
func (s *store) views() (map[*topo.Node]*locate.View, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[*topo.Node]*locate.View, len(s.states))
	for n, now := range s.states {
		all[n] = now.view
	}
	return all, s.revision
}

// oldest returns the time since the oldest of the nodes' last messages.
func (s *store) oldest(now time.Time) (age time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.states {
		age = max(age, now.Sub(x.last))
	}
	return age
}

// follow adds a follower, to which all own nodes are new.
func (s *store) follow() *follower {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &follower{dirty: map[*topo.Node]bool{}, strangers: true, wake: make(chan struct{}, 1)}
	for n, now := range s.states {
		if now.origin == own {
			f.dirty[n] = true
		}
	}
	s.followers[f] = true
	waits.Ring(f.wake)
	return f
}

func (s *store) unfollow(f *follower) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.followers, f)
}

// chunk is the number of nodes of a message between workers.
const chunk = 64

// drain returns the next changes for a follower; nil without any.
func (s *store) drain(f *follower) *fleetv1.FollowResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(f.dirty) == 0 && !f.strangers {
		return nil
	}
	m := &fleetv1.FollowResponse{}
	for _, x := range s.strangers {
		if f.strangers && x.origin == own {
			m.Refused = append(m.Refused, x.RefusedNode)
		}
	}
	f.strangers = false
	for n := range f.dirty {
		delete(f.dirty, n)
		now := s.states[n]
		switch {
		case now == nil || now.origin != own:
		case now.ended.IsZero():
			m.Nodes = append(m.Nodes, now.report)
		default:
			m.Gone = append(m.Gone, n.ID.String())
		}
		if len(m.Nodes)+len(m.Gone) == chunk {
			break
		}
	}
	return m
}

// open returns the channel that wakes the sender of a node's stream.
func (s *store) open(n *topo.Node) chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams[n] = make(chan struct{}, 1)
	return s.streams[n]
}

func (s *store) close(n *topo.Node, wake chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams[n] == wake {
		delete(s.streams, n)
	}
}

// wakeAll wakes the senders of all streams.
func (s *store) wakeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.streams {
		waits.Ring(c)
	}
}

// revisionOf returns the revision of a node's state.
func (s *store) revisionOf(n *topo.Node) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.states[n]; now != nil {
		return now.report.Revision
	}
	return 0
}

// connection returns the connection of a node's state, 0 without one.
func (s *store) connection(n *topo.Node) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.states[n]; now != nil {
		return now.report.ConnectionNs
	}
	return 0
}

// convert returns a view with the sections of a message. Names that the fabric does not have are left out.
func (s *store) convert(n *topo.Node, m *fleetv1.ReportRequest, old *locate.View) *locate.View {
	v := *old
	if m.Ports != nil {
		v.Ports = s.ports(n, m.Ports)
	}
	if m.Paths != nil {
		v.Paths = s.paths(m.Paths)
	}
	if m.Proofs != nil {
		v.Sent, v.Lost = s.proofs(n, m.Proofs)
	}
	return &v
}

// stateNames are those of fleetv1.Port.
var stateNames = map[string]locate.State{"up": locate.Up, "drained": locate.Drained, "silent": locate.Silent, "dark": locate.Dark}

func (s *store) ports(n *topo.Node, m *fleetv1.Ports) []locate.Port {
	all := make([]locate.Port, len(s.fabric.At(n)))
	for _, p := range m.Ports {
		i, known := s.devices[n][p.Device]
		if !known {
			continue
		}
		all[i] = locate.Port{State: stateNames[p.State], Since: time.Unix(0, int64(p.SinceNs)), Ignored: p.Ignored}
		if to, err := netip.ParsePrefix(p.Example); err == nil && p.Routes <= uint64(s.fabric.GPUs) {
			if gpu, known := s.loopback[to.Addr()]; known {
				all[i].Origin = gpu/s.fabric.GPUs + 1
			}
		}
	}
	return all
}

// group returns the source group of a GPU.
func (s *store) group(gpu int) int {
	return s.fabric.GroupOf(gpu/s.fabric.GPUs, gpu%s.fabric.GPUs).Index
}

// gpu returns the number of the GPU with a loopback.
func (s *store) gpu(address string) (int, bool) {
	a, err := netip.ParseAddr(address)
	if err != nil {
		return 0, false
	}
	gpu, known := s.loopback[a]
	return gpu, known
}

func (s *store) paths(m *fleetv1.Paths) (all []locate.Path) {
	for _, p := range m.Paths {
		from, known := s.gpu(p.Source)
		if !known {
			continue
		}
		learned := make([]fare.Bandwidth, s.fabric.Planes)
		for i, name := range m.Planes {
			if k := s.plane(name); k >= 0 && i < len(p.BandwidthBps) {
				learned[k] = fare.Bandwidth(p.BandwidthBps[i])
			}
		}
		for _, r := range p.Destinations {
			first, known := s.gpu(r.First)
			if !known || r.Count == 0 {
				continue
			}
			last := min(first+int(r.Count), s.fabric.Servers*s.fabric.GPUs) - 1
			all = append(all, locate.Path{From: s.group(from), First: s.group(first), Last: s.group(last), Bandwidth: learned})
		}
	}
	return all
}

// plane returns the index of a plane, -1 if it is unknown.
func (s *store) plane(name string) int {
	for i := range s.fabric.Planes {
		if s.fabric.PlaneName(i) == name {
			return i
		}
	}
	return -1
}

// proofs converts the results of probes. A node counts its probes for all of its source groups together.
func (s *store) proofs(n *topo.Node, m *fleetv1.Proofs) (sent []locate.Sent, lost []locate.Loss) {
	if n.Kind != topo.KindServer {
		return nil, nil
	}
	groups, loopbacks := s.fabric.GroupsAt(n.Index), s.fabric.GPUs*len(s.fabric.LoopbacksAt(n.Index, 0))
	for _, p := range m.Planes {
		for _, g := range groups {
			if k := s.plane(p.Plane); k >= 0 {
				sent = append(sent, locate.Sent{From: g, Plane: k, Peers: int(p.Peers) / loopbacks, Probes: float64(p.Probes) / float64(len(groups))})
			}
		}
	}
	for _, p := range m.Lossy {
		from, known := s.gpu(p.Source)
		to, also := s.gpu(p.Destination)
		if k := s.plane(p.Plane); k >= 0 && known && also && slices.Contains(groups, s.group(from)) && s.group(from) != s.group(to) {
			lost = append(lost, locate.Loss{From: s.group(from), To: s.group(to), Plane: k, Probes: float64(p.Probes), Lost: float64(p.Lost)})
		}
	}
	if len(m.Lossy) >= maxLossy {
		forget(sent, lost)
	}
	return sent, lost
}

// maxLossy is the daemon's limit of the destinations with losses.
const maxLossy = 256

// forget leaves the probes toward the destinations with losses alone, in planes that have some: the
// daemon's list has no room for the others, which may have lost some.
func forget(sent []locate.Sent, lost []locate.Loss) {
	for i := range sent {
		s := &sent[i]
		probes, peers := 0.0, 0
		for _, x := range lost {
			if x.From == s.From && x.Plane == s.Plane {
				probes, peers = probes+x.Probes, peers+1
			}
		}
		if peers > 0 {
			s.Probes, s.Peers = probes, peers
		}
	}
}
