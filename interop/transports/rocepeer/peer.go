package rocepeer

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
)

// Config is the configuration of a queue pair.
type Config struct {
	Local, Remote netip.Addr // IPv4
	QPN, PSN      uint32     // own number, and sequence number of the first request
	MTU           int
}

// Region is memory that the remote end may access by a key.
type Region struct {
	Address                 uint64
	Bytes                   []byte
	Read, Write, Atomically bool
}

// Message is a message that has consumed a receive.
type Message struct {
	Data   []byte // nil for a WRITE
	Bytes  int
	Write  bool
	Imm    uint32
	HasImm bool
}

// Peer is one queue pair.
type Peer struct {
	cfg     Config
	raw     int          // the raw socket
	guard   *net.UDPConn // holds UDP port 4791, so that the kernel sends no ICMP errors
	closed  chan struct{}
	loop    sync.WaitGroup
	answers chan Packet // responses for the requester

	mu         sync.Mutex
	filter     func(Packet) bool
	lose       func(Packet) bool
	remoteQPN  uint32
	connected  bool
	regions    map[uint32]*Region
	receives   []int // lengths
	messages   []Message
	notReady   int // number of RNR NAKs that have been sent
	violations []error
	counts     map[byte]int // packets received, by opcode
	marked     int          // received packets whose ECN field is ECT or CE
	mark       bool         // CE in all packets sent
	id         uint16
	sourcePort uint16
	responder
	requester
}

// Open opens a queue pair, in the network namespace of the calling thread. It needs CAP_NET_RAW.
func Open(cfg Config) (*Peer, error) {
	p := &Peer{cfg: cfg, closed: make(chan struct{}), answers: make(chan Packet, 4096), regions: map[uint32]*Region{}, counts: map[byte]int{},
		id: 40000, sourcePort: 50123}
	var err error
	if p.guard, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(cfg.Local, udpPort))); err != nil {
		return nil, err
	}
	p.raw, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, syscall.IPPROTO_UDP)
	if err == nil {
		err = errors.Join(syscall.SetsockoptInt(p.raw, syscall.IPPROTO_IP, syscall.IP_HDRINCL, 1),
			syscall.SetsockoptInt(p.raw, syscall.SOL_SOCKET, syscall.SO_RCVBUFFORCE, 16<<20),
			syscall.SetsockoptTimeval(p.raw, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Usec: 20000}),
			syscall.Bind(p.raw, &syscall.SockaddrInet4{Addr: cfg.Local.As4()}))
	}
	if err != nil {
		p.guard.Close()
		return nil, os.NewSyscallError("raw socket", err)
	}
	p.requester.next = cfg.PSN
	return p, nil
}

// Register makes memory accessible by a key.
func (p *Peer) Register(key uint32, r *Region) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.regions[key] = r
}

// Memory returns a copy of a region's bytes.
func (p *Peer) Memory(key uint32) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return bytes.Clone(p.regions[key].Bytes)
}

// SetFilter drops incoming packets for which f returns false, from now on.
func (p *Peer) SetFilter(f func(Packet) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.filter = f
}

// SetLoss drops outgoing packets for which f returns true, from now on.
func (p *Peer) SetLoss(f func(Packet) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = f
}

// PostReceive posts a receive of n bytes.
func (p *Peer) PostReceive(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.receives = append(p.receives, n)
}

// Messages returns the messages that have arrived.
func (p *Peer) Messages() []Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]Message(nil), p.messages...)
}

// Counts returns the number of received packets by opcode, the number of those that are ECN-capable, and the number of
// RNR NAKs sent.
func (p *Peer) Counts() (byOpcode map[byte]int, capable, notReady int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	byOpcode = map[byte]int{}
	for op, n := range p.counts {
		byOpcode[op] = n
	}
	return byOpcode, p.marked, p.notReady
}

// Mark sets "congestion experienced" in all packets sent from now on.
func (p *Peer) Mark(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mark = on
}

// Violations returns the violations of the specification by the remote end.
func (p *Peer) Violations() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return errors.Join(p.violations...)
}

// Connect sets the remote queue pair and the sequence number of its first request, and starts to respond.
func (p *Peer) Connect(qpn, psn uint32, mtu int) {
	p.remoteQPN, p.expected, p.cfg.MTU, p.connected = qpn, psn, min(mtu, p.cfg.MTU), true
	p.loop.Go(p.run)
}

// Close ends the queue pair. The remote end gets no further answers.
func (p *Peer) Close() {
	close(p.closed)
	p.loop.Wait()
	syscall.Close(p.raw)
	p.guard.Close()
}

func (p *Peer) run() {
	b := make([]byte, 1<<16)
	for {
		select {
		case <-p.closed:
			return
		default:
		}
		n, _, err := syscall.Recvfrom(p.raw, b, 0)
		if err != nil {
			continue // SO_RCVTIMEO
		}
		packet, from, err := unmarshal(b[:n])
		if errors.Is(err, errForeign) || from != p.cfg.Remote {
			continue
		}
		p.mu.Lock()
		p.receive(packet, err)
		p.mu.Unlock()
	}
}

// receive handles a packet. The caller holds mu.
func (p *Peer) receive(packet Packet, err error) {
	if err == nil && packet.QPN != p.cfg.QPN {
		err = fmt.Errorf("queue pair %#x, want %#x", packet.QPN, p.cfg.QPN)
	}
	if err == nil && len(packet.Payload) > p.cfg.MTU {
		err = fmt.Errorf("%d bytes of payload, above the MTU %d", len(packet.Payload), p.cfg.MTU)
	}
	if err != nil {
		p.violations = append(p.violations, err)
		return
	}
	if p.filter != nil && !p.filter(packet) {
		return
	}
	p.counts[packet.Op]++
	if packet.ECN != 0 {
		p.marked++
	}
	switch {
	case packet.Op >= ReadFirst && packet.Op <= AtomicAcknowledge:
		select {
		case p.answers <- packet:
		default:
			p.violations = append(p.violations, errors.New("thousands of responses that no request asked for"))
		}
	case packet.Op == CongestionNotification:
	default:
		p.execute(packet)
	}
}

// transmit sends a packet. The caller holds mu.
func (p *Peer) transmit(packet Packet) {
	packet.QPN, packet.SourcePort, packet.ID = p.remoteQPN, p.sourcePort, p.id
	p.id += 997 // over all values in the end, most of them not those of a socket
	if packet.ECN = 2; p.mark {
		packet.ECN = 3
	}
	if p.lose != nil && p.lose(packet) {
		return
	}
	if err := syscall.Sendto(p.raw, packet.marshal(p.cfg.Local, p.cfg.Remote), 0, &syscall.SockaddrInet4{Addr: p.cfg.Remote.As4()}); err != nil {
		p.violations = append(p.violations, os.NewSyscallError("sendto", err))
	}
}

// SendRaw sends a packet as it is, to the remote queue pair.
func (p *Peer) SendRaw(packet Packet) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.transmit(packet)
}

// answer waits for a response.
func (p *Peer) answer(d time.Duration) (Packet, bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case packet := <-p.answers:
		return packet, true
	case <-timer.C:
		return Packet{}, false
	}
}
