package slots

import (
	"context"
	"io/fs"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/slotlayout"
)

// Mark is a moment of a table.
type Mark struct {
	from *mapping
	wake uint32
}

// Mark returns the present moment, for Wait.
func (t *Table) Mark() Mark {
	m := t.mem.Load()
	if m == nil {
		return Mark{}
	}
	defer runtime.KeepAlive(m)
	return Mark{m, m.mem.Load32(headerWake)}
}

// recheck is the greatest time for which Wait does not notice that another file has appeared at the path without a mark
// in the previous one.
const recheck = time.Second

// Wait waits until the table has changed since a mark, or ctx ends, and returns the mark of that moment. It blocks a
// thread. A missing or unusable file is not an error: Wait waits for another one. The error is that of ctx.
func (t *Table) Wait(ctx context.Context, since Mark) (Mark, error) {
	stop := context.AfterFunc(ctx, func() { wakeAll(since.from) })
	defer stop()
	t.Refresh() // a failure leaves the table unchanged
	for {
		if now := t.Mark(); now != since {
			t.current()
			return t.Mark(), nil
		}
		if ctx.Err() != nil {
			return since, context.Cause(ctx)
		}
		if since.from == nil {
			return since, fs.ErrClosed
		}
		slice := recheck
		if since.from.mem.Load32(headerState) != slotlayout.StateLive {
			slice /= 10 // another file is expected
		}
		if deadline, ok := ctx.Deadline(); ok {
			slice = min(slice, max(time.Until(deadline), 0))
		}
		// No process wakes the readers of a truncated file: its size is checked before an access, unless the writer has
		// just changed it.
		if timedOut := futexWait(since.from, since.wake, slice); timedOut {
			t.Refresh() // a failure leaves the table unchanged
		}
	}
}

// wakeAll ends the system calls of every Wait for a file. The mapping is read-only, which is enough for FUTEX_WAKE.
func wakeAll(m *mapping) {
	if m != nil {
		const futexWake, all = 1, 1<<31 - 1
		unix.Syscall(unix.SYS_FUTEX, uintptr(m.mem.Word(headerWake)), futexWake, all)
	}
}

// futexWait waits until the word differs from value, a wake, or the end of the timeout, which it reports. Spurious
// returns are possible.
func futexWait(m *mapping, value uint32, timeout time.Duration) (timedOut bool) {
	const wait = 0
	ts := unix.NsecToTimespec(int64(timeout))
	_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(m.mem.Word(headerWake)), wait, uintptr(value), uintptr(unsafe.Pointer(&ts)), 0, 0)
	runtime.KeepAlive(m)
	return errno == unix.ETIMEDOUT
}
