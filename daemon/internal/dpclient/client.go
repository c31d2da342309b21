package dpclient

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
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

// ErrStalled reports that an operation, Hello or Snapshot was not answered within Config.AckTimeout.
var ErrStalled = errors.New("the data plane does not answer; reconnecting and reading its state back")

// Config configures a Client. Conn and Forwarding are required.
type Config struct {
	// Conn is the connection to the data plane; the caller closes it after Run. See Open. A stats handler on it must
	// not keep messages: they are reused.
	Conn grpc.ClientConnInterface
	// Version and Instance are sent to the data plane.
	Version, Instance string
	// Forwarding is sent to the data plane. It is copied.
	Forwarding *farev1.Forwarding
	// Ports, if not nil, computes a destination's UDP source ports, one entry per source loopback, for data planes with
	// flow pins only. It is called from Run's goroutine without a lock held, when the operation is sent; the result
	// must not change afterwards. vector is the owner's number. It must be safe for use concurrently with the owner's
	// goroutine.
	Ports func(destination Destination, vector uint32) []*farev1.PairPorts
	// AckTimeout limits the data plane's silence while operations wait; 0 means DefaultAckTimeout.
	AckTimeout time.Duration
	// Window is the number of operations that may wait for acknowledgements; 0 means DefaultWindow. Sub-port states do
	// not count.
	Window int
	// Gather is the greatest number of operations on destinations in one message, to a data plane that supports it; 0
	// means DefaultGather, 1 disables gathering.
	Gather int
	// MinBackoff and MaxBackoff bound the pause before another attempt, which doubles; 0 means the defaults.
	MinBackoff, MaxBackoff time.Duration
	// Logger logs failed attempts to connect; nil discards them.
	Logger *slog.Logger
}

// Client keeps a data plane in the declared state. Its methods may be called from any goroutine, and never block on the
// data plane.
type Client struct {
	config Config
	ready  chan struct{} // one slot: Take has something to return
	work   chan struct{} // one slot: there may be something to send

	sending sync.Mutex    // the right to compose and send; guards the two fields below, and is locked before mu
	stream  programStream // nil without one
	message message

	mu             sync.Mutex // guards all fields below
	book           *book
	forwarding     *farev1.Forwarding
	forwardingSent bool // the data plane has received forwarding
	gather         int  // greatest number of operations in one message
	status         Status
	active         time.Time // when the data plane last acknowledged, or the first unanswered operation was sent
}

// Status is the state of a Client.
type Status struct {
	Connected bool
	// Since is when Connected last changed; zero if it never did.
	Since         time.Time
	Name, Version string
	Capabilities  *farev1.Capabilities // nil before the first connect; not to be modified
	// DirectProbePort reports that the connected data plane leads packets by Forwarding.direct_probe_port.
	DirectProbePort bool
	// Damage describes the damage of the layer below the data plane, "" if it is intact; Repairs counts the data
	// plane's repairs of it.
	Damage  string
	Repairs uint64
	// LastError is why the last stream ended, or the last attempt failed.
	LastError error
	// Removals reports that removals are released.
	Removals bool
	// InFlight operations wait for acknowledgement, Queued objects wait to be sent.
	InFlight, Queued int
	Counters         Counters
}

// New returns a client; it does nothing before Run.
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
		ready: make(chan struct{}, 1), work: make(chan struct{}, 1),
	}, nil
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// Transaction is a set of changes of the wanted state. Its methods are those of Client.
type Transaction struct{ book *book }

// Transaction applies all changes that declare makes as one: no operation is sent before the last, so the data plane
// receives the difference alone. declare must not call methods of the client, nor wait for the data plane.
func (c *Client) Transaction(declare func(*Transaction)) {
	if c.Hold(declare) {
		ring(c.work)
		runtime.Gosched() // the sender runs next on this thread; another thread would wait for a timer before it takes the sender
	}
}

// Hold is Transaction without sending. It reports whether there is something to send; Flush, or the next Transaction,
// sends it.
func (c *Client) Hold(declare func(*Transaction)) (work bool) {
	c.mu.Lock()
	declare(&Transaction{c.book})
	c.book.commit()
	work, news := c.book.queues.len() > 0, c.book.events.len() > 0
	c.mu.Unlock()
	if news {
		ring(c.ready)
	}
	return work
}

// Flush sends what is to be sent in the calling goroutine if nothing waits for an acknowledgement, so that the data
// plane reads, and the sender is idle. Otherwise it notifies the sender. A data plane in this process applies the
// changes before Flush returns.
func (c *Client) Flush() {
	if !c.sending.TryLock() {
		ring(c.work)
		return
	}
	c.mu.Lock()
	able := c.stream != nil && c.status.Connected && c.forwardingSent && c.book.flights.len() == 0
	c.mu.Unlock()
	var request *farev1.ProgramRequest
	if able {
		if request, _ = c.compose(); request != nil {
			able = c.stream.Send(request) == nil && !request.More // the receiver gets the reason of an error
		}
	}
	c.sending.Unlock()
	if !able || request == nil {
		ring(c.work)
	}
}

// declare applies one change.
func (c *Client) declare(change func(*Transaction) uint64) (number uint64) {
	c.Transaction(func(t *Transaction) { number = change(t) })
	return number
}

// SetSubPort is Client.SetSubPort.
func (t *Transaction) SetSubPort(device string, up bool) uint64 { return t.book.setSubPort(device, up) }

// SetVector is Client.SetVector.
func (t *Transaction) SetVector(vector *farev1.Vector) uint64 { return t.book.setVector(vector) }

// DeleteVector is Client.DeleteVector.
func (t *Transaction) DeleteVector(id uint32) uint64 { return t.book.deleteVector(id) }

// SetDestination is Client.SetDestination.
func (t *Transaction) SetDestination(destination Destination, vector uint32, drain ...uint16) uint64 {
	return t.book.setDestination(destination, vector, drain...)
}

// DeleteDestination is Client.DeleteDestination.
func (t *Transaction) DeleteDestination(destination Destination) uint64 {
	return t.book.deleteDestination(destination)
}

// ReleaseChanges lets declared vectors and destinations change state that was read back, while removals are held. The
// caller declares the whole state that it wants in place of the state that it knows from Event.State, in the same
// transaction.
func (t *Transaction) ReleaseChanges() { t.book.adopt() }

// ReleaseRemovals is Client.ReleaseRemovals.
func (t *Transaction) ReleaseRemovals(release bool) { t.book.release(release) }

// SetSubPort declares a sub-port up or down. It overtakes all queued operations. It returns the number of the change,
// or that of the last one if nothing changes.
func (c *Client) SetSubPort(device string, up bool) uint64 {
	return c.declare(func(t *Transaction) uint64 { return t.SetSubPort(device, up) })
}

// ForgetSubPort withdraws a sub-port that is not in the next forwarding, with which the data plane forgets it too.
func (c *Client) ForgetSubPort(device string) {
	c.Transaction(func(t *Transaction) { t.book.forgetSubPort(device) })
}

// SetVector declares a vector, by its number (1 or higher). The vector is copied. It returns the change number, like
// SetSubPort.
func (c *Client) SetVector(vector *farev1.Vector) uint64 {
	return c.declare(func(t *Transaction) uint64 { return t.SetVector(vector) })
}

// DeleteVector withdraws a vector. The vector is deleted once no destination uses it. It returns the change number,
// like SetSubPort, or 0 if the vector was never declared.
func (c *Client) DeleteVector(id uint32) uint64 {
	return c.declare(func(t *Transaction) uint64 { return t.DeleteVector(id) })
}

// SetDestination declares the vector of a destination, a vector of the same source, and the slots that must be drained
// because of the change (copied). Vector 0 deletes the destination. With flow pins, declaring the same vector again
// recomputes the source ports. It returns the change number, like SetSubPort.
func (c *Client) SetDestination(destination Destination, vector uint32, drain ...uint16) uint64 {
	return c.declare(func(t *Transaction) uint64 { return t.SetDestination(destination, vector, drain...) })
}

// DeleteDestination withdraws a destination. It returns the change number, like DeleteVector.
func (c *Client) DeleteDestination(destination Destination) uint64 {
	return c.declare(func(t *Transaction) uint64 { return t.DeleteDestination(destination) })
}

// ReleaseRemovals releases removals (true), or holds them (false, the initial state): see the package comment.
func (c *Client) ReleaseRemovals(release bool) {
	c.Transaction(func(t *Transaction) { t.ReleaseRemovals(release) })
}

// Bulk declares whether subsequent changes are bulk: they are sent in turn with the others, however many wait. The
// owner marks the changes of a source beyond its allowance as bulk, so that they do not delay the changes of other
// sources.
func (c *Client) Bulk(on bool) {
	c.mu.Lock()
	c.book.queues.bulk = on
	c.mu.Unlock()
}

// SetForwarding replaces the content of Hello, for instance when a next hop was learned. It is sent before any later
// change. Equal input does nothing.
func (c *Client) SetForwarding(forwarding *farev1.Forwarding) {
	c.mu.Lock()
	if !proto.Equal(c.forwarding, forwarding) {
		c.forwarding, c.forwardingSent = proto.CloneOf(forwarding), false
		c.book.order = newOrder(forwarding)
	}
	c.mu.Unlock()
	ring(c.work)
}

// Ready returns a channel that receives a value when Take has something to return.
func (c *Client) Ready() <-chan struct{} { return c.ready }

// Take appends the news since the last call to buf: one event per object, with its current state. A flood takes more
// than one call, the last of which appends nothing.
func (c *Client) Take(buf []Event) []Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.book.take(buf)
}

// Status returns the current state.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.DirectProbePort = s.Connected && s.Capabilities.GetDirectProbePort()
	s.Removals, s.Counters, s.InFlight = !c.book.places.held, c.book.counters, c.book.flights.len()
	s.Queued = c.book.queues.len()
	return s
}

// Run connects to the data plane and sends operations until ctx ends, and returns ctx's cause. It reconnects, with a
// growing pause, whenever the stream fails. Call it once.
func (c *Client) Run(ctx context.Context) error {
	pause := c.config.MinBackoff
	var expected time.Time // until then failed attempts are no surprise
	timer := time.NewTimer(0)
	defer timer.Stop()
	<-timer.C
	for {
		talked, err := c.talk(ctx)
		if ctx.Err() != nil {
			c.disconnected(context.Cause(ctx))
			return context.Cause(ctx)
		}
		was := c.disconnected(err)
		if talked {
			pause = c.config.MinBackoff
		}
		switch now := time.Now(); {
		case was && Stopped(err):
			expected = now.Add(restarts)
		case !was && now.After(expected): // the owner reports the end of a connection
			c.config.Logger.Warn("data plane not connected", "error", err, "retry_in", pause)
		}
		timer.Reset(pause)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
		pause = min(2*pause, c.config.MaxBackoff)
	}
}

// restarts is the time in which a data plane that has stopped in order is expected again.
const restarts = 10 * time.Second

// Stopped reports whether err, the end of a stream, says that the data plane has stopped in order, as for an upgrade.
func Stopped(err error) bool {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == "STOPPING" {
			return true
		}
	}
	return false
}

// connected records the start of a stream after the read-back.
func (c *Client) connected(hello *farev1.HelloResponse, have State) {
	c.mu.Lock()
	c.book.pinning = hello.GetCapabilities().GetFlowPins() && c.config.Ports != nil
	c.gather = max(1, min(c.config.Gather, int(min(hello.GetCapabilities().GetMaxOperationsPerRequest(), 1<<16))))
	c.book.resync(have)
	c.book.counters.Connects++
	c.book.announce(Event{Kind: Connected, Name: hello.Name, Version: hello.Version, Capabilities: hello.Capabilities, State: &have})
	c.status = Status{
		Connected: true, Since: time.Now(), Name: hello.Name, Version: hello.Version,
		Capabilities: hello.Capabilities, LastError: c.status.LastError,
	}
	c.mu.Unlock()
	ring(c.ready)
}

// disconnected records the end of a stream or attempt, and reports whether it was a stream.
func (c *Client) disconnected(err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status.LastError = err
	if !c.status.Connected {
		return false
	}
	c.status.Connected, c.status.Since = false, time.Now()
	c.book.disconnect()
	c.book.integrity = nil // belongs to the ended stream
	c.book.counters.Disconnects++
	if errors.Is(err, ErrStalled) {
		c.book.counters.Stalls++
	}
	c.book.announce(Event{Kind: Disconnected, Err: err})
	ring(c.ready)
	return true
}

// stalled returns an error that describes an answer that took too long.
func stalled(what string, after time.Duration) error {
	return fmt.Errorf("%s: no answer within %v: %w", what, after, ErrStalled)
}
