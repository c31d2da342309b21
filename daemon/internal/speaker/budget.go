package speaker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
)

// The messages of a peer cost this host time in the reader, in the owner's loop
// and in the data plane. Each session has a budget: bursts up
// to its capacity pass at full speed; beyond it the speaker reads the peer at
// the budget's rate, and TCP flow control holds the peer back. A peer that
// exceeds the budget for overloadPatience receives Cease, Out of Resources, and
// may reconnect after a pause that doubles with each offense.
// docs/operations/leaves.md, "The cost of one leaf", states the bounds.
const (
	costMessage = 100 // of a message, in addition to its octets
	costPrefix  = 400 // of an announced or withdrawn prefix

	// costRate is the permitted long-term cost of a session per second: about
	// 74,000 UPDATEs of one prefix, or 103,000 prefixes in long ones. A change
	// takes about 5 µs of processor time up to the data plane, so a session takes
	// at most half a core.
	costRate = 40 << 20
	// costTable is the capacity per prefix of MaxPrefixes: enough for a table
	// that is sent four times, with one prefix per UPDATE.
	costTable = 4 * (costMessage + costPrefix + 60)

	overloadPatience = 30 * time.Second

	// refreshPause is the least time between two ROUTE-REFRESH messages of a
	// family that reach GoBGP, which answers each with its whole table.
	refreshPause = 2 * time.Second

	// rereadAfter is the least time from a session's start to the request of its routes a second time.
	rereadAfter = 3 * time.Second

	// pauseLimit is the longest pause after an offense, in units of
	// Config.ConnectRetry. The first pause is one unit.
	pauseLimit = 32
)

// budget is a token bucket in units of cost. The zero value is not ready for use.
type budget struct {
	capacity, rate float64
	patience       time.Duration

	left  float64
	at    time.Time // time of left
	since time.Time // start of the current period of overdrafts; zero if there is none
}

func newBudget(maxPrefixes int) budget {
	return budget{capacity: float64(costTable * maxPrefixes), rate: costRate, patience: overloadPatience}
}

// spend charges cost and returns how long to wait before the next charge, and
// whether the budget has been overdrawn for longer than its patience.
func (b *budget) spend(now time.Time, cost uint64) (wait time.Duration, over bool) {
	if b.at.IsZero() {
		b.left = b.capacity
	} else {
		b.left = min(b.capacity, b.left+now.Sub(b.at).Seconds()*b.rate)
	}
	b.at = now
	if b.left >= b.capacity/2 {
		b.since = time.Time{}
	}
	b.left -= float64(cost)
	if b.left >= 0 {
		return 0, false
	}
	if b.since.IsZero() {
		b.since = now
	}
	return time.Duration(-b.left / b.rate * float64(time.Second)), now.Sub(b.since) > b.patience
}

// overload ends a session whose peer has exceeded its budget for too long.
type overload struct{ patience time.Duration }

func (e *overload) Error() string {
	return fmt.Sprintf("the peer has sent more than a session's budget for %v: session ends with NOTIFICATION 6/8 (out of resources)", e.patience)
}

// cost returns the accumulated cost of the session's peer, without octets.
func (s *session) cost() uint64 {
	c := &s.counters
	return costMessage*c.Received(guard.Inbound, guard.Messages) +
		costPrefix*(c.Received(guard.Inbound, guard.Routes)+c.Received(guard.Inbound, guard.Withdrawals))
}

// spend charges the octets and messages just read, and waits as the budget requires.
func (in *incarnation) spend(ctx context.Context, now time.Time, octets int) error {
	total := in.s.cost()
	wait, over := in.budget.spend(now, total-in.costed+uint64(octets))
	in.costed = total
	if over {
		return &overload{in.budget.patience}
	}
	if wait == 0 {
		return nil
	}
	in.s.throttled.Add(1)
	in.release()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// unread is the longest time that a write to the peer may take before the
// speaker stops queuing further routes.
const unread = 50 * time.Millisecond

// isUnread reports whether the peer has stopped reading.
func (in *incarnation) isUnread() bool {
	return lasts(in.writing.Load())
}

// isUntaken reports whether the peer has stopped reading, or does not acknowledge the octets before a mark.
func (in *incarnation) isUntaken() bool { return in.isUnread() || lasts(in.unacked.Load()) }

// lasts reports whether an operation that began at a time, Unix nanoseconds, has lasted longer than unread. 0 means
// that no operation is under way.
func lasts(began int64) bool { return began != 0 && time.Since(time.Unix(0, began)) > unread }

// awaitReader returns when the session's peer reads again or its connection has
// ended. GoBGP would queue every change for a peer that does not read; here
// only the newest set of routes waits.
func (s *session) awaitReader() {
	s.mu.Lock()
	in := s.current
	s.mu.Unlock()
	if in != nil && in.isUnread() {
		in.sendMu.Lock()
		defer in.sendMu.Unlock()
	}
}

// offense reports whether an established incarnation ended because its peer
// broke the protocol or exceeded its budget. A silent peer commits no offense.
func offense(err error) bool {
	var fault *guard.SpeakerFault
	var over *overload
	var n *guard.Notification
	return errors.As(err, &over) || errors.As(err, &n) && n.Code != 4 && !errors.As(err, &fault)
}

// punish returns the pause after an incarnation that was established for a time and ended with err. The caller holds
// mu.
func (s *session) punish(err error, lasted time.Duration) time.Duration {
	unit := s.speaker.conf.ConnectRetry
	if lasted > pauseLimit*unit {
		s.strikes = 0
	}
	if !offense(err) {
		return 0
	}
	pause := unit * time.Duration(min(1<<min(s.strikes, 10), pauseLimit))
	s.strikes++
	s.offenses++
	s.paused = time.Now().Add(pause)
	return pause
}

// Limits of the log lines of a session: the peer determines how often its
// session changes, and thereby the number of lines.
const (
	logBurst = 100 // lines at once
	logRate  = 2   // subsequent lines per second
)

// limitedHandler forwards the log lines of one session, up to logRate in the
// long run. Errors and debug lines, if enabled, are not counted.
type limitedHandler struct {
	slog.Handler
	limit *logLimit
}

// logLimit is shared by all handlers that are derived from one handler.
type logLimit struct {
	mu         sync.Mutex
	left       float64
	at         time.Time
	suppressed uint64
}

// allow reports whether a line may pass, and the number of lines suppressed since the last one that passed.
func (l *logLimit) allow(now time.Time) (ok bool, suppressed uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.IsZero() {
		l.left = logBurst
	} else {
		l.left = min(logBurst, l.left+now.Sub(l.at).Seconds()*logRate)
	}
	l.at = now
	if l.left < 1 {
		l.suppressed++
		return false, 0
	}
	l.left--
	suppressed, l.suppressed = l.suppressed, 0
	return true, suppressed
}

// limited returns a logger whose lines have a separate budget.
func limited(log *slog.Logger) *slog.Logger {
	return slog.New(&limitedHandler{log.Handler(), new(logLimit)})
}

func (h *limitedHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo && r.Level < slog.LevelError {
		ok, suppressed := h.limit.allow(r.Time)
		if !ok {
			return nil
		}
		if suppressed > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Uint64("suppressed_lines", suppressed))
		}
	}
	return h.Handler.Handle(ctx, r)
}

func (h *limitedHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limitedHandler{h.Handler.WithAttrs(attrs), h.limit}
}

func (h *limitedHandler) WithGroup(name string) slog.Handler {
	return &limitedHandler{h.Handler.WithGroup(name), h.limit}
}
