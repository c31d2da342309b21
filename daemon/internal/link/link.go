package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/devmatch"
)

// SubPort is one device to watch.
type SubPort struct {
	// Device is the interface's name, or an alternative name of it, 1 to 15 bytes.
	Device string
	// Match, if not zero, selects the device. One that has the name and does not fit counts as absent, and Event.Reason
	// explains which device is missing. The Watcher gives no names: the data plane does.
	Match devmatch.Match
	// Netns is the network namespace of the device: a name in `ip netns`, an absolute path of a namespace file, or
	// empty for the process's own.
	Netns string
	// Speed, if not zero, takes precedence over the speed that the device reports.
	Speed fare.Bandwidth
	// Only, if not empty, is the only source to query: SourceTBF, SourceEthtool or SourcePCIe. Empty queries all, in
	// the order of precedence.
	Only Source
}

// Config configures a Watcher. It is not changed after New.
type Config struct {
	// SubPorts are the devices; an Event refers to them by index. Several
	// sub-ports may refer to one device.
	SubPorts []SubPort
	// Logger receives messages for operators; nil discards them.
	Logger *slog.Logger
}

// Source is the source of a speed.
type Source string

// The sources of a speed, in order of precedence. The zero value means that the speed is unknown.
const (
	SourceConfig  Source = "config"  // the configuration
	SourceTBF     Source = "tbf"     // root tbf qdisc, or the root classes of an htb qdisc
	SourceEthtool Source = "ethtool" // the driver, ETHTOOL_GLINKSETTINGS
	SourcePCIe    Source = "pcie"    // the device's PCIe link
)

// Event is the whole state of one sub-port. It is never changed after it was reported.
type Event struct {
	// SubPort is the index in Config.SubPorts.
	SubPort int
	// Up reports whether packets can leave: the device exists, is administratively up, has its carrier, and its
	// operational state (RFC 2863, Section 3.1.14) is up or unknown.
	Up bool
	// Speed is in bit/s; zero if unknown. While the device is down it is the last known one.
	Speed fare.Bandwidth
	// SpeedSource is the source of Speed; empty if Speed is zero.
	SpeedSource Source
	// Ifindex is the device's index in its namespace, and Name its present name; zero and empty if it is absent.
	Ifindex int
	Name    string
	// Reason explains why Up is false; empty if it is true.
	Reason string
	// Persistent reports that Reason lasts until an operator acts: the device is absent or administratively down.
	Persistent bool
	// Absent reports that there is no such device now.
	Absent bool
	// Transitions counts the changes of Up since the start. If it has grown by two with Up unchanged, the reader has
	// missed a flap.
	Transitions uint64
	// Addresses counts the addresses that the device has received since the start: with a new one a connection may be
	// possible that was not before.
	Addresses uint64
}

// Stats counts the work of the namespace goroutines.
type Stats struct {
	Messages uint64 // rtnetlink messages read
	Resyncs  uint64 // full reads of a namespace: one at its start, one after each overrun
	Overruns uint64 // ENOBUFS and truncated datagrams: messages were dropped
	Polls    uint64 // reads of all devices of a namespace because the kernel may delay events
}

// Watcher watches sub-ports. Ready, Take, Poll, Cover and Stats may be called from any goroutine.
type Watcher struct {
	log        *slog.Logger
	namespaces []*namespace
	ready      chan struct{}

	mu    sync.Mutex // guards the fields below
	state []Event    // last reported, by sub-port
	known []bool     // state holds a report
	dirty []bool     // changed since the last Take
	stats Stats
}

// New checks the configuration. It opens nothing; Run does.
func New(cfg Config) (*Watcher, error) {
	w := &Watcher{
		log:   cfg.Logger,
		ready: make(chan struct{}, 1),
		state: make([]Event, len(cfg.SubPorts)),
		known: make([]bool, len(cfg.SubPorts)),
		dirty: make([]bool, len(cfg.SubPorts)),
	}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	var errs []error
	for i, sp := range cfg.SubPorts {
		err := checkDevice(sp.Device)
		if err == nil && !slices.Contains([]Source{"", SourceTBF, SourceEthtool, SourcePCIe}, sp.Only) {
			err = fmt.Errorf("device %s: speed source %q: use %s, %s or %s", sp.Device, sp.Only, SourceTBF, SourceEthtool, SourcePCIe)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sub-port %d: %w", i, err))
			continue
		}
		at := slices.IndexFunc(w.namespaces, func(n *namespace) bool { return n.netns == sp.Netns })
		if at < 0 {
			at = len(w.namespaces)
			w.namespaces = append(w.namespaces, &namespace{
				w: w, netns: sp.Netns, sysfs: devmatch.Sysfs, tick: time.Second, receiveBuffer: 4 << 20, poll: true,
			})
		}
		n := w.namespaces[at]
		n.matching = n.matching || !sp.Match.IsZero()
		n.ports = append(n.ports, &port{index: i, device: sp.Device, match: sp.Match, configured: sp.Speed, only: sp.Only})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return w, nil
}

// Continue takes over the last states of another Watcher before Run: devices whose state has not changed are not
// reported again, and Transitions go on. at has the index there of each sub-port here, or -1.
func (w *Watcher) Continue(was *Watcher, at []int) {
	was.mu.Lock()
	defer was.mu.Unlock()
	for i, from := range at {
		if from < 0 {
			continue
		}
		w.state[i], w.known[i], w.dirty[i] = was.state[from], was.known[from], was.dirty[from]
		w.state[i].SubPort = i
		w.port(i).addresses = was.state[from].Addresses
		if w.dirty[i] {
			select {
			case w.ready <- struct{}{}:
			default:
			}
		}
	}
}

// port returns the port of a sub-port.
func (w *Watcher) port(subPort int) *port {
	for _, n := range w.namespaces {
		if i := slices.IndexFunc(n.ports, func(p *port) bool { return p.index == subPort }); i >= 0 {
			return n.ports[i]
		}
	}
	panic("New has made no such port")
}

// checkDevice rejects strings that can never be an interface's name, because a wrong name would otherwise look like a
// device that does not exist yet.
func checkDevice(name string) error {
	const most = 15 // IFNAMSIZ without the terminating zero
	if name == "" || name == "." || name == ".." || len(name) > most {
		return fmt.Errorf("device %q: use an interface name of 1 to %d bytes", name, most)
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c == '/' || c == ':' || c == 0x7f {
			return fmt.Errorf("device %q: use an interface name without spaces, slashes or colons", name)
		}
	}
	return nil
}

// Run watches until ctx ends and returns after every goroutine has ended. It reports every sub-port once at the start,
// including absent ones. A failure (a namespace that is missing or may not be entered) becomes the Reason of its
// sub-ports and is retried. Run may be called once.
func (w *Watcher) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, n := range w.namespaces {
		wg.Go(func() { n.run(ctx) })
	}
	wg.Wait()
}

// Ready returns a channel that contains one token if Take has something to return.
func (w *Watcher) Ready() <-chan struct{} { return w.ready }

// Take returns the state of each sub-port that has changed since the last Take, in order of their index, in buf's
// memory from its start (buf may be nil).
func (w *Watcher) Take(buf []Event) []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	buf = buf[:0]
	for i, dirty := range w.dirty {
		if dirty {
			w.dirty[i] = false
			buf = append(buf, w.state[i])
		}
	}
	return buf
}

// Poll reads the carriers of all devices now and, where they are not covered, every few milliseconds for
// linkpoll.Window. The Watcher does the same after each link event where they are not covered; call Poll when a failure
// was detected by other means, such as a closed BGP session.
func (w *Watcher) Poll() {
	for _, n := range w.namespaces {
		n.startPolling()
	}
}

// Cover makes reads of carriers rare in the network namespace with this identity (netns.ID), and frequent in all
// others: another program makes the kernel announce every change there without delay. "" identifies none.
func (w *Watcher) Cover(id string) {
	for _, n := range w.namespaces {
		n.cover(id)
	}
}

// Stats returns the counters.
func (w *Watcher) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

// report stores e and fills the channel of Ready, if e differs from the last state.
func (w *Watcher) report(e Event) {
	w.mu.Lock()
	last := &w.state[e.SubPort]
	e.Transitions = last.Transitions
	if w.known[e.SubPort] && e == *last {
		w.mu.Unlock()
		return
	}
	if w.known[e.SubPort] && e.Up != last.Up {
		e.Transitions++
	}
	*last, w.known[e.SubPort], w.dirty[e.SubPort] = e, true, true
	w.mu.Unlock()
	select {
	case w.ready <- struct{}{}:
	default: // a token is already there: the reader will take this state too
	}
}

func (w *Watcher) count(f func(*Stats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.stats)
}
