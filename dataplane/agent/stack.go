package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// layer is a Forwarder of its own part of the kernel.
type layer interface {
	contract.Forwarder
	// Settle removes what an earlier run left and nobody has promised since.
	Settle() error
	Close() error
}

// stack forwards by two layers: above steers the flows that are pinned, below everything else, and those whenever above is
// not there. Either both obey a batch or none.
type stack struct {
	below, above layer
	log          *slog.Logger

	mu         sync.Mutex // guards everything below
	forwarding *farev1.Forwarding
	owed       []contract.Change // what below must still undo
	debt       error             // why it could not
}

// Capabilities are what both can do: above's features, and the smaller limits.
func (s *stack) Capabilities() *farev1.Capabilities {
	below, above := s.below.Capabilities(), s.above.Capabilities()
	return &farev1.Capabilities{
		MaxGroups: lower(below.MaxGroups, above.MaxGroups), MaxDestinations: lower(below.MaxDestinations, above.MaxDestinations),
		MaxWeight: lower(below.MaxWeight, above.MaxWeight), MaxWeightSum: lower(below.MaxWeightSum, above.MaxWeightSum),
		PerPacket: above.PerPacket, Ipv6: below.Ipv6 && above.Ipv6, FlowPins: above.FlowPins,
		ConfirmsInEffect: below.ConfirmsInEffect && above.ConfirmsInEffect,
	}
}

// lower returns the smaller limit; 0 is none.
func lower(a, b uint32) uint32 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// SetForwarding implements contract.Forwarder.
func (s *stack) SetForwarding(forwarding *farev1.Forwarding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settleDebt(); err != nil {
		return err
	}
	if err := s.below.SetForwarding(perFlow(forwarding)); err != nil {
		return err
	}
	if err := s.above.SetForwarding(forwarding); err != nil {
		if s.forwarding != nil {
			if back := s.below.SetForwarding(perFlow(s.forwarding)); back != nil {
				s.log.Error("the kernel's groups follow a Hello that was refused, until the next", "error", back)
			}
		}
		return err
	}
	s.forwarding = forwarding
	return nil
}

// perFlow is a forwarding for the layer below, which places flows and never sprays: what above does not steer stays in order.
func perFlow(forwarding *farev1.Forwarding) *farev1.Forwarding {
	if forwarding.Mode == farev1.Mode_MODE_PER_FLOW {
		return forwarding
	}
	forwarding = proto.CloneOf(forwarding)
	forwarding.Mode = farev1.Mode_MODE_PER_FLOW
	return forwarding
}

// Commit implements contract.Forwarder.
func (s *stack) Commit(changes []contract.Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settleDebt(); err != nil {
		return err
	}
	if err := s.below.Commit(changes); err != nil {
		return err
	}
	err := s.above.Commit(changes)
	if err == nil {
		return nil
	}
	s.owed = make([]contract.Change, 0, len(changes))
	for _, c := range slices.Backward(changes) {
		s.owed = append(s.owed, c.Inverse())
	}
	if back := s.settleDebt(); back != nil {
		s.log.Error("what the steering refused cannot be undone below; nothing is changed until it can", "error", back)
	}
	return err
}

// settleDebt has below undo what above refused. Until that has worked below obeys what nobody wants, and no change can start
// from what everybody thinks there is. The caller holds mu.
func (s *stack) settleDebt() error {
	if len(s.owed) == 0 {
		return nil
	}
	if s.debt = s.below.Commit(s.owed); s.debt != nil {
		return status.Errorf(codes.Unavailable, "an earlier change cannot be undone yet: %v", s.debt)
	}
	s.owed = nil
	return nil
}

// Recover implements contract.Recoverer: below knows what the kernel forwards by, and above's maps are adopted with it.
func (s *stack) Recover() *farev1.SnapshotResponse {
	if r, ok := s.below.(contract.Recoverer); ok {
		return r.Recover()
	}
	return nil
}

// Counters implements contract.Counter.
func (s *stack) Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error {
	c, ok := s.above.(contract.Counter)
	if !ok {
		return status.Error(codes.Unimplemented, "this data plane counts nothing")
	}
	return c.Counters(request, send)
}

// Settle settles both.
func (s *stack) Settle() error { return errors.Join(s.below.Settle(), s.above.Settle()) }

// Close lets go of both; the kernel forwards on.
func (s *stack) Close() error { return errors.Join(s.above.Close(), s.below.Close()) }

// healthy says what is wrong, and tries to put it right.
func (s *stack) healthy() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settleDebt(); err != nil {
		return fmt.Errorf("the layers of the data plane differ: %w", err)
	}
	return nil
}
