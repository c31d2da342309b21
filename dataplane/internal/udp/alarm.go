package udp

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alarm is when Core.Tick is wanted, and a timer for it: the kernel's, because one of Go's comes up to a millisecond late in a process
// that has nothing else to do (its poller waits in milliseconds), and acknowledgements wait 200 µs.
type alarm struct {
	wanted time.Duration // 0: never
	set    time.Duration // when the timer goes off, at the latest wanted; 0: it is not set
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

// WakeAt implements wire.Out. A moment that has passed means at once, but not before the call that holds the lock is over.
func (e *Endpoint) WakeAt(at time.Duration) {
	e.alarm.wanted = at
	// Most wishes move to later, with every acknowledgement: the timer stays and finds out when it goes off.
	if at != 0 && (e.alarm.set == 0 || at < e.alarm.set) {
		e.setAlarm()
	}
}

// setAlarm sets the timer for what is wanted.
func (e *Endpoint) setAlarm() {
	a := &e.alarm
	a.set = a.wanted
	a.spec.Value = unix.NsecToTimespec(max(1, int64(a.wanted-e.config.Now()))) // 0 would stop it
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		_ = unix.TimerfdSettime(a.fd, 0, &a.spec, nil) // fails for times that are none only
	}
}

// tick calls Core.Tick when it is time, until the alarm is closed.
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
