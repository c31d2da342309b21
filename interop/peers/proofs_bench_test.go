package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkProofs measures the processor time a second of fared, without an event, with and without proofs by packets,
// in turn, while all destinations answer its probes and send as many as a fabric does. It reports the packets that the
// server sends, too. Aims: at most 1 ms a second for 64 destinations, 3 ms for 10,000.
func BenchmarkProofs(b *testing.B) {
	for _, n := range []int{8, 64, 1024, 10_000} {
		for _, driver := range []string{"linux", "bpf"} {
			b.Run(fmt.Sprintf("%s-%d", driver, n), func(b *testing.B) { benchmarkProofs(b, driver, n) })
		}
	}
}

func benchmarkProofs(b *testing.B, driver string, n int) {
	with, without := newBed(b, fared{driver: driver}, n, variant{}), newBed(b, fared{driver: driver}, n, variant{silent: true})
	reflector := with.reflect()
	for _, x := range []*bed{with, without} {
		if err := x.settle(); err != nil {
			b.Fatal(err)
		}
	}
	reflector.awaitAll(b, min(n, 64)) // the server finds some destinations a second, by more probes than usual
	idle(10 * time.Second)            // work after the load has ended
	const span = 10 * time.Second
	var on, off []float64
	var probes, answers float64
	for b.Loop() { // one set-up for all
		for _, x := range []*bed{with, without} {
			before, p, a := processorTime(x.pids()), reflector.probes.Load(), reflector.answers.Load()
			idle(span)
			used := milliseconds(processorTime(x.pids())-before) / span.Seconds()
			if x == without {
				off = append(off, used)
				continue
			}
			on = append(on, used)
			probes += float64(reflector.probes.Load() - p)
			answers += float64(reflector.answers.Load() - a)
		}
	}
	if answers == 0 || probes == 0 {
		b.Fatalf("%v probes and %v answers", probes, answers)
	}
	slices.Sort(on)
	slices.Sort(off)
	b.ReportMetric(on[len(on)/2], "with-ms/s")
	b.ReportMetric(off[len(off)/2], "without-ms/s")
	b.ReportMetric(on[len(on)/2]-off[len(off)/2], "proofs-ms/s")
	b.ReportMetric(probes/span.Seconds()/float64(b.N), "probes/s")
	b.ReportMetric(answers/span.Seconds()/float64(b.N), "answers/s")
	b.ReportMetric(0, "ns/op") // the spans
}

// reflector answers probes to all destinations as other servers do, by the device at which each has arrived, and sends
// as many as they do: one server's share. Of the packets it knows what the constants below say.
type reflector struct {
	conn            *net.UDPConn
	due             chan struct{}
	probes, answers atomic.Uint64
	found           atomic.Int64 // destinations that have had a probe
}

// Places in a packet of proofs, and values there.
const (
	proofPort, proofSize         = 4796, 160
	kindAt, nonceAt, heardAt     = 5, 8, 40
	sizeAt, deviceAt, nameSize   = 46, 48, 16
	returnDeviceAt, arrivedAt    = deviceAt + 3*nameSize, deviceAt + 4*nameSize
	probeKind, answerKind, never = 1, 2, 1<<32 - 1
)

// reflect starts a reflector in the namespace of the leaves.
func (b *bed) reflect() *reflector {
	b.t.Helper()
	b.far.Sysctl("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
	b.far.IP("route", "add", "local", "10.128.0.0/10", "dev", "lo")
	hops := []string{"route", "add", loopback.String()}
	index := map[int]int{}
	for p := range planes {
		b.far.Sysctl("net.ipv4.conf." + device(p) + ".rp_filter=0")
		hops = append(hops, "nexthop", "via", serverAddress(p).String(), "dev", device(p))
		index[p] = b.far.Device(device(p)).Index
	}
	b.far.IP(hops...)
	r := &reflector{due: make(chan struct{}, 64)}
	b.far.Must(func() (err error) {
		r.conn, err = net.ListenUDP("udp4", &net.UDPAddr{Port: proofPort})
		return err
	})
	raw, err := r.conn.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1) })
	}
	if err != nil {
		b.t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan struct{}, 2)
	go func() { r.answer(); ended <- struct{}{} }()
	go func() { r.probe(index, b.destinations, stop); ended <- struct{}{} }()
	b.t.Cleanup(func() { close(stop); r.conn.Close(); <-ended; <-ended })
	return r
}

// answer answers probes until the socket is closed, and counts the answers to own ones.
func (r *reflector) answer() {
	buf, oob, found := make([]byte, 1<<16), make([]byte, 256), map[netip.Addr]bool{}
	for {
		n, m, _, from, err := r.conn.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n < proofSize {
			continue
		}
		if buf[kindAt] == answerKind {
			r.answers.Add(1)
			continue
		}
		r.probes.Add(1)
		if to, err := unix.ParseSocketControlMessage(oob[:m]); err == nil && len(to) == 1 && len(to[0].Data) >= unix.SizeofInet4Pktinfo {
			found[netip.AddrFrom4([4]byte(to[0].Data[4:]))] = true
			r.found.Store(int64(len(found)))
		}
		select {
		case r.due <- struct{}{}:
		default:
		}
		buf[kindAt] = answerKind
		copy(buf[returnDeviceAt:], buf[deviceAt:deviceAt+nameSize])
		copy(buf[arrivedAt:], buf[deviceAt:deviceAt+2*nameSize])
		// The control message of arrival has what that of the answer needs: the device, and the own address.
		r.conn.WriteMsgUDPAddrPort(buf[:n], oob[:m], netip.AddrPortFrom(from.Addr(), proofPort))
	}
}

// awaitAll waits until a number of destinations have had a probe.
func (r *reflector) awaitAll(b *testing.B, n int) {
	b.Helper()
	for deadline := time.Now().Add(2 * time.Minute); r.found.Load() < int64(n); idle(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("%d of %d destinations have had a probe", r.found.Load(), n)
		}
	}
}

// probe sends a probe by a random plane for each one that has arrived, at random times: every server sends as many.
func (r *reflector) probe(index map[int]int, destinations int, stop chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-r.due:
		}
		time.Sleep(time.Duration(rand.ExpFloat64() * float64(20*time.Millisecond)))
		p := rand.IntN(planes)
		packet := make([]byte, proofSize)
		copy(packet, "frdP\x01\x01")
		packet[kindAt] = probeKind
		binary.BigEndian.PutUint64(packet[nonceAt:], rand.Uint64())
		binary.BigEndian.PutUint32(packet[heardAt:], never)
		binary.BigEndian.PutUint16(packet[sizeAt:], proofSize)
		for i := range 3 { // device, plane, and the plane of the answer
			copy(packet[deviceAt+i*nameSize:], device(p))
		}
		var from [4]byte
		binary.BigEndian.PutUint32(from[:], firstDestination+uint32(rand.IntN(destinations)))
		control := unix.PktInfo4(&unix.Inet4Pktinfo{Ifindex: int32(index[p]), Spec_dst: from})
		r.conn.WriteMsgUDPAddrPort(packet, control, netip.AddrPortFrom(loopback, proofPort))
	}
}
