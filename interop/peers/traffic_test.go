package peers

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/packettap"
)

// roce is the UDP destination port of all flows; firstPort is the source port of the first socket.
const (
	roce      = 4791
	firstPort = 20000
)

// lost is the place of a packet that arrived nowhere.
const lost = -1

// kept is the number of packets whose arrival is kept, a power of two.
const kept = 1 << 20

// flow is a number: of the source port's socket, and of the destination.
type flow struct {
	port        int32
	destination int32
}

// packet is a sent packet.
type packet struct {
	at   moment // before the system call
	flow int32  // number in the list of flows that are sent
}

// traffic sends numbered packets from the server's namespace.
type traffic struct {
	record *packettap.Record
	fds    []int
	next   uint32 // number of the next packet
	batch  batch

	flows   []flow
	from    uint32 // number of the first packet in sent
	sent    []packet
	written atomic.Int64 // packets in sent that are complete
	halt    atomic.Bool
	ended   chan struct{}
}

// batch has the arguments of a system call that sends several packets.
type batch struct {
	headers  [batchSize]header
	vectors  [batchSize]unix.Iovec
	names    [batchSize]unix.RawSockaddrInet4
	payloads [batchSize][payloadSize]byte
}

const (
	batchSize   = 64
	payloadSize = 32
)

// header is struct mmsghdr.
type header struct {
	unix.Msghdr
	sent uint32
	_    uint32
}

// newTraffic opens one socket for each source port, and attaches the record to the leaves' devices.
func newTraffic(b *bed) (*traffic, error) {
	x := &traffic{record: packettap.NewRecord(b.t, kept)}
	for _, i := range cables() {
		x.record.At(b.t, b.far, device(i), roce, i%mostPlanes)
	}
	ports := 64
	if b.destinations == 1 {
		ports = 256
	}
	err := b.server.Do(func() error {
		for i := range ports {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			x.fds = append(x.fds, fd)
			if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: loopback.As4(), Port: firstPort + i}); err != nil {
				return err
			}
		}
		return nil
	})
	for i := range x.batch.headers {
		t := &x.batch
		t.names[i].Family = unix.AF_INET
		binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&t.names[i].Port))[:], roce)
		t.vectors[i] = unix.Iovec{Base: &t.payloads[i][0], Len: payloadSize}
		t.headers[i].Msghdr = unix.Msghdr{Name: (*byte)(unsafe.Pointer(&t.names[i])), Namelen: unix.SizeofSockaddrInet4, Iov: &t.vectors[i], Iovlen: 1}
	}
	return x, err
}

func (x *traffic) close() {
	for _, fd := range x.fds {
		unix.Close(fd)
	}
}

// send sends one packet of each flow, in batches of equal source ports. Packets that the kernel refuses, for the lack
// of a route, are lost.
func (x *traffic) send(flows []flow) {
	for len(flows) > 0 {
		n := 0
		for ; n < len(flows) && n < batchSize && flows[n].port == flows[0].port; n++ {
			binary.BigEndian.PutUint32(x.batch.payloads[n][:], x.next+uint32(n))
			binary.BigEndian.PutUint32(x.batch.names[n].Addr[:], firstDestination+uint32(flows[n].destination))
		}
		for done := 0; done < n; {
			sent, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(x.fds[flows[0].port]), uintptr(unsafe.Pointer(&x.batch.headers[done])), uintptr(n-done), 0, 0, 0)
			if errno != 0 {
				sent = 1
			}
			done += int(sent)
		}
		x.next += uint32(n)
		flows = flows[n:]
	}
}

// place returns where a packet arrived that was sent at some time.
func (x *traffic) place(number uint32, sent moment) int {
	at, place := x.record.Arrival(number)
	if moment(at) < sent {
		return lost
	}
	return place
}

// probe sends one packet of each flow, and returns their places.
func (x *traffic) probe(flows []flow) []int8 {
	places := make([]int8, 0, len(flows))
	for len(flows) > 0 {
		part := flows[:min(len(flows), kept/4)]
		first, began := x.next, now()
		x.send(part)
		time.Sleep(2 * time.Millisecond)
		for i := range part {
			places = append(places, int8(x.place(first+uint32(i), began)))
		}
		flows = flows[len(part):]
	}
	return places
}

// pace is how packets are sent: some at once, in an interval.
type pace struct {
	burst    int
	interval time.Duration
}

// longestTraffic is the longest time from start to stop.
const longestTraffic = 40 * time.Second

// start sends packets of flows in turn until stop.
func (x *traffic) start(flows []flow, p pace) {
	x.flows, x.from = flows, x.next
	x.sent = make([]packet, int(longestTraffic/p.interval)*p.burst)
	x.written.Store(0)
	x.halt.Store(false)
	x.ended = make(chan struct{})
	go func() {
		defer close(x.ended)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) // without it a burst may be 50 µs late
		part := make([]flow, p.burst)
		n, i := 0, 0
		for next := now(); !x.halt.Load() && n+p.burst <= len(x.sent); {
			at := now()
			for k := range part {
				part[k] = flows[i]
				x.sent[n+k] = packet{at, int32(i)}
				i = (i + 1) % len(flows)
			}
			x.send(part)
			n += p.burst
			x.written.Store(int64(n))
			next += moment(p.interval)
			if t := now(); next > t {
				rest := unix.NsecToTimespec(int64(next - t))
				_ = unix.Nanosleep(&rest, nil) // an early return only sends early
			} else {
				next = t
			}
		}
	}()
}

// stop ends start, waits for the last packets, and returns what was sent.
func (x *traffic) stop() []packet {
	x.halt.Store(true)
	<-x.ended
	time.Sleep(2 * time.Millisecond)
	return x.sent[:x.written.Load()]
}

// settled reports whether all packets of the last while, which must be of all flows, arrived at their flows' places.
func (x *traffic) settled(places []int8, while time.Duration) bool {
	n := int(x.written.Load())
	t := now()
	const flying = moment(2 * time.Millisecond)
	for n > 0 && x.sent[n-1].at > t-flying {
		n--
	}
	seen := 0
	for i := n - 1; i >= 0 && (x.sent[i].at > t-flying-moment(while) || seen < len(x.flows)); i-- {
		if x.place(x.from+uint32(i), x.sent[i].at) != int(places[x.sent[i].flow]) {
			return false
		}
		seen++
	}
	return seen >= len(x.flows)
}

// settledAt returns the time from which all packets arrived at their flows' places: that of the first such packet, so
// that it is late by at most the interval between packets.
func (x *traffic) settledAt(sent []packet, began moment, places []int8) moment {
	right := now()
	for i := len(sent) - 1; i >= 0 && sent[i].at >= began && x.place(x.from+uint32(i), sent[i].at) == int(places[sent[i].flow]); i-- {
		right = sent[i].at
	}
	return right
}

// shares checks that the places of flows follow weights, as far as their number tells, and that no packet is lost, or
// with weights of zero every one.
func shares(places []int8, want weights) error {
	var count [mostPlanes]float64
	arrived := 0
	for _, p := range places {
		if p != lost {
			count[p]++
			arrived++
		}
	}
	var sum float64
	for _, w := range want[:planes] {
		sum += float64(w)
	}
	if sum == 0 {
		if arrived > 0 {
			return fmt.Errorf("%d packets arrived, want none", arrived)
		}
		return nil
	}
	if arrived < len(places) {
		return fmt.Errorf("%d of %d packets arrived", arrived, len(places))
	}
	within := 0.02 + 1.3/math.Sqrt(float64(len(places))) // three standard deviations of a quarter
	for p := range planes {
		share, wanted := count[p]/float64(len(places)), float64(want[p])/sum
		if d := share - wanted; wanted == 0 && share > 0 || d > within || d < -within {
			return fmt.Errorf("packets by plane %v, want %v", count, want)
		}
	}
	return nil
}

// every returns all flows to some destinations, of one source port after the other.
func (x *traffic) every(destinations []int) []flow {
	all := make([]flow, 0, len(x.fds)*len(destinations))
	for port := range x.fds {
		for _, d := range destinations {
			all = append(all, flow{int32(port), int32(d)})
		}
	}
	return all
}

// moving returns flows whose places differ: all of one destination, or one of each destination, in a random order that
// is always the same.
func moving(flows []flow, before, after []int8) (all []flow, places []int8) {
	destinations := map[int32]bool{}
	for _, f := range flows {
		destinations[f.destination] = true
	}
	taken := map[int32]bool{}
	for i, f := range flows {
		if before[i] == after[i] || taken[f.destination] {
			continue
		}
		taken[f.destination] = len(destinations) > 1
		all, places = append(all, f), append(places, after[i])
	}
	random := rand.New(rand.NewPCG(1, 2))
	random.Shuffle(len(all), func(i, j int) {
		all[i], all[j] = all[j], all[i]
		places[i], places[j] = places[j], places[i]
	})
	return all, places
}
