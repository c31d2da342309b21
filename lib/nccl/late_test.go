package nccl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

const (
	roce     = 4791 // UDP port
	udpAt    = 14 + 20
	bthAt    = udpAt + 8
	leastBTH = bthAt + 12
)

// late is the RoCEv2 traffic that a server has sent on a plane, and that the plane has not delivered yet.
type late struct {
	f       *fabric
	plane   int
	tap     *packettap.Tap
	socket  int
	packets [][]byte

	delivered int // of the packets: not late, but duplicates
}

// delay withholds what a server sends on a plane for UDP port 4791 from now on. Connections stay as they are.
func (f *fabric) delay(t testing.TB, server, plane int) *late {
	t.Helper()
	l := &late{f: f, plane: plane}
	device := fmt.Sprintf("s%dp%d", server, plane)
	f.core.Must(func() (err error) { l.socket, err = listen(device); return err })
	t.Cleanup(func() { unix.Close(l.socket) })
	// Packets between these calls are delivered at once, and a second time later. The kernel shows dropped packets to
	// packet sockets.
	l.tap = packettap.New(t, f.core, device, roce, packettap.End)
	l.writes(t, 0)
	l.delivered = len(l.packets)
	return l
}

// listen returns a socket that receives the packets to UDP port 4791 that arrive at a device.
func listen(device string) (int, error) {
	ifi, err := net.InterfaceByName(device)
	if err != nil {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 12}, // type of the Ethernet frame
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: unix.ETH_P_IP, Jf: 5},
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 14 + 9}, // protocol
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: unix.IPPROTO_UDP, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: udpAt + 2}, // destination port
		{Code: unix.BPF_JMP | unix.BPF_JEQ, K: roce, Jf: 1},
		{Code: unix.BPF_RET, K: 1 << 16},
		{Code: unix.BPF_RET, K: 0},
	}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8, Ifindex: ifi.Index}))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// writes returns the number of late packets of WRITEs to a server.
func (l *late) writes(t testing.TB, server int) (n int) {
	t.Helper()
	for buf := make([]byte, 1<<16); ; {
		size, _, err := unix.Recvfrom(l.socket, buf, 0)
		if err == unix.EAGAIN {
			break
		}
		if err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
		if size >= leastBTH {
			l.packets = append(l.packets, slices.Clone(buf[:size]))
		}
	}
	to := address(server).As4()
	for _, p := range l.packets[l.delivered:] {
		const first, only = 6, 11 // opcodes of WRITEs
		if op := p[bthAt]; op >= first && op <= only && slices.Equal(p[udpAt-4:udpAt], to[:]) {
			n++
		}
	}
	return n
}

// arrive delivers everything, in its order, ends the delay, and waits until a server has read what is for it.
func (l *late) arrive(t testing.TB, server int) {
	t.Helper()
	l.writes(t, 0)
	l.tap.Remove()
	var bridge *net.Interface
	var fd int
	l.f.core.Must(func() (err error) {
		if bridge, err = net.InterfaceByName(fmt.Sprint("br", l.plane)); err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	defer unix.Close(fd)
	for i, p := range l.packets {
		if i%64 == 63 {
			l.f.awaitRead(t, server) // the kernel drops packets of longer bursts
		}
		binary.BigEndian.PutUint16(p[udpAt+6:], 0) // no UDP checksum: the sender left it to its device
		if err := unix.Sendto(fd, p, 0, &unix.SockaddrLinklayer{Ifindex: bridge.Index}); err != nil {
			t.Fatal(err)
		}
	}
	l.f.awaitRead(t, server)
}

// awaitRead waits until a server's RDMA device has looked at all that has arrived.
func (f *fabric) awaitRead(t testing.TB, server int) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		if n := f.unread(t, server); n > 0 {
			return fmt.Errorf("%d bytes have not been read", n)
		}
		return nil
	})
}

// unread returns the bytes that have arrived at a server's RDMA device and that the device has not looked at yet.
func (f *fabric) unread(t testing.TB, server int) (sum uint64) {
	t.Helper()
	var text []byte
	f.nodes[server].Must(func() (err error) { text, err = os.ReadFile("/proc/thread-self/net/udp"); return err })
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if !strings.HasSuffix(words[1], fmt.Sprintf(":%04X", roce)) {
			continue
		}
		_, queue, _ := strings.Cut(words[4], ":")
		n, err := strconv.ParseUint(queue, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

var wrongText = regexp.MustCompile(`: element [0-9]+ is 0x`)

// wrong returns the first message of a rank about a wrong element.
func wrong(ranks []*rank) string {
	for _, r := range ranks {
		for line := range strings.Lines(r.out.String()) {
			if wrongText.MatchString(line) {
				return line
			}
		}
	}
	return ""
}

// awaitRest waits until a job whose last rank is stopped stands still: a server receives nothing any more.
func (f *fabric) awaitRest(t testing.TB, server int) {
	t.Helper()
	received := func() (sum float64) {
		var text []byte
		f.nodes[server].Must(func() (err error) { text, err = os.ReadFile("/proc/thread-self/net/dev"); return err })
		for line := range strings.Lines(string(text)) {
			device, counters, found := strings.Cut(strings.TrimSpace(line), ":")
			if !found || !strings.HasPrefix(device, "plane") {
				continue
			}
			n, err := strconv.ParseFloat(strings.Fields(counters)[0], 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		return sum
	}
	const rest, neighbors = 250 * time.Millisecond, 2000 // bytes of ARP and the like
	before, since := received(), time.Now()
	netnstest.Eventually(t, time.Minute, func() error {
		if now := received(); now > before+neighbors {
			before, since = now, time.Now()
		}
		if time.Since(since) < rest {
			return errors.New("the job goes on without one of its ranks")
		}
		return nil
	})
}

// writeLate has WRITEs of rank 0 arrive at rank 1 after their plane has been given up, and after the buffers have been
// received and filled again: rank 1 has its part of rank 0 in an all-to-all, and waits for that of the last rank, which
// is stopped. It returns the number of late packets, 0 if a rank has ended.
func (f *fabric) writeLate(t testing.TB, ranks []*rank, plane int) int {
	t.Helper()
	over := func() bool { return wrong(ranks) != "" || ended(ranks) }
	iterations := func(more int) {
		t.Helper()
		n := begun(ranks) + more
		netnstest.Eventually(t, time.Minute, func() error {
			if begun(ranks) < n && !over() {
				return fmt.Errorf("%d iterations have begun, want %d", begun(ranks), n)
			}
			return nil
		})
	}
	weights := []int{1, 1, 1, 1}
	f.setWeights(t, weights...)
	f.awaitBytes(t, ranks, 1e6)
	l := f.delay(t, 0, plane)
	netnstest.Eventually(t, time.Minute, func() error {
		if l.writes(t, 1) == 0 && !over() {
			return errors.New("the plane carries no WRITE")
		}
		return nil
	})
	weights[plane] = 0
	f.setWeights(t, weights...)
	iterations(3)
	last := ranks[len(ranks)-1].cmd.Process.Pid
	if err := unix.Kill(last, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	f.awaitRest(t, 1)
	n := l.writes(t, 1)
	l.arrive(t, 1)
	if err := unix.Kill(last, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	iterations(3)
	if over() {
		return 0
	}
	return n
}

// unfenced compiles a plugin that answers FENCE, and does not end its queue pair.
func unfenced(t testing.TB) built {
	t.Helper()
	folder, source := t.TempDir(), release(t)
	for part, from := range map[string]string{"nccl": ".", "src": "../src", "include": "../include"} {
		if err := os.CopyFS(filepath.Join(folder, part), os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
	}
	const fence = "stop(p);\n\t\t\tpoll(p);\n\t\t\tfinish(p);\n"
	const none = "poll(p);\n\t\t\tif (record(c, p->number, p->arrived))\n\t\t\t\tto_all(c, &(struct frame){.type = FRAME_FENCED, .group = p->number, .total = p->arrived});\n"
	file := filepath.Join(folder, "nccl/src/qpair.c")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(text), fence) != 1 {
		t.Fatal("qpair.c ends a queue pair in another way than this test knows")
	}
	if err := os.WriteFile(file, []byte(strings.Replace(string(text), fence, none, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	b := built{filepath.Join(folder, "out")}
	if out, err := exec.Command("make", "-C", filepath.Join(folder, "nccl"), "OUT="+b.folder, "CFLAGS=-O0", b.plugin()).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Symlink(source.check(), b.check()); err != nil {
		t.Fatal(err)
	}
	return b
}

var unknownText = regexp.MustCompile(`fared_soft0: .* unknown_qp ([0-9]+) `)

// TestVerbsLateWrites has WRITEs of a queue pair that has been given up arrive in the middle of a later iteration, when
// their buffers hold other messages: every element is right, because the receiver has ended the queue pair, and its
// device drops them. The same with a receiver that answers without ending its queue pair has wrong elements.
func TestVerbsLateWrites(t *testing.T) {
	gate.Slow(t, gate.C, "WRITEs that arrive late, in four jobs")
	b := release(t)
	f := newFabric(t, 0, 0, 0, 0)
	for p := range planes {
		f.nodes[0].IP("link", "set", fmt.Sprint("plane", p), "gso_max_segs", "1") // every frame is a packet
	}
	f.setWeights(t, 1, 1, 1, 1)
	stop, args := until(t, "--op", "alltoall", "--bytes", "6000000")
	ranks := f.verbs(t, b, []string{"FARED_SOFT_COUNTERS=1"}, args...)
	awaitIteration(t, ranks, 1)
	sum := 0
	for round := range 2 {
		sum += f.writeLate(t, ranks, round)
	}
	stop()
	finish(t, ranks)
	dropped := 0
	for _, m := range unknownText.FindAllStringSubmatch(ranks[1].out.String(), -1) {
		n, _ := strconv.Atoi(m[1])
		dropped += n
	}
	t.Logf("%d packets of WRITEs were late, and the receiver's device has dropped %d packets of ended queue pairs", sum, dropped)
	if sum == 0 || dropped < sum/2 { // a busy kernel may lose some before
		t.Errorf("the receiver's device has not dropped the late packets:\n%s", ranks[1].out.String())
	}

	_, args = until(t, "--op", "alltoall", "--bytes", "6000000")
	ranks = f.verbs(t, unfenced(t), nil, args...)
	awaitIteration(t, ranks, 1)
	rounds := 0
	for ; wrong(ranks) == "" && rounds < 10; rounds++ { // the rest of a job can be that of a busy machine
		f.writeLate(t, ranks, rounds%planes)
	}
	t.Logf("without the end of the queue pair, after %d rounds: %s", rounds, wrong(ranks))
	if wrong(ranks) == "" {
		t.Errorf("the test does not notice that late WRITEs are executed:\n%s", ranks[1].out.String())
	}
}
