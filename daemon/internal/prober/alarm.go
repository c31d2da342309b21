package prober

import (
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// alarm is a timer that one goroutine waits for, and that any may set. A timer of the runtime would wake its monitor
// thread, too, which then polls while a goroutine runs; a goroutine that passes the alarm on would wake another thread.
type alarm struct {
	file  *os.File // of the kernel's timer fd
	fd    int
	raw   syscall.RawConn
	ready chan struct{} // one slot; with timer in place of all above if there is none
	timer *time.Timer
}

func newAlarm() *alarm {
	a := &alarm{}
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err == nil {
		a.fd, a.file = fd, os.NewFile(uintptr(fd), "timer")
		if a.raw, err = a.file.SyscallConn(); err == nil {
			return a
		}
		a.file.Close()
	}
	a.ready = make(chan struct{}, 1)
	a.timer = time.AfterFunc(time.Hour, func() {
		select {
		case a.ready <- struct{}{}:
		default:
		}
	})
	a.timer.Stop()
	return a
}

// wait returns when the alarm has rung.
func (a *alarm) wait() {
	if a.timer != nil {
		<-a.ready
		return
	}
	var expirations [8]byte
	_ = a.raw.Read(func(fd uintptr) bool {
		_, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&expirations)), unsafe.Sizeof(expirations))
		return errno == 0
	})
}

// set makes the alarm ring at a time, at once if that has passed, instead of at an earlier one that was set; the zero
// time stops it.
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

// close closes the alarm. It is the last call.
func (a *alarm) close() {
	if a.timer != nil {
		a.timer.Stop()
		return
	}
	a.file.Close()
}
