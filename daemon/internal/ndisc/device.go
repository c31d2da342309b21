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
)

const (
	// RFC 4861, Section 10: MAX_INITIAL_RTR_ADVERTISEMENTS.
	initialAdvertisements = 3
	// Between the initial advertisements, and between looks at the device.
	initialInterval = time.Second
	// A solicitation that follows an answer sooner is not answered (Section 6.2.6 asks
	// for a limit; ours is shorter because a link has one peer, who waits).
	answerInterval = 50 * time.Millisecond
	// A device that cannot be used is tried again after this.
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
	unheard  time.Duration // a session that connects is advertised for after this, though the leaf was not heard
	log      *slog.Logger

	mu      sync.Mutex // guards what follows
	peer    netip.Addr // last router heard; zone as Resolver.Peer says
	trouble error      // why nothing can be heard, or nil
	changed chan struct{}
	conn    *ndp.Conn // while speaking
	asked   bool      // a session is about to connect
}

func newDevice(k key, r *Resolver) *device {
	return &device{key: k, interval: r.interval, unheard: r.unheard, changed: make(chan struct{}),
		log: r.log.With("device", k.name, "netns", k.netns)}
}

// state returns what is known, and a channel that is closed when that changes.
func (d *device) state() (netip.Addr, error, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.peer, d.trouble, d.changed
}

func (d *device) set(peer netip.Addr, trouble error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.peer != peer && d.peer.IsValid() && peer.IsValid() {
		d.log.Warn("another router was heard; an unnumbered session needs a link with two ends",
			"before", d.peer, "now", peer)
	}
	d.peer, d.trouble = peer, trouble
	close(d.changed)
	d.changed = make(chan struct{})
}

// connecting says that a session is about to connect.
func (d *device) connecting() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = true
	if d.conn != nil {
		d.conn.SetReadDeadline(longAgo)
	}
}

// takeAsked tells whether a session is about to connect, and forgets it.
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

// run speaks on the device until ctx ends, through its absence and its return.
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

// face is what the peer sees of us. When it changes the socket is opened again.
type face struct {
	index    int
	mtu      int
	hardware net.HardwareAddr
	local    netip.Addr // link-local, without zone
}

func (f *face) equal(g *face) bool {
	return f.index == g.index && f.local == g.local && bytes.Equal(f.hardware, g.hardware)
}

// look reads the device as it is now; to be called inside its namespace.
func (d *device) look() (face, error) {
	ifi, err := net.InterfaceByName(d.name)
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
	return face{}, errors.New("the device has no IPv6 link-local address: is it up, and IPv6 enabled?")
}

// open looks at the device and opens a socket on it.
func (d *device) open() (conn *ndp.Conn, f face, err error) {
	err = link.InNamespace(d.netns, func() (err error) {
		if f, err = d.look(); err != nil {
			return err
		}
		// The zone by number: see Resolver.Peer.
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

// explain says what an error means and what can be done.
func (d *device) explain(err error) error {
	where := d.name
	if d.netns != "" {
		where += " in network namespace " + d.netns
	}
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("router advertisements on %s: %w: grant CAP_NET_RAW%s, or give the session a static peer (the leaf's link-local address)",
			where, err, map[bool]string{true: " and CAP_SYS_ADMIN"}[d.netns != ""])
	}
	return fmt.Errorf("router advertisements on %s: %w", where, err)
}

// speak advertises and listens until ctx ends (nil) or the device changes.
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
		known    bool // a router has been heard
		answered time.Time
		sent     int
		waiting  bool // a session has been about to connect since the last advertisement
		nextSend = time.Now()
	)
	for {
		if wait := time.Until(nextSend); wait <= 0 {
			// A link that is down cannot send: that is no reason to stop listening.
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
		// Checked after the deadline is set, else the wake-up could be overwritten.
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
			err := link.InNamespace(d.netns, func() (err error) { then, err = d.look(); return err })
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
		// RFC 4861, Sections 6.1.1 and 6.1.2: only from a link, by the hop limit. Only from
		// this one: what came by others before the socket was bound to the device is
		// in its queue too.
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
				d.log.Info("neighbour found", "peer", peer)
				d.set(peer, nil)
			}
			// The leaf may have forgotten us. Who asked while this message was on its way
			// has not woken us: data that is there goes before a deadline.
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
		d.log.Debug("neighbour discovery message was not sent", "to", to, "error", err)
	}
}

// advertisement says that we are here and no default router (RFC 4861, Section 4.2:
// a lifetime of zero), and leaves every other parameter unspecified.
func advertisement(f face) ndp.Message {
	return &ndp.RouterAdvertisement{RouterSelectionPreference: ndp.Medium, Options: source(f)}
}

func solicitation(f face) ndp.Message {
	return &ndp.RouterSolicitation{Options: source(f)}
}

// source is the source link-layer address option, if the device has an address of the
// kind that the option carries.
func source(f face) []ndp.Option {
	if len(f.hardware) != 6 {
		return nil
	}
	return []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: f.hardware}}
}
