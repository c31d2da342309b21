package nupa

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/rdma"
)

// peerBoot is the environment variable with the number of the boot of the other process's simulated machine.
const peerBoot = "FARED_NUPA_BOOT"

// storm is an endpoint on a simulated machine that sends operations of random kinds and sizes, and checks all bytes
// that arrive.
type storm struct {
	*host
	ch       rdma.Channel
	rng      *rand.Rand
	region   []byte // the peer writes there, cell by cell
	source   []byte // shared memory from which it sends
	peer     uint64 // address of the peer's region
	cells    [stormCells]byte
	sent     uint32
	received uint32
	moved    int // verified bytes
	buffer   [MaxOp]byte
	n        int
	checks   map[*rdma.Op][]byte // expected results of READs
	ended    int
	ok       int
	broken   error
	bad      string
}

const (
	stormCells = 8
	cellSize   = 4096
)

// newStorm starts a storm's endpoint.
func newStorm(t testing.TB, path, address string, boot byte) *storm {
	t.Helper()
	s := &storm{rng: rand.New(rand.NewPCG(uint64(boot), 9)), checks: map[*rdma.Op][]byte{}}
	s.host = newHost(t, must(address))
	cfg := kernel(path, boot)
	cfg.DeadAfter = 500 * time.Millisecond
	s.tr = New(cfg).(*transport)
	if err := s.tr.Start(s); err != nil {
		t.Fatal(err)
	}
	s.region, s.source = s.shared(stormCells*cellSize), s.shared(cellSize)
	s.Do(func() { s.register(planeKey, s.region, everything) })
	return s
}

func (s *storm) fault(format string, args ...any) {
	if s.bad == "" {
		s.bad = fmt.Sprintf(format, args...)
	}
}

func (s *storm) Admit(_ rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
	s.n = n
	return s.buffer[:n], rdma.Accepted
}

func (s *storm) Deliver(_ rdma.Channel, head []byte) {
	if got := binary.LittleEndian.Uint32(head); got != s.received {
		s.fault("message %d arrived in place of %d", got, s.received)
	}
	if !bytes.Equal(s.buffer[:s.n], pattern(s.n, byte(s.received))) {
		s.fault("message %d of %d bytes is wrong", s.received, s.n)
	}
	s.received++
	s.moved += s.n
}

func (s *storm) Complete(op *rdma.Op, err error) {
	s.settleOp(op, "Complete")
	s.ended++
	if err != nil {
		return
	}
	s.ok++
	if want := s.checks[op]; want != nil && !bytes.Equal(op.Local, want) {
		s.fault("read %x..., want %x...", op.Local[:8], want[:8])
	}
	delete(s.checks, op)
}

func (s *storm) Failed(_ rdma.Channel, err error) { s.broken = err }

// newChannel makes a new channel to a peer.
func (s *storm) newChannel(peer string) {
	s.Do(func() {
		var err error
		if s.ch, err = s.tr.Channel(rdma.ChannelConfig{Remote: must(peer)}); err != nil {
			s.t.Fatal(err)
		}
	})
	s.sent, s.received, s.broken, s.cells = 0, 0, nil, [stormCells]byte{}
	clear(s.checks)
}

// step posts one random operation. It returns false if the channel takes none.
func (s *storm) step() bool {
	var took bool
	s.Do(func() {
		op := &rdma.Op{Key: planeKey}
		cell := s.rng.IntN(stormCells)
		op.Remote = s.peer + uint64(cell*cellSize)
		switch s.rng.IntN(4) {
		case 0, 1:
			n := s.rng.IntN(300)
			if s.rng.IntN(8) == 0 {
				n = s.rng.IntN(MaxOp)
			}
			op.Kind, op.Head = rdma.OpSend, binary.LittleEndian.AppendUint32(nil, s.sent)
			op.Local = pattern(n, byte(s.sent))
		case 2:
			op.Kind, op.Local = rdma.OpWrite, pattern(cellSize, s.cells[cell]+1)
		case 3:
			if s.cells[cell] == 0 {
				took = true
				return
			}
			op.Kind, op.Local = rdma.OpRead, make([]byte, cellSize)
			s.checks[op] = pattern(cellSize, s.cells[cell])
		}
		s.posted[op] = true
		if took = s.ch.Post(op); !took {
			delete(s.posted, op)
			delete(s.checks, op)
			return
		}
		switch op.Kind {
		case rdma.OpSend:
			s.sent++
		case rdma.OpWrite:
			s.cells[cell]++
		}
	})
	return took
}

// run sends until f returns true or the channel fails.
func (s *storm) run(f func() bool) (failed bool) {
	for !f() {
		var broken bool
		s.Do(func() { broken = s.broken != nil })
		if broken {
			return true
		}
		if !s.step() {
			time.Sleep(50 * time.Microsecond)
		}
	}
	return false
}

// stormProcess is the other process: it sends until its channel fails or its input ends, and leaves.
func stormProcess(t *testing.T, path string) {
	boot, err := strconv.Atoi(os.Getenv(peerBoot))
	if err != nil {
		t.Fatal(err)
	}
	s := newStorm(t, path, addressB.String(), byte(boot))
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadString('\n')
	if err != nil {
		t.Fatal("no peer")
	}
	var local string
	if _, err := fmt.Sscan(line, &local, &s.peer); err != nil {
		t.Fatal(err)
	}
	remote, err := hex.DecodeString(local)
	if err != nil {
		t.Fatal(err)
	}
	s.newChannel(addressA.String())
	s.Do(func() { err = s.ch.Connect(remote, live()) })
	fmt.Printf("local %x %d\n", s.ch.Local(), addressOf(s.region))
	if err != nil {
		fmt.Println("end", err) // the peer has failed meanwhile
		return
	}
	input := make(chan struct{})
	go func() {
		io.Copy(io.Discard, in)
		close(input)
	}()
	s.run(func() bool {
		select {
		case <-input:
			return true
		default:
			return false
		}
	})
	s.leave()
	fmt.Printf("end %q %d\n", s.bad, s.moved)
}

func (s *storm) leave() {
	s.Do(func() {
		s.ch.Close()
		s.tr.Deregistered(planeKey)
	})
	s.tr.Free(s.region)
	s.tr.Free(s.source)
	s.tr.Stop()
}

// connect connects with the other process.
func (s *storm) connect(o *other) {
	s.newChannel(addressB.String())
	fmt.Fprintf(o.in, "%x %d\n", s.ch.Local(), addressOf(s.region))
	var local string
	if _, err := fmt.Sscan(o.read("local"), &local, &s.peer); err != nil {
		s.t.Fatal(err)
	}
	remote, err := hex.DecodeString(local)
	if err != nil {
		s.t.Fatal(err)
	}
	s.Do(func() { err = s.ch.Connect(remote, live()) })
	if err != nil {
		s.t.Fatal(err)
	}
}

// TestMachinesFail runs two simulated machines, processes that share memory and nothing of the kernel. At random points
// of their traffic, one is killed and starts again, by the same or another boot, or is paused for so long that it is
// dead, and goes on while its successor runs. All bytes are as sent, and in the end nothing in the file is taken.
func TestMachinesFail(t *testing.T) {
	defer goleak.VerifyNone(t)
	rounds := 3
	if n, err := strconv.Atoi(os.Getenv("FARED_NUPA_KILLS")); err == nil {
		rounds = n
	}
	path := filepath.Join(t.TempDir(), "plane")
	s := newStorm(t, path, addressA.String(), 1)
	boot := 2
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	begin := func() *other {
		t.Setenv(peerBoot, strconv.Itoa(boot))
		o := fork(t, "storm", path)
		t.Cleanup(func() { o.cmd.Process.Kill() })
		s.connect(o)
		return o
	}
	timer := func(ms int) func() bool {
		end := time.Now().Add(time.Duration(1+rng.IntN(ms)) * time.Millisecond)
		return func() bool { return time.Now().After(end) }
	}
	never := func() bool { return false }
	for round := range rounds {
		o := begin()
		early := s.run(timer(60))
		kind := round % 3
		switch kind {
		case 0, 1:
			o.cmd.Process.Kill()
			o.cmd.Wait()
			boot += kind // 1: the machine has restarted
		case 2:
			o.cmd.Process.Signal(unix.SIGSTOP)
		}
		if !early && !s.run(never) {
			t.Fatal("the death was not noticed")
		}
		s.Do(s.ch.Close)
		if len(s.posted) != 0 {
			t.Errorf("%d operations have not ended", len(s.posted))
		}
		if kind == 2 {
			second := begin() // on the same boot, while the first process exists
			s.run(timer(30))
			o.cmd.Process.Signal(unix.SIGCONT)
			go o.in.Close()
			if s.run(timer(200)) {
				t.Logf("round %d: the successor's channel: %v", round, s.broken)
			}
			if end := o.read("end"); end[:2] != `""` {
				t.Errorf("round %d: the late process found %s", round, end)
			}
			o.cmd.Wait()
			second.in.Close()
			if end := second.read("end"); end[:2] != `""` {
				t.Errorf("round %d: the successor found %s", round, end)
			}
			second.cmd.Wait()
			s.Do(s.ch.Close)
		}
		if s.bad != "" {
			t.Fatalf("round %d: %s", round, s.bad)
		}
	}
	t.Logf("%d operations have ended, %d of them executed; %d bytes received", s.ended, s.ok, s.moved)
	last := newStorm(t, path, addressB.String(), 200)
	last.newChannel(addressA.String())
	last.leave()
	s.leave()
	checkUnused(t, path)
}

// checkUnused reads the file by the offsets of layout.go's description alone, and fails if anything is taken.
func checkUnused(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	rings, heap := int(le.Uint32(b[32:])), int(le.Uint64(b[56:]))
	at := 4096
	for i := range 64 {
		if g := le.Uint64(b[at:]); g%2 == 1 {
			t.Errorf("place %d is claimed with generation %d", i, g)
		}
		at += 320
	}
	for i := range 4096 {
		if owner := le.Uint32(b[at+40:]); owner != 0 {
			t.Errorf("region %d belongs to endpoint %d", i, owner-1)
		}
		at += 64
	}
	for i := range rings {
		if sender := le.Uint32(b[at:]); sender != 0 {
			t.Errorf("ring %d belongs to endpoint %d", i, sender-1)
		}
		at += 295040
	}
	for at = (at + 4095) &^ 4095; at < heap; at += 4 {
		if owner := le.Uint32(b[at:]); owner != 0 {
			t.Errorf("the page with its word at byte %d belongs to %x", at, owner)
		}
	}
}

// BenchmarkIdle measures the processor time of an idle endpoint in shared memory, in percent of one processor.
func BenchmarkIdle(b *testing.B) {
	h := newHost(b, addressA)
	cfg := kernel(filepath.Join(b.TempDir(), "plane"), 1)
	cfg.DeadAfter = 0
	h.tr = New(cfg).(*transport)
	if err := h.tr.Start(h); err != nil {
		b.Fatal(err)
	}
	used := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	begin, before := time.Now(), used()
	for b.Loop() {
		time.Sleep(time.Second)
	}
	b.ReportMetric(100*float64(used()-before)/float64(time.Since(begin)), "%cpu")
	h.tr.Stop()
}
