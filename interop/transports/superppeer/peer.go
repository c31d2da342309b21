package superppeer

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Config is the configuration of a connection. All fields but the last six are required.
type Config struct {
	Local, Remote  netip.AddrPort
	CID, RemoteCID uint16
	// Key is that of Sends from the remote end, RemoteKey that of Sends to it.
	Key, RemoteKey uint32
	Window         int // pdl_window_size and pdl_receive_win
	Transactions   int // tal_trans_window
	Payload        int // bytes of data in a packet
	Ordered        bool
	// SUNH replaces UDP/IP, if not nil; Local and Remote then give the addresses alone.
	SUNH *SUNH
	// TrafficClass is that of the remote end's UDP packets, without ECN; others are violations.
	TrafficClass byte
	// FirstPSN is the first psn of both ends, for tests of the end of psns.
	FirstPSN uint32
	// Loss and Reorder are the probabilities with which a packet is dropped, or exchanged with the next one, in each
	// direction.
	Loss, Reorder float64
}

// Region is memory that the remote end may access.
type Region struct {
	Address     uint64
	Bytes       []byte
	Read, Write bool
}

// Peer is one end of a connection.
type Peer struct {
	cfg  Config
	link link
	done chan struct{}
	wait sync.WaitGroup

	mu         sync.Mutex
	changed    *sync.Cond
	closed     bool
	rng        *rand.Rand
	heldIn     []byte // reordering: the packet that follows the next one
	heldOut    []byte
	regions    []*Region
	messages   [][]byte
	violations []error
	delivery
	initiator
	target
}

const (
	timeout  = 20 * time.Millisecond // retransmission
	ackDelay = time.Millisecond
	tick     = 500 * time.Microsecond
)

// Open opens the socket and starts the connection.
func Open(cfg Config) (*Peer, error) {
	link, err := openLink(cfg)
	if err != nil {
		return nil, err
	}
	p := &Peer{cfg: cfg, link: link, done: make(chan struct{}), rng: rand.New(rand.NewPCG(1, uint64(cfg.CID)))}
	p.changed = sync.NewCond(&p.mu)
	p.delivery = delivery{next: cfg.FirstPSN, unacked: cfg.FirstPSN, sentAck: cfg.FirstPSN, expected: cfg.FirstPSN, flying: map[uint32]*flight{}, got: map[uint32]bool{}, early: map[uint32]packet{}, remoteWindow: cfg.Window}
	p.initiator = initiator{open: map[uint16]*transaction{}}
	p.target = target{state: map[uint16]*incoming{}}
	p.wait.Go(p.receive)
	p.wait.Go(p.run)
	return p, nil
}

// Register makes memory accessible.
func (p *Peer) Register(r *Region) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.regions = append(p.regions, r)
}

// Memory returns a copy of bytes of a region.
func (p *Peer) Memory(r *Region, from, n int) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]byte(nil), r.Bytes[from:from+n]...)
}

// Messages returns the messages that have arrived.
func (p *Peer) Messages() [][]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([][]byte(nil), p.messages...)
}

// Violations returns what the remote end has sent against the description.
func (p *Peer) Violations() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(p.violations...)
}

func (p *Peer) violation(x *packet, format string, args ...any) {
	if len(p.violations) < 20 {
		p.violations = append(p.violations, fmt.Errorf("psn %d, opcode %d, xid %d, seqno %d: %s", x.psn, x.opcode, x.xid, x.seqno, fmt.Sprintf(format, args...)))
	}
}

// Close closes the socket.
func (p *Peer) Close() {
	p.mu.Lock()
	p.closed = true
	p.changed.Broadcast()
	p.mu.Unlock()
	close(p.done)
	p.link.close()
	p.wait.Wait()
}

// write sends a datagram, unless it is dropped or waits for the next one.
func (p *Peer) writeOut(b []byte) {
	switch {
	case p.rng.Float64() < p.cfg.Loss:
		return
	case p.heldOut == nil && p.rng.Float64() < p.cfg.Reorder:
		p.heldOut = b
		return
	}
	p.link.send(b)
	if held := p.heldOut; held != nil {
		p.heldOut = nil
		p.link.send(held)
	}
}

func (p *Peer) receive() {
	b := make([]byte, 65536)
	for {
		packet, err := p.link.receive(b)
		if err != nil {
			return
		}
		if packet == nil {
			continue
		}
		p.mu.Lock()
		switch datagram := append([]byte(nil), packet...); {
		case p.rng.Float64() < p.cfg.Loss:
		case p.heldIn == nil && p.rng.Float64() < p.cfg.Reorder:
			p.heldIn = datagram
		default:
			p.arrived(datagram)
			p.releaseIn()
		}
		p.pump()
		p.changed.Broadcast()
		p.mu.Unlock()
	}
}

func (p *Peer) releaseIn() {
	if held := p.heldIn; held != nil {
		p.heldIn = nil
		p.arrived(held)
	}
}

// run drives the timers.
func (p *Peer) run() {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-p.done:
			return
		case <-t.C:
		}
		p.mu.Lock()
		p.releaseIn()
		p.timers(time.Now())
		p.pump()
		p.changed.Broadcast()
		p.mu.Unlock()
	}
}
