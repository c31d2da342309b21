// Package alarm calls protocol cores at the times that they request, by a timer of the kernel: a Go timer is up to a
// millisecond late in an idle process (its poller waits in milliseconds), and acknowledgements are delayed by only 200
// µs.
package alarm

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Alarm holds the time of the next tick and a timer for it.
type Alarm struct {
	now  func() time.Duration
	do   func(func())
	tick func()
	file *os.File
	wait sync.WaitGroup

	// The device's lock guards these fields.
	wanted time.Duration // time of the next tick; 0 disables it
	set    time.Duration // expiry of the timer, not after wanted; 0 if it is not set
	spec   unix.ItimerSpec

	// mu guards fd against Close, which does not hold the device's lock. mu is acquired inside the device's lock.
	mu     sync.Mutex
	fd     int
	closed bool
}

// Open makes an alarm. now returns the time since a fixed moment, do calls a function with the device's lock held, and
// tick is called with that lock.
func Open(now func() time.Duration, do func(func()), tick func()) (*Alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	a := &Alarm{now: now, do: do, tick: tick, fd: fd, file: os.NewFile(uintptr(fd), "timer")}
	a.wait.Go(a.run)
	return a, nil
}

// WakeAt requests a tick, and replaces any earlier request; 0 cancels it. A time in the past requests a tick
// immediately after the current call releases the lock. The caller holds the device's lock.
func (a *Alarm) WakeAt(at time.Duration) {
	a.wanted = at
	// Most requests move to a later time, with every acknowledgement. The timer is not changed; run checks the time
	// when it expires.
	if at != 0 && (a.set == 0 || at < a.set) {
		a.arm()
	}
}

// arm sets the timer to the wanted time.
func (a *Alarm) arm() {
	a.set = a.wanted
	a.spec.Value = unix.NsecToTimespec(max(1, int64(a.wanted-a.now()))) // 0 would stop the timer
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		_ = unix.TimerfdSettime(a.fd, 0, &a.spec, nil) // fails only for invalid times
	}
}

// run ticks until the alarm is closed.
func (a *Alarm) run() {
	due := func() {
		a.set = 0
		switch at := a.wanted; {
		case at == 0:
		case a.now() < at:
			a.arm()
		default:
			a.wanted = 0
			a.tick()
		}
	}
	var expirations [8]byte
	for {
		if _, err := a.file.Read(expirations[:]); err != nil {
			return
		}
		a.do(due)
	}
}

// Close waits for a call of tick to end. It must be called without the device's lock; a second call does nothing.
func (a *Alarm) Close() {
	a.mu.Lock()
	if !a.closed {
		a.closed = true
		_ = a.file.Close()
	}
	a.mu.Unlock()
	a.wait.Wait()
}
