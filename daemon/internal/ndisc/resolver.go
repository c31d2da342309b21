package ndisc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"
)

// DefaultInterval between router advertisements, within the limits of RFC 4861,
// Section 6.2.1 (MaxRtrAdvInterval, 4 to 1800 seconds) and equal to FRR's.
const DefaultInterval = 10 * time.Second

// Config is what a Resolver is made of.
type Config struct {
	// Interval between unsolicited advertisements; zero: DefaultInterval.
	Interval time.Duration
	// Logger receives what an operator may want to know; nil discards it.
	Logger *slog.Logger
}

// Resolver finds neighbours and advertises to them. Its methods may be called from any
// goroutine.
type Resolver struct {
	interval time.Duration
	unheard  time.Duration // as a device's
	log      *slog.Logger
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu      sync.Mutex // guards what follows
	closed  bool
	devices map[key]*device
}

// key names a device.
type key struct {
	netns, name string
}

// New returns a Resolver that does nothing until it is asked for a device.
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

// ErrClosed is returned by Peer once Close has been called.
var ErrClosed = errors.New("the resolver is closed")

// Peer waits until the link-local address of the router on the device is known. The
// first call for a device begins to advertise on it, and that goes on until Close, for
// the peer must not forget us. A device that is missing or down is waited for.
//
// Who asks is about to connect, perhaps because the link was down, and then the leaf has
// forgotten us and refuses us until it hears us again. So each call also advertises: as
// soon as the leaf is heard, or after a second. It does not do so at once, because FRR
// (8.4) forgets for good a neighbour that speaks while the link is still coming up: its
// zebra keeps what its bgpd has dropped, and never tells it again.
//
// The address's zone is the device. In another network namespace (netns not empty) it
// is the device's index as a number instead: package net remembers the index of a zone's
// name for the whole process, and the same name is another device in each namespace.
//
// Errors: ctx's, with what was amiss last; one for which errors.Is(err,
// os.ErrPermission) holds, at once, if the process lacks a privilege; ErrClosed.
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
				trouble = errors.New("no router advertisement was heard")
			}
			return netip.Addr{}, fmt.Errorf("peer on %s: %w (%w)", name, trouble, ctx.Err())
		}
	}
}

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
		r.wg.Go(func() { d.run(r.ctx) })
	}
	return d, nil
}

// Close stops advertising and returns when every goroutine has ended.
func (r *Resolver) Close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.wg.Wait()
}
