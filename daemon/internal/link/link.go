package link

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/fare"
)

// SubPort is one device to watch.
type SubPort struct {
	// Device is the interface's name, 1 to 15 bytes.
	Device string
	// Netns is the network namespace that holds the device: a name as `ip netns` lists
	// it, an absolute path of a namespace file, or empty for the process's own.
	Netns string
	// Speed, if not zero, is believed before anything the device says.
	Speed fare.Bandwidth
	// Only, if not empty, is the one source that is asked: SourceTBF, SourceEthtool or
	// SourcePCIe. Empty asks all, in the order of belief.
	Only Source
}

// Config is what a Watcher is made of. It is not changed after New.
type Config struct {
	// SubPorts are the devices; an Event names them by their index here. Several
	// sub-ports may name one device.
	SubPorts []SubPort
	// Logger receives what an operator may want to know; nil discards it.
	Logger *slog.Logger
}

// Source says who vouches for a speed.
type Source string

// The sources of a speed, best first. The zero value means that no one knows it.
const (
	SourceConfig  Source = "config"  // the configuration
	SourceTBF     Source = "tbf"     // root tbf qdisc, or the root classes of an htb qdisc
	SourceEthtool Source = "ethtool" // the driver, ETHTOOL_GLINKSETTINGS
	SourcePCIe    Source = "pcie"    // the device's PCIe link
)

// Event is the whole state of one sub-port. It is never changed once handed over.
type Event struct {
	// SubPort is the index in Config.SubPorts.
	SubPort int
	// Up is true if packets can leave: the device exists, is administratively up, has
	// its carrier, and its operational state (RFC 2863, Section 3.1.14) is up or unknown.
	Up bool
	// Speed in bit/s; zero if unknown. It is the last known one while the device is down.
	Speed fare.Bandwidth
	// SpeedSource is who said so; empty if Speed is zero.
	SpeedSource Source
	// Ifindex of the device in its namespace, zero if it is absent.
	Ifindex int
	// Reason says why Up is false; empty if it is true.
	Reason string
	// Addresses that can be used (IPv6 addresses appear once duplicate address detection
	// has passed), link-local ones included, without zone, in ascending order.
	Addresses []netip.Prefix
	// Transitions counts how often Up has changed since the start. A reader that sees it
	// grow by two with Up unchanged has missed a flap.
	Transitions uint64
}

func (e *Event) equal(f *Event) bool {
	return e.SubPort == f.SubPort && e.Up == f.Up && e.Speed == f.Speed && e.SpeedSource == f.SpeedSource &&
		e.Ifindex == f.Ifindex && e.Reason == f.Reason && slices.Equal(e.Addresses, f.Addresses)
}

// LinkLocal returns the first IPv6 link-local address, or the zero Addr.
func (e *Event) LinkLocal() netip.Addr {
	for _, p := range e.Addresses {
		if p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
			return p.Addr()
		}
	}
	return netip.Addr{}
}

// Stats counts what the namespace goroutines did.
type Stats struct {
	Messages uint64 // rtnetlink messages read
	Resyncs  uint64 // full reads of a namespace: one at its start, one after each overrun
	Overruns uint64 // ENOBUFS and truncated datagrams: messages were lost
}

// Watcher watches sub-ports. Knock, Take and Stats may be called from any goroutine.
type Watcher struct {
	log        *slog.Logger
	namespaces []*namespace
	knock      chan struct{}

	mu    sync.Mutex // guards what follows
	state []Event    // last reported, by sub-port
	known []bool     // state holds a report
	dirty []bool     // changed since the last Take
	stats Stats
}

// New checks the configuration. Nothing is opened before Run.
func New(cfg Config) (*Watcher, error) {
	w := &Watcher{
		log:   cfg.Logger,
		knock: make(chan struct{}, 1),
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
			err = fmt.Errorf("device %s: speed source %q: a device can be asked for %s, %s or %s", sp.Device, sp.Only, SourceTBF, SourceEthtool, SourcePCIe)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sub-port %d: %w", i, err))
			continue
		}
		at := slices.IndexFunc(w.namespaces, func(n *namespace) bool { return n.netns == sp.Netns })
		if at < 0 {
			at = len(w.namespaces)
			w.namespaces = append(w.namespaces, &namespace{
				w: w, netns: sp.Netns, sysfs: "/sys", tick: time.Second, receiveBuffer: 4 << 20,
			})
		}
		n := w.namespaces[at]
		n.ports = append(n.ports, &port{index: i, device: sp.Device, configured: sp.Speed, only: sp.Only})
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return w, nil
}

// checkDevice refuses what can never be an interface's name, which would otherwise look
// like a device that is not there yet.
func checkDevice(name string) error {
	const most = 15 // IFNAMSIZ without the terminating zero
	if name == "" || name == "." || name == ".." || len(name) > most {
		return fmt.Errorf("device %q: an interface name has 1 to %d bytes", name, most)
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c == '/' || c == ':' || c == 0x7f {
			return fmt.Errorf("device %q: an interface name has no spaces, slashes or colons", name)
		}
	}
	return nil
}

// Run watches until ctx ends and returns when every goroutine has ended. It reports
// every sub-port once at the start, absent ones too. What goes wrong (a namespace that
// is missing or may not be entered) is the Reason of its sub-ports and tried again.
// Run may be called once.
func (w *Watcher) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, n := range w.namespaces {
		wg.Go(func() { n.run(ctx) })
	}
	wg.Wait()
}

// Knock returns a channel that holds one token if there is something to Take.
func (w *Watcher) Knock() <-chan struct{} { return w.knock }

// Take returns the state of each sub-port that changed since the last Take, in order of
// their index, in buf's memory from its start (buf may be nil).
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

// Stats returns the counters.
func (w *Watcher) Stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.stats
}

// report stores e if it says something new, and knocks.
func (w *Watcher) report(e Event) {
	w.mu.Lock()
	last := &w.state[e.SubPort]
	e.Transitions = last.Transitions
	if w.known[e.SubPort] && e.equal(last) {
		w.mu.Unlock()
		return
	}
	if w.known[e.SubPort] && e.Up != last.Up {
		e.Transitions++
	}
	*last, w.known[e.SubPort], w.dirty[e.SubPort] = e, true, true
	w.mu.Unlock()
	select {
	case w.knock <- struct{}{}:
	default: // a token is there already: the reader will take this state too
	}
}

func (w *Watcher) count(f func(*Stats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.stats)
}
