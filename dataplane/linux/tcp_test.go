package linux

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/wecmp"
)

// tcpPort is the destination port of the transfers, and of lastingPorts.
const tcpPort = wecmp.PortRoCE

// transfer is a connection that carries data, until it is stopped, to a destination address of the leaf's namespace.
// The answers of the leaf use a separate path.
type transfer struct {
	t       testing.TB
	conn    *net.TCPConn
	arrived atomic.Int64
	stop    chan struct{}
	wrote   chan error
	read    sync.WaitGroup
}

// destine adds a destination address to the leaf's namespace, and a path back to a source that uses no sub-port.
func (h *host) destine(source, destination netip.Prefix) {
	h.t.Helper()
	netnstest.Cable(h.t, h.Namespace, "back", "172.18.0.0/31 fd00:18::1/64", h.leaf, "back", "172.18.0.1/31 fd00:18::2/64")
	h.leaf.Addr("lo", destination.String())
	via := "172.18.0.0"
	if source.Addr().Is6() {
		via = "fd00:18::1"
	}
	h.leaf.IP("route", "add", source.String(), "via", via)
}

// transfer connects from a port and writes 8 MB/s.
func (h *host) transfer(source netip.Addr, port uint16, destination netip.Addr) *transfer {
	h.t.Helper()
	x := &transfer{t: h.t, stop: make(chan struct{}), wrote: make(chan error, 1)}
	to := net.TCPAddrFromAddrPort(netip.AddrPortFrom(destination, tcpPort))
	var listener *net.TCPListener
	h.leaf.Must(func() (err error) { listener, err = net.ListenTCP("tcp", to); return err })
	defer listener.Close()
	h.Must(func() (err error) {
		if x.conn, err = net.DialTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, port)), to); err != nil {
			return err
		}
		raw, err := x.conn.SyscallConn()
		if err != nil {
			return err
		}
		if cerr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 8<<20)
		}); cerr != nil {
			return cerr
		}
		return err
	})
	peer, err := listener.AcceptTCP()
	if err != nil {
		h.t.Fatal(err)
	}
	x.read.Add(1)
	go func() {
		defer x.read.Done()
		defer peer.Close()
		b := make([]byte, 1<<16)
		for {
			n, err := peer.Read(b)
			x.arrived.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	go func() {
		b := make([]byte, 1<<14)
		for {
			select {
			case <-x.stop:
				x.wrote <- nil
				return
			default:
			}
			if _, err := x.conn.Write(b); err != nil {
				x.wrote <- err
				return
			}
		}
	}()
	return x
}

// more waits until the given number of further bytes has arrived.
func (x *transfer) more(what string, bytes int64) {
	x.t.Helper()
	before := x.arrived.Load()
	netnstest.Eventually(x.t, time.Minute, func() error {
		select {
		case err := <-x.wrote:
			x.t.Fatalf("%s: %v", what, err)
		default:
		}
		if got := x.arrived.Load() - before; got < bytes {
			return fmt.Errorf("%s: %d bytes arrived, want %d", what, got, bytes)
		}
		return nil
	})
}

// end stops the transfer and fails unless it ends without an error.
func (x *transfer) end() {
	x.t.Helper()
	close(x.stop)
	if err := <-x.wrote; err != nil {
		x.t.Error(err)
	}
	if err := x.conn.Close(); err != nil {
		x.t.Error(err)
	}
	x.read.Wait()
}

// received returns the number of bytes received at the leaf's end of each sub-port.
func (h *host) received() (bytes []int) {
	h.t.Helper()
	for i := range h.forwarding.Planes {
		fields := strings.Fields(h.leaf.IP("-s", "-o", "link", "show", fmt.Sprintf("p%d", i)))
		at := 0
		for fields[at] != "RX:" {
			at++
		}
		for ; fields[at] != `\`; at++ { // skip the column names
		}
		n, err := strconv.Atoi(fields[at+1])
		if err != nil {
			h.t.Fatalf("%q: %v", fields, err)
		}
		bytes = append(bytes, n)
	}
	return bytes
}

// TestTCPGoesOn takes the weight or the carrier away from the plane of a connection that carries data, alone or with
// all other planes, with and without new weights from the control plane. The connection must continue on a remaining
// plane immediately, without a reset, and return to its own plane. The route that its socket has cached must not delay
// it.
func TestTCPGoesOn(t *testing.T) {
	gate.Slow(t, gate.Kernel, "TCP connections through failures; driver bpf has the test in the gate")
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	for f, name := range []string{"v4", "v6"} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, 4)
			source, destination0 := mustPrefix(h.forwarding.Loopbacks[f]), mustPrefix([]string{target4(0), target6(0)}[f])
			h.destine(source, destination0)
			h.SetApart()
			h.forwarding.UdpPorts, h.forwarding.TcpPorts = nil, []uint32{tcpPort}
			d, c := h.start()
			s := program(t, c.server)
			s.do(h.group(1, 1, 1, 1, 1), destination(destination0.String(), 1))
			ports := lastingPorts(d.Capabilities().FlowHash, 4, wecmp.ProtocolTCP, source.Addr(), destination0.Addr())
			x := h.transfer(source.Addr(), ports[2][7], destination0.Addr())
			// goesBy fails unless all data that arrives from now on, except for data in flight, arrives through these
			// sub-ports. The transfer may move to other sub-ports while the agent detects a carrier and redistributes.
			goesBy := func(what string, may ...int) {
				t.Helper()
				x.more(what, 128<<10)
				before := h.received()
				x.more(what, 512<<10)
				all := 0
				for i, n := range h.received() {
					all += n - before[i]
					if n-before[i] >= 16<<10 && !slices.Contains(may, i) { // neighbor messages count too
						t.Errorf("%s: %d bytes by %d, want all by %v", what, n-before[i], i, may)
					}
				}
				if all < 512<<10 {
					t.Errorf("%s: %d bytes by any sub-port", what, all)
				}
			}
			carrier := func(i int, up bool) {
				t.Helper()
				// Packets queued for an unreachable next hop would wait longer than the test runs.
				wait := map[bool]int{true: 1000, false: 60_000}[up]
				for _, family := range []string{"ipv4", "ipv6"} {
					set := fmt.Sprintf("net.%s.neigh.p%d.retrans_time_ms=%d", family, i, wait)
					h.Sysctl(set)
				}
				if device := fmt.Sprintf("p%d", i); up {
					h.leaf.Addr(device, fmt.Sprintf("fd01:%d::2/64", i)) // the address was removed with the link
				} else {
					h.leaf.IP("link", "set", device, "down")
				}
			}
			goesBy("start", 2)
			for round := range 3 {
				at := func(what string) string { return fmt.Sprintf("round %d: %s", round, what) }
				s.do(h.group(1, 1, 1, 0, 1))
				goesBy(at("no weight"), 0, 1, 3)
				s.do(h.group(1, 1, 1, 1, 1))
				goesBy(at("weight again"), 2)

				carrier(2, false)
				s.do(h.group(1, 1, 1, 0, 1))
				h.carriers(3)
				goesBy(at("no carrier, other weights"), 0, 1, 3)
				carrier(2, true)
				h.carriers(4)
				s.do(h.group(1, 1, 1, 1, 1))
				goesBy(at("carrier and weight again"), 2)

				carrier(2, false) // and no message from the control plane
				h.carriers(3)
				goesBy(at("no carrier"), 0, 1, 3)
				carrier(2, true)
				h.carriers(4)
				h.balanced(destination0.String(), []uint32{1, 1, 1, 1})
				goesBy(at("carrier again"), 2)

				s.do(subPortOp("p2", false))
				goesBy(at("held down"), 0, 1, 3)
				s.do(subPortOp("p2", true))
				goesBy(at("no longer"), 2)
			}
			for i := range 4 {
				carrier(i, false)
			}
			h.carriers(0)
			h.wants(destination0.String(), map[string]int{"blackhole": testBuckets})
			carrier(1, true)
			h.carriers(1)
			h.balanced(destination0.String(), []uint32{0, 1, 0, 0})
			goesBy("one of none", 1)
			x.end()
		})
	}
}
