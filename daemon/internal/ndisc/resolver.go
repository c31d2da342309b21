package ndisc

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// DefaultInterval is the time between router advertisements, within the limits of RFC 4861,
// Section 6.2.1 (MaxRtrAdvInterval, 4 to 1800 seconds) and equal to FRR's.
const DefaultInterval = 10 * time.Second

// Config configures a Resolver. The zero value is usable.
type Config struct {
	// Interval between unsolicited advertisements; 0 means DefaultInterval.
	Interval time.Duration
	// Logger receives messages for operators; nil discards them.
	Logger *slog.Logger
}

// Resolver finds neighbors and advertises to them. Its methods may be called from any
// goroutine.
type Resolver struct {
	interval time.Duration
	unheard  time.Duration // as in device
	log      *slog.Logger
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu      sync.Mutex // guards the fields below
	closed  bool
	devices map[key]*device
}

// key identifies a device.
type key struct {
	netns, name string
}

// New returns a Resolver. It opens a device at the first call of Peer for it.
func New(cfg Config) *Resolver {
	r := &Resolver{interval: cfg.Interval, unheard: initialInterval, log: cfg.Logger, devices: map[key]*device{}}
	if r.interval <= 0 {
		r.interval = DefaultInterval
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// ErrClosed is returned by Peer after Close.
var ErrClosed = errors.New("the resolver is closed")

// Peer waits for the link-local address of the router on the device. The first call for
// a device starts advertisements on it, which continue until Keep or Close so that the peer
// keeps this host as its neighbor. Peer also waits for a device that is missing or down.
//
// The caller is about to connect, perhaps after a link failure. The leaf has then dropped
// this host as its neighbor and refuses the connection until the next advertisement. So
// each call also sends an advertisement: after the leaf's next one, or after a second. An
// immediate one would be lost with FRR 8.4: its zebra receives an advertisement while the
// link comes up, its bgpd drops the neighbor, and zebra never reports it again.
//
// The address's zone is the device. In another network namespace (netns not empty) it
// is the device's index as a number instead: package net remembers the index of a zone's
// name for the whole process, and the same name is another device in each namespace.
//
// Errors: ctx's, joined with the last problem of the device; immediately an error that
// wraps os.ErrPermission if the process lacks a privilege; ErrClosed.
func (r *Resolver) Peer(ctx context.Context, name, netns string) (netip.Addr, error) {
	d, err := r.device(key{netns: netns, name: name})
	if err != nil {
		return netip.Addr{}, err
	}
	d.connecting()
	for {
		peer, trouble, changed := d.state()
		switch {
		case peer.IsValid():
			return peer, nil
		case errors.Is(trouble, os.ErrPermission):
			return netip.Addr{}, trouble
		}
		select {
		case <-changed:
		case <-r.ctx.Done():
			return netip.Addr{}, ErrClosed
		case <-ctx.Done():
			if trouble == nil {
				trouble = errSilent
			}
			return netip.Addr{}, &notFound{trouble, ctx.Err()}
		}
	}
}

// errSilent is the problem of a device on which everything works but the peer.
var errSilent = errors.New("no router advertisement was received; the other end has to send them (FRR: neighbor DEVICE interface)")

// notFound is the error of a wait that has ended. Its text is the problem of the device: the caller has ended the wait.
type notFound struct{ trouble, ended error }

func (e *notFound) Error() string   { return e.trouble.Error() }
func (e *notFound) Unwrap() []error { return []error{e.trouble, e.ended} }

func (r *Resolver) device(k key) (*device, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, ErrClosed
	}
	d := r.devices[k]
	if d == nil {
		d = newDevice(k, r)
		r.devices[k] = d
		ctx, cancel := context.WithCancel(r.ctx)
		d.cancel = cancel
		r.wg.Go(func() { d.run(ctx) })
	}
	return d, nil
}

// Device names a device; Netns is empty for the process's own network namespace.
type Device struct{ Netns, Name string }

// Keep stops the advertisements on all other devices, over which no session remains. A Peer call for one of them waits
// for the end of its context.
func (r *Resolver) Keep(devices []Device) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, d := range r.devices {
		if !slices.Contains(devices, Device{k.netns, k.name}) {
			d.cancel()
			delete(r.devices, k)
		}
	}
}

// Close stops the advertisements and waits for every goroutine to exit.
func (r *Resolver) Close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.wg.Wait()
}
