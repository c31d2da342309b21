package main

import (
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

// holdRTNL holds the kernel's lock of network configuration, RTNL, until release. The kernel holds it while it lists
// the interfaces with addresses, to memory whose page is missing until then.
func (b *prometheusBed) holdRTNL() (release func()) {
	b.t.Helper()
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		b.t.Fatal(err)
	}
	fd, _, no := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if no != 0 {
		b.t.Fatalf("userfaultfd: %v", no)
	}
	pages := int(fd)
	ioctl := func(fd int, request uintptr, argument unsafe.Pointer) error {
		if _, _, no := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(argument)); no != 0 {
			return no
		}
		return nil
	}
	start := unsafe.Pointer(unsafe.SliceData(page))
	api := [3]uint64{uffdVersion}
	register := [4]uint64{uint64(uintptr(start)), uint64(len(page)), uffdRegisterMissing}
	if err := ioctl(pages, uffdRequestAPI, unsafe.Pointer(&api)); err != nil {
		b.t.Fatal(err)
	}
	if err := ioctl(pages, uffdRequestRegister, unsafe.Pointer(&register)); err != nil {
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
			}{int32(len(page)), start}
			return ioctl(socket, unix.SIOCGIFCONF, unsafe.Pointer(&interfaces))
		})
	}()
	message := make([]byte, uffdMessage)
	if n, err := unix.Read(pages, message); err != nil || n != len(message) || message[0] != uffdMessagePageFault {
		b.t.Fatalf("userfaultfd: %d bytes %x, %v", n, message, err)
	}
	return func() {
		b.t.Helper()
		_ = unix.Close(pages) // the kernel adds the page
		if err := <-listed; err != nil {
			b.t.Error(err)
		}
		if err := unix.Munmap(page); err != nil {
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
