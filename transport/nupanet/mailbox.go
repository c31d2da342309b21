package nupanet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/fared/fared/transport/internal/mailbox"
)

const (
	defaultDead = 2 * time.Second

	// An end looks for packets without a break for spinFor after the last one in either direction, then at intervals
	// from firstSleep to lastSleep, which double.
	spinFor    = 20 * time.Microsecond
	firstSleep = 50 * time.Microsecond
	lastSleep  = 5 * time.Millisecond
)

// box is an end of a cable through memory that is not coherent.
type box struct {
	cfg     Config
	tun     *tun
	end     *mailbox.File
	wake    chan struct{} // has an item after a packet was sent
	up      bool
	torn    uint64
	problem string // the last reason for which there is no carrier
}

// runMailbox is Run for memory that is not coherent.
func runMailbox(ctx context.Context, cfg Config) error {
	dead := cfg.Memory.DeadAfter
	if dead == 0 {
		dead = defaultDead
	}
	if dead < 10*time.Millisecond {
		return fmt.Errorf("peers dead after %v (Config.DeadAfter): use 10ms or more", dead)
	}
	number := 0
	if cfg.Peer.Less(cfg.Local) {
		number = 1
	}
	end, err := mailbox.Open(cfg.Memory.File, number)
	if err != nil {
		return err
	}
	defer end.Close()
	t, err := openTUN(cfg.Device, cfg.MTU)
	if err != nil {
		return err
	}
	b := &box{cfg: cfg, tun: t, end: end, wake: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(ctx)
	reading := make(chan error, 1)
	go func() { reading <- b.read(ctx) }()
	tick := time.NewTicker(dead / mailbox.Beats)
	defer tick.Stop()
	if err = b.beat(); err == nil {
		err = b.poll(ctx, tick.C, reading)
	}
	cancel()
	err = errors.Join(err, t.Close())
	<-reading
	return err
}

// poll gives arrived packets to the kernel until ctx ends or the reader has failed.
func (b *box) poll(ctx context.Context, tick <-chan time.Time, reading chan error) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	sleep, last := firstSleep, time.Now()
	for {
		received := b.end.Receive(b.deliver)
		pause := closed
		switch {
		case received > 0:
			sleep, last = firstSleep, time.Now()
		case time.Since(last) < spinFor:
			runtime.Gosched()
		default:
			pause = nil
			timer.Reset(sleep)
			sleep = min(2*sleep, lastSleep)
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-reading:
			reading <- err
			return err
		case <-tick:
			if err := b.beat(); err != nil {
				return err
			}
		case <-b.wake:
			sleep, last = firstSleep, time.Now()
		case <-timer.C:
		case <-pause:
		}
	}
}

// closed is a channel that never blocks.
var closed = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// beat publishes a heartbeat, and sets the carrier by that of the peer.
func (b *box) beat() error {
	why := b.end.Beat()
	if n := b.end.Torn(); n > b.torn {
		b.torn = n
		b.cfg.Log.Warn("a packet differs from its checksum: the memory loses writes, or another program writes to it", "device", b.cfg.Device, "times", n)
	}
	if why != nil && why.Error() != b.problem {
		b.problem = why.Error()
		b.cfg.Log.Warn("the cable is down", "device", b.cfg.Device, "error", why)
	}
	if up := why == nil; up != b.up {
		b.up = up
		if up {
			b.problem = ""
			b.cfg.Log.Info("the cable is up", "device", b.cfg.Device)
		}
		return b.tun.setCarrier(up)
	}
	return nil
}

func (b *box) deliver(packet []byte) {
	if err := b.tun.send(packet); err != nil {
		b.cfg.Log.Debug("the kernel has refused a packet", "device", b.cfg.Device, "bytes", len(packet), "error", err)
	}
}

// read sends the device's packets until it is closed. While the peer has no session, packets are dropped, as by any
// network.
func (b *box) read(ctx context.Context) error {
	packet := make([]byte, headerSize+maxPacket)
	for {
		n, err := b.tun.Read(packet)
		switch {
		case errors.Is(err, os.ErrClosed):
			return nil
		case err != nil:
			return fmt.Errorf("device %s: %w", b.cfg.Device, err)
		case n <= headerSize:
			continue
		}
		for begin := time.Now(); ctx.Err() == nil; {
			sent, up := b.end.Send(packet[:n])
			if sent {
				select {
				case b.wake <- struct{}{}:
				default:
				}
			}
			if sent || !up {
				break
			}
			if time.Since(begin) < spinFor {
				runtime.Gosched()
			} else {
				time.Sleep(firstSleep)
			}
		}
	}
}
