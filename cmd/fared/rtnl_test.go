package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of userfaultfd(2), linux/userfaultfd.h.
const (
	uffdVersion          = 0xaa
	uffdRequestAPI       = 0xc018aa3f
	uffdRequestRegister  = 0xc020aa00
	uffdRegisterMissing  = 1
	uffdMessage          = 32 // bytes
	uffdMessagePageFault = 0x12
)

// ioctl makes a request of a descriptor with a structure.
func ioctl(fd int, request uintptr, argument unsafe.Pointer) error {
	if _, _, no := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument)); no != 0 {
		return no
	}
	return nil
}

// missing makes the page of memory missing until the returned descriptor is closed.
func missing(page []byte) (fd int, err error) {
	n, _, no := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if no != 0 {
		return 0, fmt.Errorf("userfaultfd: %w", no)
	}
	api := [3]uint64{uffdVersion}
	register := [4]uint64{uint64(uintptr(unsafe.Pointer(unsafe.SliceData(page)))), uint64(len(page)), uffdRegisterMissing}
	return int(n), errors.Join(ioctl(int(n), uffdRequestAPI, unsafe.Pointer(&api)), ioctl(int(n), uffdRequestRegister, unsafe.Pointer(&register)))
}

// holdRTNL holds the kernel's lock of network configuration, RTNL, until release. The kernel holds it while it lists
// the interfaces with addresses, to memory whose page is missing until then.
func (b *prometheusBed) holdRTNL() (release func()) {
	b.t.Helper()
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		b.t.Fatal(err)
	}
	fd, err := missing(page)
	if err != nil {
		b.t.Fatal(err)
	}
	listed := make(chan error, 1)
	go func() {
		listed <- b.nodes["server0"].Do(func() error {
			socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(socket)
			interfaces := struct { // struct ifconf
				length int32
				buffer unsafe.Pointer
			}{int32(len(page)), unsafe.Pointer(unsafe.SliceData(page))}
			return ioctl(socket, unix.SIOCGIFCONF, unsafe.Pointer(&interfaces))
		})
	}()
	message := make([]byte, uffdMessage)
	if n, err := unix.Read(fd, message); err != nil || n != len(message) || message[0] != uffdMessagePageFault {
		b.t.Fatalf("userfaultfd: %d bytes %x, %v", n, message, err)
	}
	return func() {
		b.t.Helper()
		// Without the descriptor the kernel adds the page.
		if err := errors.Join(unix.Close(fd), <-listed, unix.Munmap(page)); err != nil {
			b.t.Error(err)
		}
	}
}

// slowKernel makes the kernel take a time for the next batch of changes of the agent, which act causes.
func (b *prometheusBed) slowKernel(by time.Duration, act func()) {
	b.t.Helper()
	release := b.holdRTNL()
	defer release()
	act()
	within(b.t, scenarioLimit, func() error {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", b.runs["agent"].Pid()))
		var waiting []string
		for _, thread := range threads {
			function, _ := os.ReadFile(thread) // a thread may have ended
			if strings.HasPrefix(string(function), "rt") {
				return nil
			}
			waiting = append(waiting, string(function))
		}
		return fmt.Errorf("no thread of the agent waits for RTNL, but in %q", waiting)
	})
	time.Sleep(by)
}
