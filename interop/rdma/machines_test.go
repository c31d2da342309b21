package rdma

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
)

// machineKey is set in each of the two virtual machines of TestMachines, to the number of its server.
const machineKey = "FARED_RDMA_MACHINE"

// datagrams selects packets of the transport service UD, by the first three bits of the opcode in the BTH (InfiniBand
// specification 1.4, 9.2.1): those of rdma_cm, and those by which UCX connects its queue pairs. rdma_rxe derives their
// source port from the number of the queue pair, whatever the flow label.
var datagrams = packettap.Filter{Mask: 0xe0, Value: 0x60}

// leaving selects the packets of the transport service RC that leave by a plane.
var leaving = packettap.Filter{Mask: 0xe0, Value: 0, Leaving: true}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// machine is a server that has its virtual machine to itself, so that rdma_cm and UCX take the other one for another
// host. Device eth<i> is at the other machine's eth<i>: one for each plane, and one for the words of the two tests.
type machine struct {
	*server
	datagrams [planes]*packettap.Tap
	leaving   [planes]*packettap.Tap
	words     net.Conn
	lines     *bufio.Scanner
}

func newMachine(t testing.TB, n int) *machine {
	t.Helper()
	m := &machine{server: newServer(t, n)}
	noFilter(t)
	m.attach(t)
	netnstest.IP(t, "route", "add", loopback(3-n).String(), "via", "169.254.1.1", "dev", m.netdev, "onlink", "src", m.loopback.String())
	for p := range planes {
		netnstest.IP(t, "link", "set", fmt.Sprintf("eth%d", p), "netns", m.host.Name, "name", fmt.Sprintf("p%d", p))
		m.host.IP("link", "set", fmt.Sprintf("p%d", p), "up")
		m.join(t, p)
		m.datagrams[p] = packettap.NewFiltered(t, m.host, fmt.Sprintf("p%d", p), roce, packettap.Pass, datagrams)
		m.leaving[p] = packettap.NewFiltered(t, m.host, fmt.Sprintf("p%d", p), roce, packettap.Pass, leaving)
	}
	m.start(t)
	if err := m.weigh(loopback(3-n), []uint32{1, 1, 1, 1}); err != nil {
		t.Fatal(err)
	}

	device := fmt.Sprintf("eth%d", planes)
	netnstest.IP(t, "addr", "add", fmt.Sprintf("192.0.2.%d/24", n), "dev", device)
	netnstest.IP(t, "link", "set", device, "up")
	if n == 2 {
		listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 1})
		if err == nil {
			err = listener.SetDeadline(time.Now().Add(5 * time.Minute))
		}
		if err == nil {
			m.words, err = listener.Accept()
			listener.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	} else {
		netnstest.Eventually(t, 5*time.Minute, func() (err error) {
			m.words, err = net.DialTimeout("tcp", "192.0.2.2:1", time.Second)
			return err
		})
	}
	t.Cleanup(func() { m.words.Close() })
	m.lines = bufio.NewScanner(m.words)
	return m
}

// exchange gives the other machine a line, and returns the one that it gives at the same place of the test.
func (m *machine) exchange(t testing.TB, line string) string {
	t.Helper()
	if err := m.words.SetDeadline(time.Now().Add(10 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintln(m.words, line); err != nil {
		t.Fatal(err)
	}
	if !m.lines.Scan() {
		t.Fatalf("the other machine has ended before %q: %v", line, m.lines.Err())
	}
	return m.lines.Text()
}

// exchangeNumber is exchange for numbers.
func (m *machine) exchangeNumber(t testing.TB, n uint64) uint64 {
	t.Helper()
	line := m.exchange(t, fmt.Sprint(n))
	other, err := strconv.ParseUint(line, 10, 64)
	if err != nil {
		t.Fatalf("the other machine is at %q instead of a number", line)
	}
	return other
}

// meet waits until the other machine is at the same place of the test.
func (m *machine) meet(t testing.TB, place string) {
	t.Helper()
	if line := m.exchange(t, place); line != place {
		t.Fatalf("the other machine is at %q instead of %q", line, place)
	}
}

// arrived returns the packets of connected queue pairs that have arrived so far. All taps count the datagrams, too,
// which are read first, so that they are never more.
func (m *machine) arrived(t testing.TB) counts {
	t.Helper()
	unconnected := read(t, m.datagrams)
	return read(t, m.taps).since(unconnected)
}

// execution is a program that runs on both machines, which machine 2 serves.
type execution struct {
	*machine
	cmd    *exec.Cmd
	output strings.Builder
	ended  chan struct{}
	err    error // after the end
	// The packets before the beginning.
	arrivedBefore, leftBefore, datagramsBefore counts
}

// run starts a program. The other machine does so at the same time.
func (m *machine) run(t testing.TB, interposed bool, words string) *execution {
	t.Helper()
	m.meet(t, "before "+words)
	x := &execution{machine: m, ended: make(chan struct{}), arrivedBefore: m.arrived(t), leftBefore: read(t, m.leaving), datagramsBefore: read(t, m.datagrams)}
	m.meet(t, "begin "+words)
	args := strings.Fields(words)
	if m.n == 1 {
		args = append(args, loopback(2).String())
	}
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "RDMA", m.rdma)
	}
	x.cmd = exec.Command("timeout", append([]string{"200", "env"}, args...)...)
	x.cmd.Stdout, x.cmd.Stderr, x.cmd.Env = &x.output, &x.output, m.environment(interposed)
	if m.n == 1 {
		m.meet(t, "listening")
	}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if m.n == 2 {
		listening(t, x.cmd)
		m.meet(t, "listening")
	}
	go func() {
		defer close(x.ended)
		x.err = x.cmd.Wait()
	}()
	return x
}

// wait waits for the end of the program, which must be a success, on both machines.
func (x *execution) wait(t testing.TB) {
	t.Helper()
	<-x.ended
	if x.err != nil {
		t.Errorf("%v: %v\n%s", x.cmd.Args, x.err, x.output.String())
	}
	x.meet(t, "end of the program")
}

// play runs a program and returns the packets that have arrived here meanwhile: those of connected queue pairs, and
// datagrams.
func (m *machine) play(t testing.TB, interposed bool, words string) (connected, unconnected counts) {
	t.Helper()
	x := m.run(t, interposed, words)
	x.wait(t)
	return m.arrived(t).since(x.arrivedBefore), read(t, m.datagrams).since(x.datagramsBefore)
}

// outage is a plane that is taken out while a program runs, and the packets that had left and arrived when its weight
// was 0 on both machines.
type outage struct {
	plane         int
	queuePairs    int // of this machine, on the plane
	left, arrived counts
}

// takeOut takes out the plane by which most packets arrive at machine 2. With cut, machine 2's end of its cable goes
// down first: to the other machine nothing has happened, and its packets vanish until the weights change. takeOut
// returns when packets have left since.
func (x *execution) takeOut(t testing.TB, cut bool) *outage {
	t.Helper()
	const enough = 100 // packets
	eventually := func(check func() error) {
		t.Helper()
		netnstest.Eventually(t, 3*time.Minute, func() error {
			select {
			case <-x.ended:
				t.Fatalf("%v has ended too early: %v: %v\n%s", x.cmd.Args, check(), x.err, x.output.String())
			default:
			}
			return check()
		})
	}
	o := &outage{}
	if x.n == 2 {
		eventually(func() error {
			var packets [planes]uint64
			for p, byPort := range x.arrived(t).since(x.arrivedBefore) {
				for port, n := range byPort {
					if lands(1, port, p) {
						packets[p] += n
					}
				}
			}
			o.plane = slices.Index(packets[:], slices.Max(packets[:]))
			if packets[o.plane] < enough {
				return fmt.Errorf("packets of queue pairs by plane: %v", packets)
			}
			return nil
		})
	}
	if plane := int(x.exchangeNumber(t, uint64(o.plane))); x.n == 1 {
		o.plane = plane
	}
	device := fmt.Sprintf("p%d", o.plane)
	if cut && x.n == 2 {
		x.host.IP("link", "set", device, "down")
	}
	weights := []uint32{1, 1, 1, 1}
	weights[o.plane] = 0
	if err := x.weigh(loopback(3-x.n), weights); err != nil {
		t.Fatal(err)
	}
	// A processor may still be sending a packet by the previous weights: wait for the end of such sections of the
	// kernel (RCU).
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		t.Fatalf("membarrier: %v", errno)
	}
	o.left = read(t, x.leaving)
	o.queuePairs = len(o.left.clone().since(x.leftBefore)[o.plane])
	x.meet(t, "the weights are in effect")
	o.arrived = x.arrived(t)
	eventually(func() error {
		left := read(t, x.leaving).since(o.left)
		packets := uint64(0)
		for _, byPort := range left {
			for _, n := range byPort {
				packets += n
			}
		}
		if packets < enough {
			return fmt.Errorf("%d queue pairs were on plane %d; packets by plane and source port since then: %v", o.queuePairs, o.plane, left)
		}
		return nil
	})
	x.meet(t, "the traffic goes on")
	return o
}

// diverted returns the packets that a server's slots of the plane have sent on other planes, by source port.
func (m *machine) diverted(o *outage, server int, c counts) map[int]uint64 {
	out := map[int]uint64{}
	for p, byPort := range c {
		for port, n := range byPort {
			if p != o.plane && lands(server, port, o.plane) {
				out[port] += n
			}
		}
	}
	return out
}

// strays returns the packets of a server that are not on the plane of their slot, those of the plane's slots not being
// on any other one.
func (m *machine) strays(o *outage, server int, c counts) (n uint64) {
	for p, byPort := range c {
		for port, k := range byPort {
			if p == o.plane || !lands(server, port, p) && !lands(server, port, o.plane) {
				n += k
			}
		}
	}
	return n
}

// judge compares the packets since an outage with the slots at that time, and the reports of the library with the queue
// pairs that were on the plane.
func (x *execution) judge(t testing.TB, o *outage) {
	t.Helper()
	left, arrived := read(t, x.leaving).since(o.left), x.arrived(t).since(o.arrived)
	here, there := x.diverted(o, x.n, left), x.diverted(o, 3-x.n, arrived)
	t.Logf("without plane %d: packets that have left: %v, that have arrived: %v; diverted ones by source port: %v, %v", o.plane, left, arrived, here, there)
	if n := x.strays(o, x.n, left); n > 0 {
		t.Errorf("%d packets have left on planes that their slots did not have", n)
	}
	// Packets that had left by the plane before may arrive after the change: in all, no more than have left.
	total := func(byPort map[int]uint64) (n uint64) {
		for _, k := range byPort {
			n += k
		}
		return n
	}
	sent := x.exchangeNumber(t, total(o.left.clone().since(x.leftBefore)[o.plane]))
	if n := total(x.arrived(t).since(x.arrivedBefore)[o.plane]); n > sent {
		t.Errorf("%d packets have arrived on plane %d, by which %d had left", n, o.plane, sent)
	}
	arrived[o.plane] = nil
	if n := x.strays(o, 3-x.n, arrived); n > 0 {
		t.Errorf("%d packets have arrived on planes that their slots did not have", n)
	}
	if n := int(x.exchangeNumber(t, uint64(o.queuePairs))); len(there) > n {
		t.Errorf("packets of %d queue pairs of plane %d have arrived by others, of %d", len(there), o.plane, n)
	}
	stats, err := os.ReadFile(x.path + ".stats")
	if err != nil || !followed(string(stats), o.queuePairs) {
		t.Errorf("%d queue pairs were on plane %d; the statistics, %v:\n%s", o.queuePairs, o.plane, err, stats)
	}
	stayed := !strings.Contains(string(stats), "\nunsupported 0\n")
	if reported := strings.Contains(x.output.String(), x.rdma+" cannot change the source port of a connected queue pair"); reported != stayed {
		t.Errorf("%d queue pairs were on plane %d; reported: %v, with the statistics\n%s\n%s", o.queuePairs, o.plane, reported, stats, x.output.String())
	}
}

// restore ends an outage.
func (m *machine) restore(t testing.TB, o *outage) {
	t.Helper()
	m.host.IP("link", "set", fmt.Sprintf("p%d", o.plane), "up")
	if err := m.weigh(loopback(3-m.n), []uint32{1, 1, 1, 1}); err != nil {
		t.Fatal(err)
	}
}

// TestMachines runs UCX's benchmark and libfabric's, which need the other server to be another host, and requires that
// every packet of their queue pairs arrives by the plane of its slot, at both servers. Without the interposer the same
// check must find others. Then a plane is taken out while they run: they go on to their end, no packet leaves by the
// plane from the moment on at which the new weights are in effect, and the queue pairs that rdma_rxe does not move are
// reported.
func TestMachines(t *testing.T) {
	gate.Slow(t, gate.VM, "needs rdma_rxe, in a virtual machine")
	n := map[string]int{"1": 1, "2": 2}[os.Getenv(machineKey)]
	if n == 0 {
		t.Fatalf("%s=%q: want 1 or 2", machineKey, os.Getenv(machineKey))
	}
	netnstest.Require(t, "rdma", "ss", "ucx_perftest", "fi_pingpong", "ib_write_bw")
	m := newMachine(t, n)
	const ucx = "UCX_TLS=rc_v UCX_NET_DEVICES=RDMA:1 UCX_IB_GID_INDEX=1 UCX_UD_ETH_DGID_CHECK=n "
	for _, test := range []struct{ name, words string }{
		{"ucx_perftest tag_bw", ucx + "ucx_perftest -t tag_bw -n 200 -w 10 -s 20000"},
		{"ucx_perftest ucp_put_bw", ucx + "ucx_perftest -t ucp_put_bw -n 200 -w 10 -s 20000"},
		{"fi_pingpong", "fi_pingpong -p verbs -e msg -I 10"},
	} {
		for _, interposed := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/interposed %v", test.name, interposed), func(t *testing.T) {
				connected, unconnected := m.play(t, interposed, test.words)
				landed, strays := uint64(0), uint64(0)
				for p, byPort := range connected {
					for port, k := range byPort {
						if lands(3-n, port, p) {
							landed += k
						} else {
							strays += k
						}
					}
				}
				t.Logf("%d packets of connected queue pairs by the planes of their slots, %d by others; by plane and source port: %v, and datagrams: %v", landed, strays, connected, unconnected)
				switch {
				case interposed && (landed == 0 || strays > 0):
					t.Error("not every packet arrived by the plane of its slot")
				case !interposed && strays == 0:
					t.Error("without the interposer all packets arrived by the planes of slots: this test has lost its subject")
				}
			})
		}
	}
	for _, test := range []struct {
		name, words string
		cut         bool // else the plane loses its weight alone
	}{
		{"ucx_perftest tag_bw, cable cut", ucx + "ucx_perftest -t tag_bw -n 1000 -w 10 -s 20000", true},
		{"ucx_perftest ucp_put_bw, plane without weight", ucx + "ucx_perftest -t ucp_put_bw -n 1000 -w 10 -s 20000", false},
		{"fi_pingpong, cable cut", "fi_pingpong -p verbs -e msg -I 100 -S 65536", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := m.run(t, true, test.words)
			o := x.takeOut(t, test.cut)
			x.wait(t)
			x.judge(t, o)
			m.restore(t, o)
		})
	}
}
