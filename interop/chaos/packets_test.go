package chaos

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
)

const (
	rocePort   = 4791
	magic      = 0xc4a05
	mostFlows  = 2048 // random flows of a pair in a burst
	leastFlows = 512
	perSlot    = 4   // packets of each slot in a burst
	perSpray   = 256 // packets of each sprayed slot
	socketBuf  = 64 << 20
)

// Kinds of packets.
const (
	anyFlow  = iota // from a random source port
	slotFlow        // from a slot's source port
)

// flows returns the number of random flows of a pair in a burst, which falls with the number of pairs.
func (d *design) flows() int { return max(leastFlows, min(mostFlows, 6*mostFlows/len(d.pairs()))) }

// anySub is the sub-port of a sprayed slot.
const anySub = 255

// probe is the content of a packet.
type probe struct {
	Magic, Round   uint32
	Src, Dst, Kind uint8
	Plane, Sub     uint8 // slotFlow: expected cable of the slot's packets; Sub may be anySub
	_              [3]byte
}

const probeSize = 16

func (p *probe) encode() []byte {
	b, _ := binary.Append(nil, binary.BigEndian, p)
	return b
}

// counter counts packets of the present round at the leaves' ends of the servers' cables, and at their destination
// servers.
type counter struct {
	f       *fabric
	done    chan struct{}
	wait    sync.WaitGroup
	sockets []*socket

	mu        sync.Mutex // guards the fields below
	round     uint32
	left      [ends][ends]tally // of random flows, by source and destination
	slots     [ends][ends]tally // of slots, on the right cable
	stray     []string          // of slots, on a wrong one
	delivered [ends][ends]int
}

func newCounter(f *fabric) *counter {
	c := &counter{f: f, done: make(chan struct{})}
	for p := range planes {
		for i, has := range f.d.family {
			if has {
				c.watchLeaf(p, families[i])
			}
		}
	}
	for _, end := range f.d.loopbacks() {
		c.watchEnd(end)
	}
	f.t.Cleanup(func() {
		close(c.done)
		c.wait.Wait()
	})
	return c
}

// listen opens a socket in a node's namespace and passes its packets to handle until the end.
func (c *counter) listen(n *node, open func() (int, error), handle func(buf []byte, from unix.Sockaddr)) {
	c.f.t.Helper()
	var fd int
	if err := n.ns.Do(func() (err error) {
		fd, err = open()
		return errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBuf))
	}); err != nil {
		c.f.t.Fatalf("%s: %v", n.Name, err)
	}
	k := &socket{fd: fd}
	c.sockets = append(c.sockets, k)
	c.wait.Go(func() {
		defer unix.Close(fd)
		buf := make([]byte, 256)
		wait := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			select {
			case <-c.done:
				return
			default:
			}
			if n, err := unix.Poll(wait, 200); err != nil || n == 0 {
				continue
			}
			k.drain(buf, handle)
		}
	})
}

// socket receives packets that are counted.
type socket struct {
	fd int
	mu sync.Mutex // held from the receipt of a packet until it is counted
}

// drain passes the packets that have arrived to handle.
func (k *socket) drain(buf []byte, handle func(buf []byte, from unix.Sockaddr)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		size, from, err := unix.Recvfrom(k.fd, buf, unix.MSG_DONTWAIT)
		if err != nil {
			return
		}
		handle(buf[:size], from)
	}
}

// unread reports whether packets wait in the socket because this process has not had the processor.
func (k *socket) unread() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	n, err := unix.IoctlGetInt(k.fd, unix.SIOCINQ)
	return err != nil || n > 0
}

// watchLeaf counts the packets that arrive over the servers' cables of a plane, before the leaf forwards them.
func (c *counter) watchLeaf(plane, family int) {
	n := c.f.leaf[plane]
	ports := map[int]cable{} // by interface index
	for g := range c.f.d.owners() {
		for i := range c.f.d.subs(plane, g) {
			at := cable{plane, g, i}
			device := c.f.cable(at).Up.Device
			ports[n.ns.Device(device).Index] = at
		}
	}
	c.listen(n, func() (int, error) { return openTap(family) }, func(packet []byte, from unix.Sockaddr) {
		link, ok := from.(*unix.SockaddrLinklayer)
		header := 40
		if family == 4 {
			header = 4 * int(packet[0]&15)
		}
		if !ok || len(packet) < header+8+probeSize {
			return
		}
		var p probe
		if _, err := binary.Decode(packet[header+8:], binary.BigEndian, &p); err == nil && p.Magic == magic {
			if at, ok := ports[link.Ifindex]; ok {
				c.count(p, at)
			}
		}
	})
}

// openTap opens a packet socket that receives incoming UDP packets to the RoCEv2 port, from the IP header on.
func openTap(family int) (int, error) {
	ethertype := 0x0800
	instructions := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 9, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 1},
		bpf.RetConstant{Val: 0},
		bpf.LoadMemShift{Off: 0},
		bpf.LoadIndirect{Off: 2, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: rocePort, SkipTrue: 1},
		bpf.RetConstant{Val: 0},
		bpf.RetConstant{Val: 256},
	}
	if family == 6 {
		ethertype = 0x86dd
		instructions[0] = bpf.LoadAbsolute{Off: 6, Size: 1} // no extension headers
		instructions[3] = bpf.LoadConstant{Dst: bpf.RegX, Val: 40}
	}
	program, err := bpf.Assemble(instructions)
	if err != nil {
		return -1, err
	}
	filter := make([]unix.SockFilter, len(program))
	for i, x := range program {
		filter[i] = unix.SockFilter{Code: x.Op, Jt: x.Jt, Jf: x.Jf, K: x.K}
	}
	// Protocol 0 receives nothing until the filter is attached and bind sets the protocol.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(ethertype>>8 | ethertype&0xff<<8)}))
}

// count records a packet that arrived over a cable.
func (c *counter) count(p probe, at cable) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.Round != c.round || int(p.Src) >= ends || int(p.Dst) >= ends {
		return
	}
	own := groupOf(int(p.Src)) == at.group
	switch {
	case own && p.Kind == anyFlow:
		c.left[p.Src][p.Dst][at.plane][at.sub]++
	case own && int(p.Plane) == at.plane && (int(p.Sub) == at.sub || p.Sub == anySub):
		c.slots[p.Src][p.Dst][at.plane][at.sub]++
	default:
		c.stray = append(c.stray, fmt.Sprintf("a packet (kind %d, slot of p%d.%d) from %s to %s left by %v", p.Kind, p.Plane, p.Sub, c.f.d.nameOf(int(p.Src)), c.f.d.nameOf(int(p.Dst)), at))
	}
}

// address returns an end's address with a port.
func (f *fabric) address(end, port int) unix.Sockaddr {
	a := f.loopback(end).Addr()
	if a.Is4() {
		return &unix.SockaddrInet4{Port: port, Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: port, Addr: a.As16()}
}

// udp opens a socket at an end's address.
func (f *fabric) udp(end, port int) (int, error) {
	domain := unix.AF_INET
	if familyOf(end) == 6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, unix.Bind(fd, f.address(end, port))
}

// watchEnd counts the packets that arrive at a loopback.
func (c *counter) watchEnd(end int) {
	c.listen(c.f.server[c.f.d.serverOf(end)], func() (int, error) { return c.f.udp(end, rocePort) }, func(packet []byte, _ unix.Sockaddr) {
		var p probe
		if _, err := binary.Decode(packet, binary.BigEndian, &p); err != nil || p.Magic != magic {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if p.Round == c.round {
			c.delivered[p.Src][p.Dst]++
		}
	})
}

// burst is the result of a round's packets.
type burst struct {
	left      [ends][ends]tally
	sent      [ends][ends]int   // random flows and slots
	slotsSent [ends][ends]tally // by the slots' cables; sprayed slots count at the plane's first
	slots     [ends][ends]tally
	delivered [ends][ends]int
	stray     []string
	refused   [ends][ends]error // first error of a send
}

// send sends a burst between all pairs: random flows, and packets of the slots in rows.
func (c *counter) send(shows *rows, firstPort int) *burst {
	c.mu.Lock()
	c.round++
	c.left, c.slots, c.delivered, c.stray = [ends][ends]tally{}, [ends][ends]tally{}, [ends][ends]int{}, nil
	round := c.round
	c.mu.Unlock()
	b := &burst{}
	total := 0
	for _, src := range c.f.d.loopbacks() {
		var to []probe
		for _, pair := range c.f.d.pairs() {
			if pair[0] == src {
				to = append(to, probe{Magic: magic, Round: round, Src: uint8(src), Dst: uint8(pair[1])})
			}
		}
		_ = c.f.server[c.f.d.serverOf(src)].ns.Do(func() error {
			for k := range c.f.d.flows() {
				c.emit(b, firstPort+k, to)
			}
			for _, p := range to {
				p.Kind = slotFlow
				c.emitSlots(b, shows[src][p.Dst], p)
			}
			return nil
		})
		for _, p := range to {
			total += b.sent[src][p.Dst]
		}
	}
	c.collect(b, total)
	return b
}

// emitSlots sends packets of slots with a share and a port that lands: by the hash, or because the driver pins slots.
// Driver linux promises slots of a sub-port their ports down to an eighth of the average weight (docs/dataplane.md);
// ports of smaller ones are not judged.
func (c *counter) emitSlots(b *burst, row *farev1.DestinationWeights, p probe) {
	if row == nil {
		return
	}
	server := c.f.d.serverOf(int(p.Src))
	weights, _ := shown(row)
	least := 1 / float64(8*c.f.d.cables(groupOf(int(p.Src))))
	for _, pair := range row.Pairs {
		if pair.Source != c.f.loopback(int(p.Src)).String() {
			continue
		}
		for _, slot := range pair.Slots {
			plane, sub := slotCable(slot)
			lands := c.f.d.driver[server] == "bpf" || pair.PortPlacement == "hash" || pair.PortPlacement == "asked"
			if slot.SharePpb == 0 || plane < 0 || !lands || c.f.d.driver[server] != "bpf" && weights[plane][sub] < least {
				continue
			}
			times := perSlot
			if p.Plane, p.Sub = uint8(plane), uint8(sub); sub < 0 {
				times, p.Sub = perSpray, anySub
			}
			for range times {
				c.emit(b, int(slot.SourcePort), []probe{p})
				b.slotsSent[p.Src][p.Dst][plane][max(sub, 0)]++
			}
		}
	}
}

// emit sends probes from a source port in the namespace of the calling thread.
func (c *counter) emit(b *burst, port int, to []probe) {
	src := to[0].Src
	fd, bound := c.f.udp(int(src), port)
	if fd >= 0 {
		defer unix.Close(fd)
	}
	for i := range to {
		p, err := &to[i], bound
		if err == nil {
			err = unix.Sendto(fd, p.encode(), 0, c.f.address(int(p.Dst), rocePort))
		}
		b.sent[src][p.Dst]++
		if err != nil && b.refused[src][p.Dst] == nil {
			b.refused[src][p.Dst] = err
		}
	}
}

// collect waits until every packet has arrived, or none has for a while and all that have arrived are counted.
func (c *counter) collect(b *burst, total int) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	const patience = 300 * time.Millisecond
	last, progress := -1, time.Now()
	for {
		c.mu.Lock()
		now := 0
		for _, pair := range c.f.d.pairs() {
			src, dst := pair[0], pair[1]
			now += c.delivered[src][dst] + c.left[src][dst].sum() + c.slots[src][dst].sum()
		}
		now += len(c.stray)
		b.left, b.slots, b.delivered, b.stray = c.left, c.slots, c.delivered, c.stray
		c.mu.Unlock()
		if now != last {
			last, progress = now, time.Now()
		}
		if now >= 2*total || time.Since(progress) > patience && !slices.ContainsFunc(c.sockets, (*socket).unread) {
			return
		}
		<-tick.C
	}
}

// wrong describes the faults in the packets from one end to another, for their expected shares, or returns "". It
// judges only slots of which packets were sent.
func (b *burst) wrong(d *design, src, dst int, want shares, deliver bool) string {
	slots, slotsSent := &b.slots[src][dst], &b.slotsSent[src][dst]
	t, sent := &b.left[src][dst], b.sent[src][dst]-slotsSent.sum()
	name := d.nameOf(src) + " to " + d.nameOf(dst)
	if err := b.refused[src][dst]; err != nil {
		return fmt.Sprintf("%s: cannot send: %v", name, err)
	}
	if n := t.sum(); n != sent {
		return fmt.Sprintf("%s: %d of %d packets reached no leaf over their cables: %v %v", name, sent-n, sent, *t, b.stray[:min(3, len(b.stray))])
	}
	if text := t.distributed(want); text != "" {
		return fmt.Sprintf("%s: %s", name, text)
	}
	if n, all := slots.sum(), slotsSent.sum(); n != all {
		return fmt.Sprintf("%s: %d of %d packets of slots left by their sub-ports %v", name, n, all, b.stray[:min(3, len(b.stray))])
	}
	if d.spray && d.driver[d.serverOf(src)] == "bpf" {
		if text := slots.distributed(want.sprayed(slotsSent)); text != "" {
			return fmt.Sprintf("%s, slots: %s", name, text)
		}
	}
	if n := b.delivered[src][dst]; deliver && n != b.sent[src][dst] {
		return fmt.Sprintf("%s: %d of %d packets did not arrive", name, b.sent[src][dst]-n, b.sent[src][dst])
	}
	return ""
}

// sprayed returns the shares of packets of sprayed slots, given the number sent in each plane.
func (s shares) sprayed(sent *tally) (of shares) {
	planes := s.inPlanes()
	for p := range s {
		for i := range s[p] {
			if planes[p][0] > 0 {
				of[p][i] = s[p][i] / planes[p][0] * float64(sent[p][0]) / float64(max(sent.sum(), 1))
			}
		}
	}
	return of
}
