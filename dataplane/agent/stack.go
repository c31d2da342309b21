package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// layer is a Forwarder for a separate part of the kernel state.
type layer interface {
	contract.Forwarder
	// Settle removes leftovers of earlier runs that have not been programmed again.
	Settle() error
	Close() error
}

// stack forwards with two layers: above steers the pinned flows, below forwards all other flows, and the pinned ones
// too if above is missing. Either both layers apply a batch or none.
type stack struct {
	below, above layer
	log          *slog.Logger

	guard      guard
	mu         sync.Mutex // guards everything below
	forwarding *farev1.Forwarding
	owed       []contract.Change // changes that above still has to undo
	debt       error             // error of the last attempt
}

// coverable is a layer that follows carriers.
type coverable interface {
	// CoverCarriers sets whether another layer announces the carriers of the same sub-ports.
	CoverCarriers(bool)
}

func newStack(below, above layer, log *slog.Logger) *stack {
	if c, ok := below.(coverable); ok {
		c.CoverCarriers(above.Capabilities().CarriersAnnounced != "")
	}
	return &stack{below: below, above: above, log: log}
}

// Capabilities returns the common capabilities: the features of above, and the smaller limits.
func (s *stack) Capabilities() *farev1.Capabilities {
	below, above := s.below.Capabilities(), s.above.Capabilities()
	return &farev1.Capabilities{
		MaxVectors: lower(below.MaxVectors, above.MaxVectors), MaxDestinations: lower(below.MaxDestinations, above.MaxDestinations),
		MaxWeight: lower(below.MaxWeight, above.MaxWeight), MaxWeightSum: lower(below.MaxWeightSum, above.MaxWeightSum),
		PerPacket: above.PerPacket, Ipv6: below.Ipv6 && above.Ipv6, FlowPins: above.FlowPins,
		ConfirmsInEffect: below.ConfirmsInEffect && above.ConfirmsInEffect, CarriersAnnounced: above.CarriersAnnounced, DirectProbePort: below.DirectProbePort,
	}
}

// WithoutIPv6 implements contract.Explainer.
func (s *stack) WithoutIPv6() string {
	if e, ok := s.below.(contract.Explainer); ok {
		return e.WithoutIPv6()
	}
	return ""
}

// lower returns the smaller limit; 0 means no limit.
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
				s.log.Error("the kernel's groups follow a refused Hello until the next Hello", "error", back)
			}
		}
		return err
	}
	s.forwarding = forwarding
	return nil
}

// perFlow returns a forwarding for the layer below, which never sprays: packets that above does not steer stay in
// order.
func perFlow(forwarding *farev1.Forwarding) *farev1.Forwarding {
	if forwarding.Mode == farev1.Mode_MODE_PER_FLOW {
		return forwarding
	}
	forwarding = proto.CloneOf(forwarding)
	forwarding.Mode = farev1.Mode_MODE_PER_FLOW
	return forwarding
}

// Commit implements contract.Forwarder. Above is first: its flows are those whose weights matter, and a change of its
// maps takes microseconds, while below waits for the kernel to release replaced groups.
func (s *stack) Commit(changes []contract.Change) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settleDebt(); err != nil {
		return err
	}
	if err := s.above.Commit(changes); err != nil {
		return err
	}
	err := s.below.Commit(changes)
	if err == nil {
		return nil
	}
	s.owed = make([]contract.Change, 0, len(changes))
	for _, c := range slices.Backward(changes) {
		s.owed = append(s.owed, c.Inverse())
	}
	if back := s.settleDebt(); back != nil {
		s.log.Error("cannot undo at the steering what the routes refused; no changes are made until the undo succeeds", "error", back)
	}
	return err
}

// settleDebt makes above undo changes that below refused. Until that succeeds, above forwards by unwanted state, and no
// change can start from the state that the server assumes. The caller holds mu.
func (s *stack) settleDebt() error {
	if len(s.owed) == 0 {
		return nil
	}
	if s.debt = s.above.Commit(s.owed); s.debt != nil {
		return status.Errorf(codes.Unavailable, "an earlier change is not undone yet, retry: %v", s.debt)
	}
	s.owed = nil
	return nil
}

// Recover implements contract.Recoverer. The state recovered by above includes slots and source ports; if above finds
// nothing, below recovers the forwarding state of the kernel.
func (s *stack) Recover() *farev1.SnapshotResponse {
	for _, l := range []layer{s.above, s.below} {
		if r, ok := l.(contract.Recoverer); ok {
			if found := r.Recover(); found != nil {
				return found
			}
		}
	}
	return nil
}

// Approximate implements contract.Approximator: the deviations of both layers.
func (s *stack) Approximate(group uint32) string {
	var all []string
	for _, l := range []layer{s.below, s.above} {
		if a, ok := l.(contract.Approximator); ok {
			if deviation := a.Approximate(group); deviation != "" {
				all = append(all, deviation)
			}
		}
	}
	return strings.Join(all, "; ")
}

// Guard implements contract.Guardian: the stack is intact if both layers are.
func (s *stack) Guard(report func(*farev1.Integrity)) {
	s.guard.report = report
	for i, l := range []layer{s.below, s.above} {
		s.guard.last[i] = &farev1.Integrity{Intact: true}
		if g, ok := l.(contract.Guardian); ok {
			g.Guard(func(now *farev1.Integrity) { s.guard.take(i, now) })
		}
	}
}

// Retry implements contract.Retrier.
func (s *stack) Retry(again func()) {
	for _, l := range []layer{s.below, s.above} {
		if r, ok := l.(contract.Retrier); ok {
			r.Retry(again)
		}
	}
}

// guard merges the reports of two layers.
type guard struct {
	mu     sync.Mutex // guards everything below
	last   [2]*farev1.Integrity
	report func(*farev1.Integrity)
}

func (g *guard) take(layer int, now *farev1.Integrity) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last[layer] = now
	all := &farev1.Integrity{Intact: true}
	var texts []string
	for _, i := range g.last {
		all.Intact = all.Intact && i.Intact
		all.Repairs += i.Repairs
		if i.Message != "" {
			texts = append(texts, i.Message)
		}
	}
	all.Message = strings.Join(texts, "; ")
	g.report(all)
}

// Counters implements contract.Counter.
func (s *stack) Counters(request *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error {
	c, ok := s.above.(contract.Counter)
	if !ok {
		return status.Error(codes.Unimplemented, "this data plane has no counters")
	}
	return c.Counters(request, send)
}

// Settle settles both layers.
func (s *stack) Settle() error { return errors.Join(s.below.Settle(), s.above.Settle()) }

// Close closes both layers; the kernel continues to forward.
func (s *stack) Close() error { return errors.Join(s.above.Close(), s.below.Close()) }

// healthy returns the current fault, and retries to repair it.
func (s *stack) healthy() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.settleDebt(); err != nil {
		return fmt.Errorf("the layers of the data plane differ: %w", err)
	}
	return nil
}
