package ndisc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"

	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/internal/netns"
)

const (
	// RFC 4861, Section 10: MAX_INITIAL_RTR_ADVERTISEMENTS.
	initialAdvertisements = 3
	// Time between the initial advertisements, and between checks of the device.
	initialInterval = time.Second
	// Least time between two answers to solicitations. Section 6.2.6 requires 3 s; this
	// is shorter because a link has one peer, and that peer waits.
	answerInterval = 50 * time.Millisecond
	// Time until an unusable device is opened again.
	retryInterval = 200 * time.Millisecond
)

var (
	allNodes   = netip.MustParseAddr("ff02::1")
	allRouters = netip.MustParseAddr("ff02::2")
)

// device advertises and listens on one device.
type device struct {
	key
	interval time.Duration
	unheard  time.Duration // delay of the advertisement for a connecting session if the leaf sends nothing
	log      *slog.Logger
	cancel   context.CancelFunc // ends run

	mu      sync.Mutex // guards the fields below
	peer    netip.Addr // source of the last router advertisement, with the zone that Resolver.Peer documents
	trouble error      // reason why the device cannot receive, or nil
	changed chan struct{}
	conn    *ndp.Conn // nil while the device is not open
	asked   bool      // a session is about to connect
}

func newDevice(k key, r *Resolver) *device {
	return &device{key: k, interval: r.interval, unheard: r.unheard, changed: make(chan struct{}),
		log: r.log.With("device", k.name, "netns", k.netns)}
}

// state returns the peer, the current error, and a channel that is closed when either changes.
func (d *device) state() (netip.Addr, error, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.peer, d.trouble, d.changed
}

func (d *device) set(peer netip.Addr, trouble error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.peer != peer && d.peer.IsValid() && peer.IsValid() {
		d.log.Warn("another router advertises on the link; an unnumbered session needs a link with two ends",
			"before", d.peer, "now", peer)
	}
	d.peer, d.trouble = peer, trouble
	close(d.changed)
	d.changed = make(chan struct{})
}

// connecting notes that a session is about to connect, and wakes the reader.
func (d *device) connecting() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = true
	if d.conn != nil {
		d.conn.SetReadDeadline(longAgo)
	}
}

// takeAsked reports whether a session is about to connect, and clears the note.
func (d *device) takeAsked() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	asked := d.asked
	d.asked = false
	return asked
}

func (d *device) setConn(conn *ndp.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conn = conn
}

// longAgo as a deadline wakes a reader.
var longAgo = time.Unix(1, 0)

// run advertises and listens on the device until ctx ends, and reopens the device after errors.
func (d *device) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := d.speak(ctx)
		if ctx.Err() != nil {
			return
		}
		d.set(netip.Addr{}, err)
		select {
		case <-ctx.Done():
		case <-time.After(retryInterval):
		}
	}
}

// face holds the properties of the device that the peer sees. When they change, the socket is reopened.
type face struct {
	index    int
	mtu      int
	hardware net.HardwareAddr
	local    netip.Addr // link-local, without zone
}

func (f *face) equal(g *face) bool {
	return f.index == g.index && f.local == g.local && bytes.Equal(f.hardware, g.hardware)
}

// look reads the device's current state; the caller has entered the device's namespace.
func (d *device) look() (face, error) {
	ifi, err := link.Interface(d.name)
	if err != nil {
		return face{}, err
	}
	addrs, err := ifi.Addrs()
	if err != nil {
		return face{}, err
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() {
			return face{ifi.Index, ifi.MTU, ifi.HardwareAddr, p.Addr()}, nil
		}
	}
	return face{}, errors.New("the device has no IPv6 link-local address: set it up, and enable IPv6 on it")
}

// open reads the device and opens a socket on it.
func (d *device) open() (conn *ndp.Conn, f face, err error) {
	err = netns.In(d.netns, func() (err error) {
		if f, err = d.look(); err != nil {
			return err
		}
		// The zone is a number: see Resolver.Peer.
		ifi := &net.Interface{Index: f.index, MTU: f.mtu, Name: strconv.Itoa(f.index), HardwareAddr: f.hardware}
		if conn, _, err = ndp.Listen(ifi, ndp.Addr(f.local.String())); err != nil {
			return err
		}
		return errors.Join(conn.JoinGroup(allNodes), conn.JoinGroup(allRouters))
	})
	if err == nil {
		var filter ipv6.ICMPFilter
		filter.SetAll(true) // block
		filter.Accept(ipv6.ICMPTypeRouterAdvertisement)
		filter.Accept(ipv6.ICMPTypeRouterSolicitation)
		err = errors.Join(conn.SetICMPFilter(&filter), conn.SetControlMessage(ipv6.FlagHopLimit|ipv6.FlagInterface, true))
	}
	if err != nil {
		if conn != nil {
			conn.Close()
		}
		return nil, face{}, d.explain(err)
	}
	return conn, f, nil
}

// explain adds the device and, for a missing privilege, the remedy to an error.
func (d *device) explain(err error) error {
	where := d.name
	if d.netns != "" {
		where += " in network namespace " + d.netns
	}
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("router advertisements on %s: %w: grant CAP_NET_RAW%s, or set a static peer for the session (the leaf's link-local address)",
			where, err, map[bool]string{true: " and CAP_SYS_ADMIN"}[d.netns != ""])
	}
	return fmt.Errorf("router advertisements on %s: %w", where, err)
}

// speak advertises and listens until ctx ends, and returns nil then; else the error of the device or its change.
func (d *device) speak(ctx context.Context) error {
	conn, now, err := d.open()
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetReadDeadline(longAgo) })()
	d.setConn(conn)
	defer d.setConn(nil)
	d.set(netip.Addr{}, nil)

	var (
		known    bool // a router has advertised
		answered time.Time
		sent     int
		waiting  bool // a session has been about to connect since the last advertisement
		nextSend = time.Now()
	)
	for {
		if wait := time.Until(nextSend); wait <= 0 {
			// Sending fails while the link is down; listening goes on.
			d.send(conn, advertisement(now), allNodes)
			if !known {
				d.send(conn, solicitation(now), allRouters)
			}
			sent++
			waiting = false
			nextSend = time.Now().Add(d.interval)
			if sent < initialAdvertisements || !known {
				nextSend = time.Now().Add(min(d.interval, initialInterval))
			}
		}
		if err := conn.SetReadDeadline(time.Now().Add(min(initialInterval, time.Until(nextSend)))); err != nil {
			return d.explain(err)
		}
		// Check ctx only after the deadline is set: an earlier wake-up would be overwritten.
		if ctx.Err() != nil {
			return nil
		}
		if d.takeAsked() {
			waiting = true
			if soon := time.Now().Add(d.unheard); soon.Before(nextSend) {
				nextSend = soon
			}
			continue
		}
		m, control, from, err := conn.ReadFrom()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			then := now
			err := netns.In(d.netns, func() (err error) { then, err = d.look(); return err })
			if err != nil {
				return d.explain(err)
			}
			if !then.equal(&now) {
				return d.explain(errors.New("the device has changed"))
			}
			continue
		case err != nil:
			return d.explain(err)
		}
		from = from.WithZone("")
		// RFC 4861, Sections 6.1.1 and 6.1.2: the hop limit shows that the packet is from a
		// link. It must be this link: the queue may hold packets of other links, received
		// before the socket was bound to the device.
		if control == nil || control.HopLimit != ndp.HopLimit || control.IfIndex != now.index {
			continue
		}
		switch m.(type) {
		case *ndp.RouterAdvertisement:
			if !from.IsLinkLocalUnicast() {
				continue
			}
			zone := d.name
			if d.netns != "" {
				zone = strconv.Itoa(now.index)
			}
			if peer := from.WithZone(zone); !known || peer != d.peer { // only this goroutine writes d.peer
				known = true
				d.log.Info("neighbor found", "peer", peer)
				d.set(peer, nil)
			}
			// The leaf may have dropped this host as its neighbor. A request during the
			// arrival of this message has not woken the reader: a read returns available data
			// before it checks the deadline.
			if d.takeAsked() || waiting {
				nextSend = time.Now()
			}
		case *ndp.RouterSolicitation:
			if time.Since(answered) < answerInterval {
				continue
			}
			answered = time.Now()
			to := allNodes
			if from.IsLinkLocalUnicast() {
				to = from
			}
			d.send(conn, advertisement(now), to)
		}
	}
}

func (d *device) send(conn *ndp.Conn, m ndp.Message, to netip.Addr) {
	if err := conn.WriteTo(m, nil, to); err != nil {
		d.log.Debug("neighbor discovery message was not sent", "to", to, "error", err)
	}
}

// advertisement announces this host, not as a default router (RFC 4861, Section 4.2:
// a lifetime of zero), and leaves every other parameter unspecified.
func advertisement(f face) ndp.Message {
	return &ndp.RouterAdvertisement{RouterSelectionPreference: ndp.Medium, Options: source(f)}
}

func solicitation(f face) ndp.Message {
	return &ndp.RouterSolicitation{Options: source(f)}
}

// source returns the source link-layer address option, or no option if the device's
// address does not have 6 octets.
func source(f face) []ndp.Option {
	if len(f.hardware) != 6 {
		return nil
	}
	return []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: f.hardware}}
}
