package proof

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// The tests run servers in virtual time over a network that drops, delays and diverts.
const (
	simPlanes   = 4
	simSubPorts = 2
)

var begin = time.Unix(1_000_000, 0)

// event is a function that is due.
type event struct {
	at  time.Time
	seq int
	run func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at.Before(e[j].at) || e[i].at.Equal(e[j].at) && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	x := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return x
}

// hop is a packet in the network.
type hop struct {
	from, to       int
	plane, subPort int
	big, answer    bool
	service        int
}

// world is the servers and their network.
type world struct {
	t       *testing.T
	now     time.Time
	queue   events
	seq     int
	r       *rand.Rand
	servers []*server
	// drop decides whether a packet is lost; arrive returns the plane of its arrival; refuse why it is not sent.
	drop   func(hop) bool
	arrive func(hop) int
	refuse func(hop) Fault
	leave  func(hop) int             // sub-port by which a packet leaves
	avoid  func(i int) time.Duration // Config.Avoid of a server
	phase  func() time.Duration
	sent   int
}

// server is a core with its process: inbox is a socket, which is read in order while the process runs, and lazy one
// that is read before a Tick.
type server struct {
	w           *world
	i           int
	core        *Core
	deaf        bool // it has no proofs
	stopped     bool
	inbox, lazy []func()
	late        bool // a Tick is due since the process was stopped
	ticking     bool
	avoids      map[Avoidance]bool
	tickSeq     int
	atOnce      int // probes that it has sent with FlagAtOnce
}

func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 255, byte(i >> 8), byte(i)}) }

func newWorld(t *testing.T, n int, seed uint64) *world { return newWorldOf(t, n, seed, 0) }

func newWorldOf(t *testing.T, n int, seed uint64, avoid time.Duration) *world {
	w := &world{t: t, now: begin, r: rand.New(rand.NewPCG(seed, 1))}
	w.avoid = func(int) time.Duration { return avoid }
	w.drop = func(hop) bool { return false }
	w.arrive = func(h hop) int { return h.plane }
	w.refuse = func(hop) Fault { return None }
	w.leave = func(h hop) int { return h.subPort }
	w.phase = func() time.Duration { return time.Duration(w.r.Int64N(int64(time.Second))) }
	for i := range n {
		w.servers = append(w.servers, w.start(i))
	}
	return w
}

// start runs a new process.
func (w *world) start(i int) *server {
	c := Config{Rate: 24, Services: 1, Direct: true, Avoid: w.avoid(i), Phase: w.phase(), Random: w.r, Nonce: w.r.Uint64}
	for p := range simPlanes {
		c.Planes = append(c.Planes, fmt.Sprintf("p%d", p))
		for s := range simSubPorts {
			c.SubPorts = append(c.SubPorts, SubPort{fmt.Sprintf("p%d.%d", p, s), p})
		}
	}
	s := &server{w: w, i: i, core: New(c), avoids: map[Avoidance]bool{}}
	w.at(w.now, s.tick)
	return s
}

// paths are those of all slots, but those of some planes.
func paths(without ...int) (out []Path) {
	for i := range simPlanes * simSubPorts {
		if !slices.Contains(without, i/simSubPorts) {
			out = append(out, Path{i, i / simSubPorts, i})
		}
	}
	return out
}

// know gives a server its peers.
func (s *server) know(all []Path) {
	var peers []Peer
	for _, o := range s.w.servers {
		if o.i != s.i {
			id := ID{0, address(o.i)}
			paths := slices.DeleteFunc(slices.Clone(all), func(p Path) bool { return s.avoids[Avoidance{id, p.Plane, true}] })
			peers = append(peers, Peer{id, paths})
		}
	}
	s.core.SetPeers(s.w.now, [][]netip.Addr{{address(s.i)}}, peers)
	s.kick()
}

func (w *world) know() {
	all := paths()
	for _, s := range w.servers {
		s.know(all)
	}
}

func (w *world) at(t time.Time, run func()) {
	w.seq++
	heap.Push(&w.queue, event{t, w.seq, run})
}

// run advances the time.
func (w *world) run(d time.Duration) {
	end := w.now.Add(d)
	for len(w.queue) > 0 && !w.queue[0].at.After(end) {
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.run()
	}
	w.now = end
}

func (s *server) kick() {
	if s.core.Pending() && !s.ticking {
		s.tick()
	}
}

func (s *server) tick() {
	if s.stopped {
		s.late = true
		return
	}
	s.tickSeq++
	s.ticking = true
	for _, read := range s.lazy {
		read()
	}
	s.lazy, s.ticking = nil, false
	sends, wake, _ := s.core.Tick(s.w.now)
	if !wake.IsZero() {
		seq := s.tickSeq
		s.w.at(wake, func() {
			if s.tickSeq == seq && s.w.servers[s.i] == s {
				s.tick()
			}
		})
	}
	sends = slices.Clone(sends)
	if changes := s.core.TakeAvoidances(); len(changes) > 0 {
		for _, a := range changes {
			on := Avoidance{a.ID, a.Plane, true}
			if s.avoids[on] == a.On {
				s.w.t.Fatalf("server %d: %+v again", s.i, a)
			}
			s.avoids[on] = a.On
		}
		s.w.at(s.w.now.Add(time.Millisecond), func() { s.know(nil) }) // weights that are not in effect
		s.w.at(s.w.now.Add(time.Duration(1+s.w.r.IntN(100))*time.Millisecond), func() { s.know(paths()) })
	}
	for _, x := range sends {
		s.w.sent++
		if x.AtOnce() {
			s.atOnce++
		}
		h := hop{s.i, int(x.Address.As4()[3]), x.Path.Plane, x.Path.SubPort, x.Big, false, x.Service}
		left := s.w.leave(h)
		fault := s.w.refuse(h)
		device := ""
		if fault == None {
			device = fmt.Sprintf("sub-port %d", left)
		}
		s.core.Left(s.w.now, time.Time{}, x.Nonce, device, left, fault, "refused")
		if fault != None || x.Service > 0 {
			continue
		}
		h.subPort, h.plane = left, left/simSubPorts
		packet := x.Packet
		s.w.carry(h, &packet)
	}
}

// carry brings a packet to its receiver.
func (w *world) carry(h hop, p *Packet) {
	if w.drop(h) {
		return
	}
	plane := w.arrive(h)
	subPort := plane*simSubPorts + w.r.IntN(simSubPorts)
	w.at(w.now.Add(50*time.Microsecond+time.Duration(w.r.Int64N(int64(time.Millisecond)))), func() {
		s := w.servers[h.to]
		arrived := w.now
		s.receive(p.Flags&FlagAtOnce != 0, func() { s.read(h, p, arrived, subPort) })
	})
}

func (s *server) receive(atOnce bool, read func()) {
	switch {
	case s.deaf:
	case !atOnce:
		s.lazy = append(s.lazy, read)
	default:
		s.inbox = append(s.inbox, read)
		s.drain()
	}
}

func (s *server) drain() {
	for !s.stopped && len(s.inbox) > 0 {
		read := s.inbox[0]
		s.inbox = s.inbox[1:]
		read()
	}
}

// read handles a packet.
func (s *server) read(h hop, p *Packet, arrived time.Time, subPort int) {
	from := ID{0, address(h.from)}
	device := fmt.Sprintf("p%d.%d", subPort/simSubPorts, subPort%simSubPorts)
	if p.Kind == Answer {
		s.core.Answered(s.w.now, arrived, from, p, device, subPort)
		s.kick()
		return
	}
	s.core.Received(s.w.now, arrived, from, p)
	a, path, ok := s.core.Reflect(from, p, device, subPort)
	if ok {
		a.Received, a.Answered = arrived.UnixNano(), s.w.now.UnixNano()
		s.w.carry(hop{s.i, h.from, path.Plane, path.SubPort, h.big, true, 0}, &a)
	}
	s.kick()
}

// stop and resume are SIGSTOP and SIGCONT of the process.
func (s *server) stop() { s.stopped = true }

func (s *server) resume(tickFirst bool) {
	s.stopped = false
	if !tickFirst {
		s.drain()
	}
	if s.late {
		s.late = false
		s.tick()
	}
	s.drain()
}

// text returns the findings of a server.
func (s *server) text() string {
	var out []string
	for _, f := range s.core.Findings() {
		where := f.Plane
		if f.Device != "" {
			where = f.Device
		}
		if where == "" {
			where = "all"
		}
		if f.Big {
			where += " big"
		}
		if f.Avoided {
			where += fmt.Sprintf(" avoided toward %d", f.Pairs)
		}
		if f.Service > 0 {
			where += fmt.Sprintf(" service %d", f.Service)
		}
		out = append(out, fmt.Sprintf("%s %s %s", f.Problem, where, f.Direction))
	}
	return strings.Join(out, "; ")
}

// await runs until a server has the findings, and returns the time that it took.
func (w *world) await(s *server, limit time.Duration, want string) time.Duration {
	w.t.Helper()
	start := w.now
	for w.now.Sub(start) < limit {
		w.run(10 * time.Millisecond)
		if w.servers[s.i].text() == want {
			return w.now.Sub(start)
		}
	}
	w.t.Fatalf("after %v server %d has %q, want %q", limit, s.i, w.servers[s.i].text(), want)
	return 0
}

// quiet runs without any finding of any server.
func (w *world) quiet(d time.Duration) {
	w.t.Helper()
	for end := w.now.Add(d); w.now.Before(end); {
		w.run(10 * time.Millisecond)
		for _, s := range w.servers {
			if text := s.text(); text != "" {
				w.t.Fatalf("%v after the begin server %d has %q: %+v", w.now.Sub(begin), s.i, text, s.core.Findings())
			}
		}
	}
}
