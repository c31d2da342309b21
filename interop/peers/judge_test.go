package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// weights are the weights of the planes toward a destination, in any unit: ratios count. Those of places behind the
// last plane have no meaning. Zeros mean that the destination has no route, or drops.
type weights [mostPlanes]uint32

// tolerance is the accepted difference of a plane's share: FRR rounds to per cent, the linux driver to buckets.
const tolerance = 0.012

// match reports whether two vectors have the same shares.
func (w weights) match(want weights) bool {
	var sum, wanted float64
	for p := range planes {
		sum += float64(w[p])
		wanted += float64(want[p])
	}
	if sum == 0 || wanted == 0 {
		return sum == wanted
	}
	for p := range planes {
		if d := float64(w[p])/sum - float64(want[p])/wanted; d > tolerance || d < -tolerance {
			return false
		}
	}
	return true
}

// route is the kernel's route to a destination: weights of its own, or those of a nexthop object.
type route struct {
	nexthop uint32 // 0: own
	own     weights
}

// nexthop is a nexthop object: a device, or a group of objects.
type nexthop struct {
	device  int32
	members map[uint32]uint32 // weight by id; nil unless a group
	refs    int               // routes of destinations other than the first
	matches bool              // has the weights wanted of these
}

// judge follows the routes of a namespace by the kernel's notifications.
type judge struct {
	fd    int
	plane map[int32]int // by interface index
	clock *stamps
	buf   []byte

	routes   []route
	nexthops map[uint32]*nexthop
	first    weights // wanted of the first destination
	rest     weights // wanted of all others
	matching int     // of the others, those with own weights that match; those by nexthop are counted by the nexthop
	all      bool    // all destinations match
	since    moment  // time at which all matched; valid if all
	changes  int     // of the last destination's weights
	last     weights // the last destination's weights
	other    bool    // the second plane has less than the third toward the first destination
	turned   moment  // time of the last change of other
}

// stamps are the times at which the kernel queued the messages of a socket.
type stamps struct {
	times  *ebpf.Map
	memory *ebpf.Memory
	next   uint32 // message to be read next
}

// stampsKept is a power of two, more than the messages that can wait in the socket.
const stampsKept = 1 << 20

// newStamps attaches a filter that passes every message and notes its time.
func newStamps(fd int) (*stamps, error) {
	const mmapable = 1 << 10
	times, err := ebpf.NewMap(&ebpf.MapSpec{Name: "times", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: stampsKept, Flags: mmapable})
	if err != nil {
		return nil, err
	}
	counter, err := ebpf.NewMap(&ebpf.MapSpec{Name: "counter", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		return nil, errors.Join(err, times.Close())
	}
	defer counter.Close()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "stamp", Type: ebpf.SocketFilter, License: "GPL", Instructions: asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, counter.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		// Not atomic: the kernel changes routes and nexthops of a namespace under one lock.
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord), asm.Mov.Reg(asm.R2, asm.R1), asm.Add.Imm(asm.R2, 1), asm.StoreMem(asm.R0, 0, asm.R2, asm.DWord),
		asm.And.Imm(asm.R1, stampsKept-1), asm.StoreMem(asm.RFP, -4, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, times.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Reg(asm.R6, asm.R0), asm.FnKtimeGetNs.Call(), asm.StoreMem(asm.R6, 0, asm.R0, asm.DWord),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"), asm.Return(),
	}})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%+v", err), times.Close())
	}
	defer program.Close() // the socket holds a reference
	memory, err := times.Memory()
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, program.FD())
	}
	if err != nil {
		return nil, errors.Join(err, times.Close())
	}
	return &stamps{times: times, memory: memory}, nil
}

// pop returns the time of the message that is read next.
func (s *stamps) pop() (moment, error) {
	var raw [8]byte
	_, err := s.memory.ReadAt(raw[:], int64(s.next%stampsKept)*8)
	s.next++
	return moment(binary.NativeEndian.Uint64(raw[:])), err
}

// newJudge listens in the namespace of the calling thread. plane maps the interface indexes of the sub-ports.
func newJudge(plane map[int32]int, destinations int) (*judge, error) {
	j := &judge{plane: plane, buf: make([]byte, 64<<10), routes: make([]route, destinations), nexthops: map[uint32]*nexthop{}}
	var err error
	if j.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	const buffer = 512 << 20
	err = unix.SetsockoptInt(j.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
	if err == nil {
		j.clock, err = newStamps(j.fd)
	}
	if err == nil {
		err = unix.Bind(j.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_NEXTHOP-1)})
	}
	if err != nil {
		unix.Close(j.fd)
		return nil, fmt.Errorf("judge: %w", err)
	}
	return j, nil
}

func (j *judge) close() {
	unix.Close(j.fd)
	j.clock.times.Close()
}

// want sets the weights to wait for: of the first destination, and of all others.
func (j *judge) want(first, rest weights) error {
	err := j.drain()
	j.first, j.rest, j.matching = first, rest, 0
	for _, n := range j.nexthops {
		n.refs, n.matches = 0, j.weigh(n).match(rest)
	}
	for i := 1; i < len(j.routes); i++ {
		if r := &j.routes[i]; r.nexthop != 0 {
			j.object(r.nexthop).refs++
		} else if r.own.match(rest) {
			j.matching++
		}
	}
	j.all = false
	j.judge(now())
	return err
}

// object returns a nexthop object, which is empty if it is unknown.
func (j *judge) object(id uint32) *nexthop {
	n := j.nexthops[id]
	if n == nil {
		n = &nexthop{device: -1}
		n.matches = weights{}.match(j.rest)
		j.nexthops[id] = n
	}
	return n
}

// weigh returns the weights of a nexthop object.
func (j *judge) weigh(n *nexthop) (w weights) {
	if n.members == nil {
		if p, ok := j.plane[n.device]; ok {
			w[p] = 1
		}
		return w
	}
	for id, weight := range n.members {
		if m := j.nexthops[id]; m != nil {
			if p, ok := j.plane[m.device]; ok {
				w[p] += weight
			}
		}
	}
	return w
}

// at returns the kernel's weights toward a destination.
func (j *judge) at(i int) weights {
	if r := j.routes[i]; r.nexthop == 0 {
		return r.own
	} else if n := j.nexthops[r.nexthop]; n != nil {
		return j.weigh(n)
	}
	return weights{}
}

// judge updates all after a change at some time.
func (j *judge) judge(at moment) {
	count := j.matching
	for _, n := range j.nexthops {
		if n.matches {
			count += n.refs
		}
	}
	all := count == len(j.routes)-1 && j.at(0).match(j.first)
	if all && !j.all {
		j.since = at
	}
	j.all = all
	if w := j.at(0); w[1] != w[2] && 4*w[1] < 3*w[2] != j.other || w[1] == w[2] && j.other {
		j.other, j.turned = !j.other, at
	}
	if w := j.at(len(j.routes) - 1); w != j.last {
		j.last = w
		j.changes++
	}
}

// drain reads all pending notifications.
func (j *judge) drain() error {
	for {
		n, _, err := unix.Recvfrom(j.fd, j.buf, 0)
		switch {
		case err == unix.EAGAIN:
			return nil
		case err == unix.EINTR:
			continue
		case err != nil:
			return fmt.Errorf("judge: %w", err)
		}
		at, err := j.clock.pop()
		if err != nil {
			return err
		}
		if n >= unix.NLMSG_HDRLEN {
			j.read(binary.NativeEndian.Uint16(j.buf[4:]), j.buf[unix.NLMSG_HDRLEN:n], at)
		}
	}
}

// await waits until all destinations have had the wanted weights for quiet, and returns the time at which they got
// them.
func (j *judge) await(limit, quiet time.Duration) (moment, error) {
	deadline := now() + moment(limit)
	for {
		if err := j.drain(); err != nil {
			return 0, err
		}
		t := now()
		if j.all && t > j.since+moment(quiet) {
			return j.since, nil
		}
		if t > deadline {
			return 0, fmt.Errorf("not within %v: %s", limit, j.state())
		}
		time.Sleep(readInterval)
	}
}

// readInterval is the interval at which the judge reads. The kernel stamps notifications, so that it does not affect a
// figure.
const readInterval = 2 * time.Millisecond

// state describes the difference between the wanted and the actual weights.
func (j *judge) state() string {
	others := 0
	example := ""
	for i := 1; i < len(j.routes); i++ {
		if w := j.at(i); w.match(j.rest) {
			others++
		} else if example == "" {
			example = fmt.Sprintf(", destination %d has %v", i, w)
		}
	}
	return fmt.Sprintf("first destination %v, want %v; %d of %d others have %v%s", j.at(0), j.first, others, len(j.routes)-1, j.rest, example)
}

const (
	routeHeader   = 12 // struct rtmsg
	nexthopHeader = 8  // struct nhmsg
	attrHeader    = 4
	rtaNexthop    = 30 // RTA_NH_ID
)

// attributes calls f for each attribute.
func attributes(b []byte, f func(kind uint16, v []byte)) {
	for len(b) >= attrHeader {
		n := int(binary.NativeEndian.Uint16(b))
		if n < attrHeader || n > len(b) {
			return
		}
		f(binary.NativeEndian.Uint16(b[2:])&^(1<<15|1<<14), b[attrHeader:n])
		b = b[min(len(b), (n+3)&^3):]
	}
}

func (j *judge) read(kind uint16, body []byte, at moment) {
	switch kind {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		j.readRoute(kind == unix.RTM_DELROUTE, body, at)
	case unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		j.readNexthop(kind == unix.RTM_DELNEXTHOP, body, at)
	}
}

func (j *judge) readRoute(gone bool, body []byte, at moment) {
	if len(body) < routeHeader || body[0] != unix.AF_INET || body[1] != 32 {
		return
	}
	var r route
	i := -1
	attributes(body[routeHeader:], func(kind uint16, v []byte) {
		switch {
		case kind == unix.RTA_DST && len(v) == 4:
			i = int(binary.BigEndian.Uint32(v)) - firstDestination
		case kind == rtaNexthop && len(v) == 4:
			r.nexthop = binary.NativeEndian.Uint32(v)
		case kind == unix.RTA_OIF && len(v) == 4:
			if p, ok := j.plane[int32(binary.NativeEndian.Uint32(v))]; ok {
				r.own[p] = 1
			}
		case kind == unix.RTA_MULTIPATH:
			for len(v) >= unix.SizeofRtNexthop {
				n := int(binary.NativeEndian.Uint16(v))
				if n < unix.SizeofRtNexthop || n > len(v) {
					break
				}
				if p, ok := j.plane[int32(binary.NativeEndian.Uint32(v[4:]))]; ok {
					r.own[p] += uint32(v[3]) + 1
				}
				v = v[min(len(v), (n+3)&^3):]
			}
		}
	})
	if i < 0 || i >= len(j.routes) {
		return
	}
	if r.nexthop != 0 {
		r.own = weights{} // the kernel repeats the nexthop's
	}
	old := j.routes[i]
	if gone {
		if old != r {
			return // another route to the destination, which a new one has replaced
		}
		r = route{}
	}
	if i > 0 {
		j.count(old, -1)
		j.count(r, 1)
	}
	j.routes[i] = r
	j.judge(at)
}

// count adds or removes a route of a destination other than the first.
func (j *judge) count(r route, n int) {
	if r.nexthop != 0 {
		j.object(r.nexthop).refs += n
	} else if r.own.match(j.rest) {
		j.matching += n
	}
}

func (j *judge) readNexthop(gone bool, body []byte, at moment) {
	if len(body) < nexthopHeader {
		return
	}
	var id uint32
	got := nexthop{device: -1}
	attributes(body[nexthopHeader:], func(kind uint16, v []byte) {
		switch {
		case kind == unix.NHA_ID && len(v) == 4:
			id = binary.NativeEndian.Uint32(v)
		case kind == unix.NHA_OIF && len(v) == 4:
			got.device = int32(binary.NativeEndian.Uint32(v))
		case kind == unix.NHA_GROUP:
			got.members = map[uint32]uint32{}
			for ; len(v) >= 8; v = v[8:] { // struct nexthop_grp
				got.members[binary.NativeEndian.Uint32(v)] += uint32(v[5])<<8 + uint32(v[4]) + 1
			}
		}
	})
	if id == 0 {
		return
	}
	n := j.object(id)
	n.device, n.members = got.device, got.members
	if gone {
		n.device, n.members = -1, nil
	}
	n.matches = j.weigh(n).match(j.rest)
	j.judge(at)
	if gone && n.refs == 0 && j.routes[0].nexthop != id {
		delete(j.nexthops, id)
	}
}
