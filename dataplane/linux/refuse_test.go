package linux

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestRefusedInTheMiddle makes the kernel refuse the k-th message of each operation, once or for the rest of the
// operation. For every k, acknowledged operations are done, and refused ones leave the previous state.
func TestRefusedInTheMiddle(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "a kernel that refuses a part of a batch ends with the same state as one that does not")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t, 4)
	h.config.Logger = slog.New(slog.DiscardHandler)
	d, c := h.start()
	s := program(t, c.server)
	twinHost := newHost(t, 4) // without refusals
	_, twinClient := twinHost.start()
	twin := program(t, twinClient.server)
	h.some(s)
	twinHost.some(twin)
	refusals := 0
	for round := range gate.Count(t, gate.Kernel, 12, 60) {
		errno := []unix.Errno{unix.ENOMEM, unix.ENOBUFS, unix.EINVAL}[round%3]
		k, lasts, hit := 1+random.IntN(6), random.IntN(2) == 0, false
		weights := []uint32{uint32(random.IntN(4)), uint32(random.IntN(4)), uint32(random.IntN(4)), uint32(random.IntN(4))}
		group := uint32(1 + random.IntN(5))
		if round == 0 { // one that is refused for certain
			k, lasts, weights, group = 1, true, []uint32{3, 1, 2, 3}, 1
		}
		var ops []*farev1.Operation
		switch round % 4 {
		case 0:
			ops = append(ops, h.group(group, weights...))
		case 1:
			ops = append(ops, destination(target4(random.IntN(30)), group))
		case 2:
			ops = append(ops, h.group(group, weights...), destination(target6(random.IntN(30)), group), deleteDestination(target4(random.IntN(30))))
		case 3:
			ops = append(ops, subPortOp("p1", random.IntN(2) == 0), destination(target4(random.IntN(30)), group))
		}
		d.mu.Lock()
		n := 0
		d.kernel.conn.Refuse(func(string) unix.Errno {
			if n++; n == k || lasts && n > k {
				hit = true
				return errno
			}
			return 0
		})
		d.mu.Unlock()
		refused := s.try(ops...)
		d.mu.Lock()
		d.kernel.conn.Refuse(nil)
		d.mu.Unlock()
		not := map[uint64]bool{}
		for _, ack := range refused {
			refusals++
			not[ack.Id] = true
			want := codes.ResourceExhausted
			if errno == unix.EINVAL {
				want = codes.Unavailable
			}
			if code := codes.Code(ack.Code); code != want {
				t.Errorf("round %d: %v was refused with %v: %v", round, errno, code, ack.Message)
			}
		}
		if len(refused) > 0 && !hit {
			t.Errorf("round %d: refused for nothing: %v", round, refused)
		}
		for i, op := range ops {
			if !not[s.Sent-uint64(len(ops)-1-i)] {
				twin.do(op)
			}
		}
		netnstest.Eventually(t, time.Minute, func() error {
			d.audit() // forgets next hops that the kernel refused
			return different(h.state(), twinHost.state())
		})
	}
	if refusals == 0 {
		t.Error("nothing was refused")
	}
	t.Logf("%d operations were refused; %+v", refusals, d.Stats())
}

func different(got, want map[string]string) error {
	if d := diff(got, want); d != "" {
		return errors.New(d)
	}
	return nil
}
