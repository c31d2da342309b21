package nupa

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// partKey is set in the processes of the test's binary that run in the machines: serve is the end of a TCP transfer at
// the second machine, fetch at the first one, and both count.
const partKey = "FARED_NUPA_PART"

// run runs such a process: an end of a transfer until it is killed.
func run(part string, arguments []string) error {
	switch {
	case part == "serve" && len(arguments) == 1:
		return serveStream(arguments[0])
	case part == "fetch" && len(arguments) == 2:
		return fetchStream(arguments[0], arguments[1])
	case part == "count" && len(arguments) == 1:
		return count(arguments[0])
	}
	return fmt.Errorf("%s=%q with %q", partKey, part, arguments)
}

const (
	counterAt  = 2048 // offset of a word that the layout does not use
	increments = 2_000_000
)

// count increments a word of the memory at the same time as the other machine.
func count(file string) error {
	fd, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	defer unix.Close(fd)
	memory, err := unix.Mmap(fd, 0, 2<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return os.NewSyscallError("mmap", err)
	}
	counter, ready := (*atomic.Uint64)(unsafe.Pointer(&memory[counterAt])), (*atomic.Uint64)(unsafe.Pointer(&memory[counterAt+64]))
	ready.Add(1)
	for deadline := time.Now().Add(time.Minute); ready.Load() < 2; {
		if time.Now().After(deadline) {
			return errors.New("the other machine does not count")
		}
	}
	for range increments {
		counter.Add(1)
	}
	return nil
}
