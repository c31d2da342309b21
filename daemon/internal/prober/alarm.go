package prober

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// alarm is a timer that ready reports. A timer of the runtime would wake its monitor thread, too, which then polls
// while a goroutine runs: a quarter of the time of all proofs.
type alarm struct {
	ready chan struct{} // one slot
	file  *os.File      // of the kernel's timer fd
	fd    int
	timer *time.Timer   // in its place if there is none
	ended chan struct{} // closed when run has ended
}

func newAlarm() *alarm {
	a := &alarm{ready: make(chan struct{}, 1), ended: make(chan struct{})}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err == nil {
		a.fd, a.file = fd, os.NewFile(uintptr(fd), "timer")
		if raw, err := a.file.SyscallConn(); err == nil {
			go a.run(raw.Read)
			return a
		}
		a.file.Close()
	}
	close(a.ended)
	a.timer = time.AfterFunc(time.Hour, a.ring)
	a.timer.Stop()
	return a
}

// run waits for the kernel's timer until its file is closed.
func (a *alarm) run(read func(func(uintptr) bool) error) {
	defer close(a.ended)
	var expirations [8]byte
	_ = read(func(fd uintptr) bool {
		if _, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&expirations)), unsafe.Sizeof(expirations)); errno == 0 {
			a.ring()
		}
		return false
	})
}

func (a *alarm) ring() {
	select {
	case a.ready <- struct{}{}:
	default:
	}
}

// set makes the alarm ring after a time, instead of an earlier one; the zero time stops it.
func (a *alarm) set(at time.Time) {
	switch wait := max(1, time.Until(at)); {
	case a.timer == nil:
		var spec unix.ItimerSpec // zero stops the timer
		if !at.IsZero() {
			spec.Value = unix.NsecToTimespec(int64(wait))
		}
		unix.RawSyscall6(unix.SYS_TIMERFD_SETTIME, uintptr(a.fd), 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
	case at.IsZero():
		a.timer.Stop()
	default:
		a.timer.Reset(wait)
	}
}

// stop ends run.
func (a *alarm) stop() {
	if a.timer != nil {
		a.timer.Stop()
	} else {
		a.file.Close()
	}
	<-a.ended
}
