package rdmatest

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// FuzzOptions are the guarantees of the fuzzed transport.
type FuzzOptions struct {
	// Checksum: the protocol has its own checksum, so that bytes which the peer did not send change nothing, whatever
	// their source address. Without it such bytes may break a channel; even then operations have to complete exactly
	// once.
	Checksum bool
}

// Fuzz lets a fuzzer drive the model on channels. The fuzzer chooses the operations, the fate of datagrams, the times
// of outages, and forged datagrams. In the end the planes that are up deliver reliably for long enough that all
// operations complete.
//
// A script is a byte of settings followed by actions of two bytes each: the action and its parameter.
func Fuzz(f *testing.F, construct Constructor, o FuzzOptions) {
	for _, seed := range scripts {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if err := play(construct, o, script); err != nil {
			t.Fatal(err)
		}
	})
}

// The actions of a script: the first byte modulo actions. Several actions post, so that most bytes do.
const (
	actSend = iota
	actWrite
	actRead
	actCompareSwap
	actFetchAdd
	actWriteLong
	actReadLong
	actFate   // sets the fate of the next datagrams
	actPlane  // takes a plane down or up
	actWait   // lets time pass
	actAlter  // delivers a previous datagram again, altered
	actForge  // delivers the next bytes of the script as a datagram
	actRefuse // does not admit the next messages at once
	actShares // changes the shares
	actions
)

// maxScript limits the number of actions, so that a run is short.
const maxScript = 600

var scripts = [][]byte{
	{0x00, actWrite, 10, actSend, 20, actRead, 30, actWait, 3, actFetchAdd, 1, actCompareSwap, 2},
	{0x03, actWriteLong, 200, actReadLong, 255, actFate, 0x11, actSend, 9, actFate, 0x21, actWait, 40,
		actPlane, 0, actWrite, 77, actWait, 90, actPlane, 0},
	{0x05, actSend, 1, actRefuse, 3, actSend, 2, actSend, 255, actWait, 20, actPlane, 1,
		actPlane, 2, actWriteLong, 99, actWait, 130, actShares, 1, actPlane, 1},
	{0x02, actWrite, 5, actWait, 1, actAlter, 0, actRead, 7, actAlter, 9, actForge, 40,
		1, 2, 3, 4, 5, 6, 7, 8, actWait, 200, actSend, 3},
	{0x07, actFetchAdd, 0, actFate, 0x31, actFetchAdd, 1, actFate, 0x13, actFetchAdd, 2,
		actWait, 99, actFate, 0x2f, actCompareSwap, 8, actCompareSwap, 9, actWait, 250},
}

// player is the state of a script run.
type player struct {
	*model
	net      *Net
	options  FuzzOptions
	script   []byte
	fates    []Fate
	sent     [16]Datagram // the latest datagrams
	count    int
	refusals int
}

func play(construct Constructor, o FuzzOptions, script []byte) error {
	if len(script) == 0 {
		return nil
	}
	settings := script[0]
	p := &player{options: o, script: script[1:min(len(script), 2*maxScript)]}
	config := Options{Seed: uint64(settings), Channels: 1 + int(settings>>1&1), Ordered: settings&1 != 0, Planes: 3, Window: 24,
		MaxSize: 20 << 10, Settle: time.Second}.withDefaults()
	config.Ops = 0
	net := config.net()
	for i := range net.Planes {
		net.Planes[i].Jitter = 0
	}
	net.Fate, net.Trace = p.fate, p.remember
	bed := Virtual(net, construct).(*virtual)
	m, err := newModel(bed, config)
	if err != nil {
		return err
	}
	defer bed.Close()
	m.left = 0
	p.model, p.net = m, bed.Net
	m.refuse = func() bool {
		p.refusals--
		return p.refusals >= 0
	}
	for len(p.script) >= 2 && m.failure() == nil {
		p.act()
	}
	// Outstanding operations complete on the remaining planes.
	p.fates, p.refusals = nil, 0
	if !slices.Contains(m.down, false) {
		p.setPlane(0, true)
	}
	if !bed.Run(func() bool { return len(m.tasks) == 0 || m.failure() != nil }, m.o.Idle) && !m.lenient {
		return fmt.Errorf("some operations have not completed in %v: %s", m.o.Idle, m.describe())
	}
	for plane := range m.down {
		p.setPlane(plane, true)
	}
	if m.lenient {
		// A forgery may have broken a channel: the only possible end of the run is that the channel gives up.
		bed.Run(func() bool { return !m.work() || m.failure() != nil }, time.Minute)
	} else if err := m.finish(); err != nil {
		return err
	}
	return m.closing()
}

func (p *player) next() int {
	if len(p.script) == 0 {
		return 0
	}
	b := p.script[0]
	p.script = p.script[1:]
	return int(b)
}

// act executes the next action.
func (p *player) act() {
	what, how := p.next()%actions, p.next()
	kinds := [...]rdma.OpKind{rdma.OpSend, rdma.OpWrite, rdma.OpRead, rdma.OpCompareSwap, rdma.OpFetchAdd, rdma.OpWrite, rdma.OpRead}
	switch what {
	case actSend, actWrite, actRead, actCompareSwap, actFetchAdd:
		p.post(how, kinds[what], how*how/16)
	case actWriteLong, actReadLong:
		p.post(how, kinds[what], how*80)
	case actFate:
		f := Fate{Drop: how>>4&1 != 0, Duplicate: how>>5&1 != 0, Late: time.Duration(how>>6) * 30 * time.Microsecond}
		for range 1 + how&15 {
			p.fates = append(p.fates, f)
		}
	case actPlane:
		plane := how % len(p.down)
		p.setPlane(plane, p.down[plane])
	case actWait:
		// From a microsecond to a few seconds.
		p.net.Run(func() bool { return p.failure() != nil }, p.net.Now()+time.Microsecond<<(how/12)+time.Duration(how)*time.Microsecond)
	case actAlter:
		if p.count > 0 {
			d := p.sent[how%min(p.count, len(p.sent))]
			b := append([]byte(nil), d.Payload...)
			for range 1 + how>>6 {
				if at := p.next() + how; len(b) > 0 {
					b[at%len(b)] ^= 1 << (at % 8)
				}
			}
			p.forge(d.From, d.To, d.Plane, b)
		}
	case actForge:
		n := min(how, len(p.script))
		b := p.script[:n]
		p.script = p.script[n:]
		if p.count > 0 {
			d := p.sent[0]
			if how&1 != 0 {
				d.From = netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), d.From.Port())
			}
			p.forge(d.From, d.To, d.Plane, b)
		}
	case actRefuse:
		p.refusals = how % 8
	case actShares:
		p.shares[how%len(p.shares)] = uint32(1 + how/64)
		p.updateHosts(how % len(p.shares))
	}
}

// forge delivers a datagram that no host has sent.
func (p *player) forge(from, to netip.AddrPort, plane int, b []byte) {
	known := from.Addr() == p.hosts[0].address || from.Addr() == p.hosts[1].address
	if known && !p.options.Checksum {
		p.lenient = true
		for _, h := range p.hosts {
			h.forged = true
		}
	}
	p.net.Inject(from, to, plane, b)
}

// post posts on one of the ends if its channel has room.
func (p *player) post(how int, kind rdma.OpKind, n int) {
	ends := p.ends[how&1]
	e := ends[how>>1%len(ends)]
	if e.parked || e.full || len(e.pending) >= p.o.Window {
		return
	}
	if e.next == nil {
		e.next = e.make(kind, min(n, p.o.MaxSize))
	}
	e.post()
	p.settle()
}

func (p *player) setPlane(plane int, up bool) {
	if p.down[plane] == !up {
		return
	}
	p.down[plane] = !up
	p.net.SetPlane(plane, up)
	p.updateHosts(plane)
}

func (p *player) fate(Datagram) (f Fate) {
	if len(p.fates) > 0 {
		f, p.fates = p.fates[0], p.fates[1:]
	}
	return f
}

func (p *player) remember(d Datagram) {
	at := &p.sent[p.count%len(p.sent)]
	b := append(at.Payload[:0], d.Payload...)
	*at = d
	at.Payload = b
	p.count++
}
