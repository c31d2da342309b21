package udp

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alarm holds the time of the next Core.Tick and a timer for it. It uses a timer of the kernel, because a Go timer is up to
// a millisecond late in an idle process (its poller waits in milliseconds), and acknowledgements are delayed by only 200
// µs.
type alarm struct {
	wanted time.Duration // time of the next tick; 0 disables it
	set    time.Duration // expiry of the timer, not after wanted; 0 if it is not set
	fd     int
	file   *os.File // of fd
	spec   unix.ItimerSpec
}

func (a *alarm) open() (err error) {
	if a.fd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC); err != nil {
		return os.NewSyscallError("timerfd_create", err)
	}
	a.file = os.NewFile(uintptr(a.fd), "timer")
	return nil
}

// WakeAt implements wire.Out. A time in the past requests a tick immediately after the current call releases the lock.
func (e *Endpoint) WakeAt(at time.Duration) {
	e.alarm.wanted = at
	// Most requests move to a later time, with every acknowledgement. The timer is not changed; tick checks the time when it
	// expires.
	if at != 0 && (e.alarm.set == 0 || at < e.alarm.set) {
		e.setAlarm()
	}
}

// setAlarm sets the timer to the wanted time.
func (e *Endpoint) setAlarm() {
	a := &e.alarm
	a.set = a.wanted
	a.spec.Value = unix.NsecToTimespec(max(1, int64(a.wanted-e.config.Now()))) // 0 would stop the timer
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		_ = unix.TimerfdSettime(a.fd, 0, &a.spec, nil) // fails only for invalid times
	}
}

// tick calls Core.Tick when it is due, until the alarm is closed.
func (e *Endpoint) tick() {
	due := func() {
		e.alarm.set = 0
		switch at := e.alarm.wanted; {
		case at == 0:
		case e.config.Now() < at:
			e.setAlarm()
		default:
			e.alarm.wanted = 0
			e.count.ticks++
			e.config.Core.Tick()
		}
	}
	var expirations [8]byte
	for {
		if _, err := e.alarm.file.Read(expirations[:]); err != nil {
			return
		}
		e.config.Do(due)
	}
}
