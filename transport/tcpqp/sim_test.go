package tcpqp

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// sim is two endpoints and streams between them in virtual time, like sockets on a network of planes. Streams accept
// and deliver any number of bytes, stop while their plane is down, and fail. An edge chooses the memory to read or
// write in one turn and accesses it in a later one, unless settle comes first: this is the worst case of a socket's
// goroutines.
type sim struct {
	*rdmatest.Net
	rng   *rand.Rand
	death float64 // probability that a stream fails at each transfer
	limit int     // capacity of a stream in bytes
	marks bool    // streams are cut at segments, as with the option
	ends  []*simTransport
	edges []*simEdge
	// deaths counts the random failures of streams.
	deaths int
	fault  error
}

func newSim(seed uint64, death float64, limit int, marks bool) *sim {
	return &sim{
		Net: rdmatest.NewNet(rdmatest.NetConfig{Seed: seed, Planes: make([]rdmatest.Plane, 4)}),
		rng: rand.New(rand.NewPCG(seed, 1)), death: death, limit: limit, marks: marks,
	}
}

var simAddresses = [2]netip.Addr{netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")}

func (s *sim) Open(i int, hooks rdmatest.Hooks) (*rdmatest.Host, error) {
	t := &simTransport{sim: s, index: i}
	s.ends = append(s.ends, t)
	return rdmatest.NewHost(simAddresses[i], t, s.Net.Now, nil, hooks)
}

func (*sim) Lock()   {}
func (*sim) Unlock() {}
func (*sim) Close()  {}

func (s *sim) Planes() int { return 4 }

func (s *sim) Err() error { return errors.Join(s.fault, s.Net.Err()) }

func (s *sim) Run(done func() bool, limit time.Duration) bool {
	return s.Net.Run(done, s.Net.Now()+limit)
}

func (s *sim) SetPlane(plane int, up bool) {
	s.Net.SetPlane(plane, up)
	for _, x := range s.edges {
		x.stir()
	}
}

// soon calls f after up to 20 µs.
func (s *sim) soon(f func()) { s.After(time.Duration(s.rng.IntN(20_000)), f) }

// simTransport is an endpoint on simulated streams.
type simTransport struct {
	sim   *sim
	index int
	host  rdma.Host
	e     *endpoint
	tick  int // number of the latest wakeAt
}

func (t *simTransport) Name() string        { return "tcp" }
func (t *simTransport) Limits() rdma.Limits { return rdma.Limits{MaxOp: maxOp, Ordered: true} }
func (t *simTransport) Flush()              { t.e.flush() }
func (t *simTransport) Stop()               {}

func (t *simTransport) Counters() map[string]uint64 { return t.e.counters() }

func (t *simTransport) Start(h rdma.Host) error {
	t.host, t.e = h, newEndpoint(h, t, rdma.Timing{Stall: 20 * time.Millisecond}, Port)
	return nil
}

func (t *simTransport) Channel(c rdma.ChannelConfig) (rdma.Channel, error) {
	return t.e.channel(c), nil
}

func (t *simTransport) option() bool { return t.sim.marks }

func (t *simTransport) marker(*conn) marker { return simMarker{} }

type simMarker struct{}

func (simMarker) piece() int { return 1000 }

func (t *simTransport) wakeAt(at time.Duration) {
	t.tick++
	mine := t.tick
	t.sim.After(at-t.sim.Now(), func() {
		if mine == t.tick {
			t.host.Do(t.e.tick)
		}
	})
}

func (t *simTransport) cancel(*flow) {}

// dial connects after a delay; on a plane that is down after the plane is up, or never.
func (t *simTransport) dial(f *flow) {
	s := t.sim
	plane := int(f.key.port) % s.Planes()
	s.soon(func() {
		if !s.Up(plane) || s.rng.Float64() < s.death {
			s.After(time.Duration(s.rng.IntN(int(10*time.Millisecond))), func() { t.host.Do(func() { f.dialed(nil) }) })
			return
		}
		peer := s.ends[1-t.index]
		a, b := &simEdge{sim: s, t: t, plane: plane}, &simEdge{sim: s, t: peer, plane: plane}
		a.peer, b.peer = b, a
		s.edges = append(s.edges, a, b)
		t.host.Do(func() {
			if a.k = f.dialed(a); a.k == nil {
				a.closed = true
			}
		})
		s.soon(func() {
			peer.host.Do(func() {
				if b.k = peer.e.accept(b); b.k == nil {
					b.closed = true
				}
			})
			if a.closed {
				b.reset()
			}
			b.stir()
		})
		a.stir()
	})
}

// simEdge is one end of a stream.
type simEdge struct {
	sim    *sim
	t      *simTransport
	plane  int
	k      *conn
	peer   *simEdge
	closed bool
	coming []byte // sent by the peer, not read yet

	reading, writing bool // a turn is scheduled
	a, b             []byte
	out              *batch
	took, gave       int // by the current turn
}

func (x *simEdge) stir() {
	if x.closed || x.k == nil || !x.sim.Up(x.plane) {
		return
	}
	if !x.reading && len(x.coming) > 0 {
		x.reading = true
		x.sim.soon(x.read)
	}
	if !x.writing {
		x.writing = true
		x.sim.soon(x.write)
	}
}

func (x *simEdge) kick() { x.stir() }

// close is a reset: all or some of the data in flight is lost.
func (x *simEdge) close() {
	if x.closed {
		return
	}
	x.closed, x.a, x.b, x.out = true, nil, nil, nil
	x.peer.coming = x.peer.coming[:x.sim.rng.IntN(len(x.peer.coming)+1)]
	x.sim.After(time.Duration(x.sim.rng.IntN(int(time.Millisecond))), x.peer.reset)
}

var errReset = errors.New("reset")

func (x *simEdge) reset() {
	if !x.closed && x.k != nil {
		x.t.host.Do(func() { x.k.fail(errReset) })
	}
}

// die fails the stream at random.
func (x *simEdge) die() bool {
	if x.sim.rng.Float64() >= x.sim.death {
		return false
	}
	x.sim.deaths++
	x.reset()
	return true
}

// settle performs the chosen transfers that have not been done.
func (x *simEdge) settle() {
	x.take()
	x.give()
}

// read chooses the destination of a read.
func (x *simEdge) read() {
	if x.closed {
		return
	}
	x.t.host.Do(func() {
		if x.k.dead == nil {
			x.a, x.b = x.k.want()
		}
	})
	x.sim.soon(func() {
		n := x.take()
		if x.closed {
			return
		}
		x.t.host.Do(func() {
			if x.k.dead == nil {
				x.k.got(n)
			}
		})
		x.reading = false
		if !x.die() {
			x.stir()
			x.peer.stir()
		}
	})
}

// take reads a part of the available data, once.
func (x *simEdge) take() (n int) {
	if x.b == nil {
		return x.took
	}
	upTo := 1 + x.sim.rng.IntN(max(1, len(x.coming)))
	n = copy(x.a, x.coming[:min(upTo, len(x.coming))])
	n += copy(x.b, x.coming[n:max(n, min(upTo, len(x.coming)))])
	x.coming = x.coming[n:]
	x.a, x.b = nil, nil
	x.took = n
	return n
}

// write chooses the data of a write.
func (x *simEdge) write() {
	if x.closed {
		return
	}
	x.t.host.Do(func() {
		if x.out = x.k.fill(); x.out == nil {
			x.writing = false
		} else {
			x.gave = 0
		}
	})
	if !x.writing {
		return
	}
	x.sim.soon(func() {
		x.give()
		if x.closed {
			return
		}
		full := x.gave == 0
		x.t.host.Do(func() {
			if x.k.dead == nil {
				x.k.wrote(x.gave)
			}
		})
		x.writing = false
		if x.peer.stir(); !full && !x.die() {
			x.stir()
		}
	})
}

// give writes a part of the batch, as much as the stream accepts, once.
func (x *simEdge) give() {
	if x.out == nil {
		return
	}
	n := min(1+x.sim.rng.IntN(x.out.size), x.sim.limit-len(x.peer.coming))
	for _, piece := range x.out.pieces {
		for _, p := range piece.bufs {
			k := min(len(p), n)
			x.peer.coming = append(x.peer.coming, p[:k]...)
			x.gave += k
			n -= k
		}
		if x.out.apart && piece.size > 1000 {
			x.sim.fault = errors.New("a piece is longer than a segment")
		}
	}
	x.out = nil
}
