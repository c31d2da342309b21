package rdma

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
)

// strays compares the counted packets with the slots: each source port is that of a slot, and only on the slot's plane.
// It returns the number of source ports on each plane.
func (b *bed) strays(before [2]counts) (ports [2][planes]int) {
	b.t.Helper()
	for i, c := range b.read() {
		for p, byPort := range c.since(before[i]) {
			for port, n := range byPort {
				if !lands(3-b.s[i].n, port, p) {
					b.t.Errorf("server %d: %d packets with source port %d arrived on plane %d", i+1, n, port, p)
				}
				ports[i][p]++
			}
		}
	}
	return ports
}

// lands reports whether a source port is that of a slot of a server on a plane.
func lands(server, port, plane int) bool {
	slot := port - int(slotPort(server, 0))
	return slot >= 0 && slot < slots && slot%planes == plane
}

func sum(numbers [planes]int) (n int) {
	for _, x := range numbers {
		n += x
	}
	return n
}

// TestPrograms requires that every packet of every queue pair of Debian's programs arrives by the plane of its slot,
// from both servers.
func TestPrograms(t *testing.T) {
	gate.Slow(t, gate.VM, "needs rdma_rxe, in a virtual machine")
	b := newBed(t)
	perftest := func(program string, args ...string) (second, first []string) {
		with := func(s *server, more ...string) []string {
			return slices.Concat([]string{program, "-d", s.rdma, "-x", "1"}, args, more)
		}
		return with(b.s[1]), with(b.s[0], "127.0.0.1")
	}
	for _, test := range []struct {
		name    string
		qps     int // queue pairs of each server, 0: unknown
		program string
		args    []string
	}{
		{"ib_write_bw", 16, "ib_write_bw", []string{"-q", "16", "-n", "20", "-s", "4096"}},
		{"ib_send_lat", 1, "ib_send_lat", []string{"-n", "50"}},
		{"ib_read_bw", 4, "ib_read_bw", []string{"-q", "4", "-n", "20", "-s", "4096"}},
		{"ib_atomic_lat", 1, "ib_atomic_lat", []string{"-n", "50"}},
		{"ib_write_bw UC", 4, "ib_write_bw", []string{"-c", "UC", "-q", "4", "-n", "20", "-s", "4096"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b.t = t
			before := b.read()
			second, first := perftest(test.program, test.args...)
			b.pair(true, nil, second, first)
			ports := b.strays(before)
			t.Logf("source ports by plane: %v", ports)
			for i, byPlane := range ports {
				if i == 0 && test.name == "ib_write_bw UC" {
					continue // UC has no acknowledgements
				}
				for _, n := range byPlane {
					if test.qps >= planes && n != test.qps/planes {
						t.Errorf("server %d receives from %v queue pairs by plane, want %d each", i+1, byPlane, test.qps/planes)
						break
					}
				}
				if n := sum(byPlane); n != test.qps {
					t.Errorf("server %d receives from %d queue pairs, want %d", i+1, n, test.qps)
				}
			}
			stats, err := os.ReadFile(b.s[0].path + ".stats")
			if err != nil || !strings.HasPrefix(string(stats), fmt.Sprintf("dealt %d\n", test.qps)) {
				t.Errorf("the statistics, %v:\n%s", err, stats)
			}
		})
	}
	t.Run("without", func(t *testing.T) {
		b.t = t
		before := b.read()
		second, first := perftest("ib_write_bw", "-q", "16", "-n", "5", "-s", "4096")
		b.pair(false, nil, second, first)
		after := b.read()
		strange := 0
		for p, byPort := range after[1].since(before[1]) {
			for port := range byPort {
				if !lands(1, port, p) {
					strange++
				}
			}
		}
		if strange == 0 {
			t.Error("without the interposer all packets have the source ports of slots: this test has lost its subject")
		}
	})
	t.Run("plane fails", func(t *testing.T) {
		b.t = t
		second, first := perftest("ib_write_bw", "-q", "8", "-D", "40", "-s", "4096")
		start := b.read()
		const failed = 2
		b.pair(true, func() { b.fail(start, failed) }, second, first)
		b.s[1].host.IP("link", "set", fmt.Sprintf("p%d", failed), "up")
		stats, err := os.ReadFile(b.s[0].path + ".stats")
		if err != nil || !strings.Contains(string(stats), "dealt 8\n") || !followed(string(stats), 2) {
			t.Errorf("the statistics, %v:\n%s", err, stats)
		}
	})
	t.Run("NCCL's plugin", func(t *testing.T) {
		b.t = t
		b.weigh(1, 1, 1, 1)
		before := b.read()
		first, second, _ := b.collective(t, "60000", "--iterations", "3") // a stall would open queue pairs with other slots
		out := b.pair(false, nil, second, first)
		ports := b.strays(before)
		t.Logf("source ports by plane: %v\n%s", ports, out)
		for i, byPlane := range ports {
			for p, n := range byPlane {
				// A slot of the data from the other server, and one of its acknowledgements, which may be the same.
				if n < 1 || n > 2 {
					t.Errorf("server %d receives from %d source ports on plane %d, want 1 or 2", i+1, n, p)
				}
			}
		}
		if !strings.Contains(out, " by verbs") || !strings.Contains(out, "wrong elements: 0") {
			t.Errorf("the collective:\n%s", out)
		}
	})
	t.Run("NCCL's plugin, plane fails", func(t *testing.T) {
		b.t = t
		stop := filepath.Join(t.TempDir(), "stop")
		first, second, rendezvous := b.collective(t, "250", "--until", stop)
		const failed = 1
		n := 0
		more := func() {
			b.poll(func() error {
				_, err := os.Stat(filepath.Join(rendezvous, fmt.Sprint("more-", n)))
				return err
			})
			n += 3
		}
		out := b.pair(false, func() {
			more()
			more()
			b.s[1].host.IP("link", "set", fmt.Sprintf("p%d", failed), "down")
			b.weigh(1, 0, 1, 1)
			more()
			more()
			b.s[1].host.IP("link", "set", fmt.Sprintf("p%d", failed), "up")
			b.weigh(1, 1, 1, 1)
			more()
			more()
			if err := os.WriteFile(stop, nil, 0o600); err != nil {
				t.Error(err)
			}
		}, second, first)
		t.Log(out)
		if !strings.Contains(out, "wrong elements: 0") {
			t.Errorf("the collective:\n%s", out)
		}
	})
}

// collective returns the commands of an all-reduce by NCCL's plugin over verbs, which notices a stall after a time in
// milliseconds, and the folder by which its ranks find each other.
func (b *bed) collective(t *testing.T, stall string, args ...string) (first, second []string, rendezvous string) {
	rendezvous = t.TempDir()
	command := func(i int) []string {
		return append([]string{
			"env", "FARED_SLOTS=" + b.s[i].path, "FARED_NCCL_TRANSPORT=verbs", "FARED_NCCL_STALL_MS=" + stall, filepath.Join(folder, "nccl-net-check"), "--plugin", filepath.Join(folder, "libnccl-net-fared.so"),
			"--rank", fmt.Sprint(i), "--ranks", "2", "--rendezvous", rendezvous, "--bytes", "1000000", "--timeout", "200", "--verbose",
		}, args...)
	}
	return command(0), command(1), rendezvous
}

// poll calls check until it returns nil, for three minutes, and reports its last error. The programs then still run to
// their end.
func (b *bed) poll(check func() error) {
	b.t.Helper()
	err := check()
	for deadline := time.Now().Add(3 * time.Minute); err != nil && time.Now().Before(deadline); err = check() {
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		b.t.Error(err)
	}
}

// fail takes a plane out while queue pairs send, and requires that the packets of its slots then arrive on other
// planes, and all others as before.
func (b *bed) fail(start [2]counts, failed int) {
	b.t.Helper()
	b.poll(func() error {
		for p, byPort := range b.read()[1].since(start[1]) {
			if len(byPort) != 2 {
				return fmt.Errorf("%d queue pairs send on plane %d", len(byPort), p)
			}
		}
		return nil
	})
	b.s[1].host.IP("link", "set", fmt.Sprintf("p%d", failed), "down")
	weights := []uint32{1, 1, 1, 1}
	weights[failed] = 0
	b.weigh(weights...)
	before := b.read()
	b.poll(func() error {
		arrived := b.read()[1].since(before[1])
		diverted := map[int]bool{}
		packets := uint64(0)
		for p, byPort := range arrived {
			for port, n := range byPort {
				if p != failed {
					packets += n
				}
				switch slot := port - int(slotPort(1, 0)); {
				case slot >= 0 && slot < slots && slot%planes == failed && p != failed:
					diverted[port] = true
				case slot < 0 || slot >= slots || slot%planes != p:
					return fmt.Errorf("%d packets with source port %d arrive on plane %d", n, port, p)
				}
			}
		}
		const enough = 100 // of queue pairs that rdma_rxe has moved, which Linux 6.12 permits
		if len(diverted) != 2 && packets < enough {
			return fmt.Errorf("%d queue pairs of the failed plane send; packets by plane and port: %v", len(diverted), arrived)
		}
		return nil
	})
}

// followed reports whether statistics of the library have n queue pairs that moved, or that rdma_rxe did not move, and
// no other failure.
func followed(stats string, n int) bool {
	var moved, unsupported int
	_, rest, _ := strings.Cut(stats, "\nmoved ")
	_, err := fmt.Sscanf("moved "+rest, "moved %d\nunsupported %d\nfailed 0\n", &moved, &unsupported)
	return err == nil && moved+unsupported == n
}
