package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Defaults of Config.
const (
	DefaultAckTimeout = 5 * time.Second
	DefaultWindow     = 256
	DefaultGather     = 64
	DefaultMinBackoff = 50 * time.Millisecond
	DefaultMaxBackoff = 2 * time.Second
)

// ErrStalled: an operation, Hello or Snapshot was not answered within Config.AckTimeout.
var ErrStalled = errors.New("the data plane does not answer; it is asked again from the beginning")

// Config says what to talk to. Conn and Forwarding are needed.
type Config struct {
	// Conn leads to the data plane; it stays the caller's, who closes it after Run. See Open. A stats handler on it
	// must not keep messages: they are reused.
	Conn grpc.ClientConnInterface
	// Version and Instance are told to the data plane.
	Version, Instance string
	// Forwarding is told to the data plane. It is copied.
	Forwarding *farev1.Forwarding
	// Ports, if set, computes a destination's UDP source ports, one entry per source loopback, for data planes with
	// flow pins only. It is called from Run's goroutine without a lock held, when the operation is sent; the result must not
	// change afterwards. group is the owner's number. It must be safe against the owner's own goroutine.
	Ports func(destination netip.Prefix, group uint32) []*farev1.PairPorts
	// AckTimeout is how long the data plane may be silent while operations wait; 0: DefaultAckTimeout.
	AckTimeout time.Duration
	// Window is how many operations may wait for acknowledgements; 0: DefaultWindow. Sub-port states do not count.
	Window int
	// Gather is how many operations on destinations at most go into one message, to a data plane that understands it; 0:
	// DefaultGather, 1: none are gathered.
	Gather int
	// MinBackoff and MaxBackoff bound the pause before a new attempt, which doubles; 0: the defaults.
	MinBackoff, MaxBackoff time.Duration
	// Logger gets connects and disconnects; nil: nothing is logged.
	Logger *slog.Logger
}

// Client makes a data plane obey. Its methods may be called from any goroutine, and never block on the data plane.
type Client struct {
	config Config
	knock  chan struct{} // news for the owner
	work   chan struct{} // something to send

	mu         sync.Mutex // guards everything below
	book       *book
	forwarding *farev1.Forwarding
	told       bool // the data plane knows forwarding
	gather     int  // operations that go into one message at most
	status     Status
	active     time.Time // when the data plane last acknowledged, or began to owe it
}

// Status is how the conversation goes.
type Status struct {
	Connected bool
	// Since is when Connected last changed; zero: never.
	Since         time.Time
	Name, Version string
	Capabilities  *farev1.Capabilities // nil before the first connect; not to be modified
	// LastError is why the last stream ended, or the last attempt failed.
	LastError error
	// Removals says that removals are released.
	Removals bool
	// InFlight operations wait for acknowledgement, Queued objects wait to be sent.
	InFlight, Queued int
	Counters         Counters
}

// New returns a client; nothing happens before Run.
func New(config Config) (*Client, error) {
	if config.Conn == nil {
		return nil, errors.New("data plane client: no connection; set Conn")
	}
	if len(config.Forwarding.GetPlanes()) == 0 {
		return nil, errors.New("data plane client: no planes; set Forwarding")
	}
	if config.Window < 0 || config.Gather < 0 || config.AckTimeout < 0 || config.MinBackoff < 0 || config.MaxBackoff < 0 {
		return nil, errors.New("data plane client: negative window, gather or time; use 0 for the default")
	}
	set := func(d *time.Duration, value time.Duration) {
		if *d == 0 {
			*d = value
		}
	}
	set(&config.AckTimeout, DefaultAckTimeout)
	set(&config.MinBackoff, DefaultMinBackoff)
	set(&config.MaxBackoff, max(DefaultMaxBackoff, config.MinBackoff))
	if config.Window == 0 {
		config.Window = DefaultWindow
	}
	if config.Gather == 0 {
		config.Gather = DefaultGather
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	forwarding := proto.CloneOf(config.Forwarding)
	return &Client{
		config: config, forwarding: forwarding, book: newBook(newOrder(forwarding), config.Window),
		knock: make(chan struct{}, 1), work: make(chan struct{}, 1),
	}, nil
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// declare runs one change of what is wanted.
func (c *Client) declare(change func(*book) uint64) uint64 {
	c.mu.Lock()
	number := change(c.book)
	news := len(c.book.events) > 0
	c.mu.Unlock()
	ring(c.work)
	if news {
		ring(c.knock)
	}
	return number
}

// SetSubPort declares a sub-port up or down. It overtakes everything that is queued. It returns the number of the
// change, that of the last one if nothing changes.
func (c *Client) SetSubPort(device string, up bool) uint64 {
	return c.declare(func(b *book) uint64 { return b.setSubPort(device, up) })
}

// SetGroup declares a group, by its number (1 or higher). The group is copied. The result is as of SetSubPort.
func (c *Client) SetGroup(group *farev1.Group) uint64 {
	return c.declare(func(b *book) uint64 { return b.setGroup(group) })
}

// DeleteGroup takes a group back. It goes when no destination uses it any more. The result is as of SetSubPort; 0 if
// the group was never declared.
func (c *Client) DeleteGroup(id uint32) uint64 {
	return c.declare(func(b *book) uint64 { return b.deleteGroup(id) })
}

// SetDestination declares the group of a destination, a host prefix, and the slots that have to be drained because of
// the change (not kept). Group 0 deletes. With flow pins, declaring the
// same group again has the source ports computed again. The result is as of SetSubPort.
func (c *Client) SetDestination(destination netip.Prefix, group uint32, drain ...uint16) uint64 {
	return c.declare(func(b *book) uint64 { return b.setDestination(destination, group, drain...) })
}

// DeleteDestination takes a destination back. The result is as of DeleteGroup.
func (c *Client) DeleteDestination(destination netip.Prefix) uint64 {
	return c.declare(func(b *book) uint64 { return b.deleteDestination(destination) })
}

// ReleaseRemovals lets removals go (true), or holds them (false, the start): see the package comment.
func (c *Client) ReleaseRemovals(release bool) {
	c.declare(func(b *book) uint64 {
		b.release(release)
		return 0
	})
}

// SetForwarding replaces what Hello tells, for instance when a next hop was learned. It is told before any later
// change. Equal input does nothing.
func (c *Client) SetForwarding(forwarding *farev1.Forwarding) {
	c.mu.Lock()
	if !proto.Equal(c.forwarding, forwarding) {
		c.forwarding, c.told = proto.CloneOf(forwarding), false
		c.book.order = newOrder(forwarding)
	}
	c.mu.Unlock()
	ring(c.work)
}

// Knock receives when Take has something.
func (c *Client) Knock() <-chan struct{} { return c.knock }

// Take appends what happened since the last call to buf: per object one event, of its present state.
func (c *Client) Take(buf []Event) []Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.book.take(buf)
}

// Status returns how things are now.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Removals, s.Counters, s.InFlight = !c.book.held, c.book.counters, c.book.flights.len()
	s.Queued = c.book.deletes.len()
	for i := range c.book.queues {
		s.Queued += c.book.queues[i].len()
	}
	return s
}

// Run talks to the data plane until ctx ends, and returns the cause of that. It connects again, with a growing pause,
// whenever the conversation breaks. Call it once.
func (c *Client) Run(ctx context.Context) error {
	pause := c.config.MinBackoff
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for {
		talked, err := c.talk(ctx)
		if ctx.Err() != nil {
			c.disconnected(context.Cause(ctx))
			return context.Cause(ctx)
		}
		c.disconnected(err)
		if talked {
			pause = c.config.MinBackoff
		}
		c.config.Logger.Warn("data plane lost", "error", err, "retry_in", pause)
		timer.Reset(pause)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
		pause = min(2*pause, c.config.MaxBackoff)
	}
}

// connected notes the start of a stream that was read back.
func (c *Client) connected(hello *farev1.HelloResponse, have State) {
	c.mu.Lock()
	c.book.pinning = hello.GetCapabilities().GetFlowPins() && c.config.Ports != nil
	c.gather = max(1, min(c.config.Gather, int(min(hello.GetCapabilities().GetMaxOperationsPerRequest(), 1<<16))))
	c.book.resync(have)
	c.book.counters.Connects++
	c.book.announce(Event{Kind: Connected, Name: hello.Name, Version: hello.Version, Capabilities: hello.Capabilities})
	c.status = Status{
		Connected: true, Since: time.Now(), Name: hello.Name, Version: hello.Version,
		Capabilities: hello.Capabilities, LastError: c.status.LastError,
	}
	c.mu.Unlock()
	ring(c.knock)
	c.config.Logger.Info("data plane connected", "name", hello.Name, "version", hello.Version,
		"groups", len(have.Groups), "destinations", len(have.Destinations))
}

// disconnected notes the end of a stream or attempt.
func (c *Client) disconnected(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.LastError = err
	if !c.status.Connected {
		return
	}
	c.status.Connected, c.status.Since = false, time.Now()
	c.book.disconnect()
	c.book.counters.Disconnects++
	if errors.Is(err, ErrStalled) {
		c.book.counters.Stalls++
	}
	c.book.announce(Event{Kind: Disconnected, Err: err})
	ring(c.knock)
}

// stalled says what waited too long.
func stalled(what string, after time.Duration) error {
	return fmt.Errorf("%s: no answer within %v: %w", what, after, ErrStalled)
}
