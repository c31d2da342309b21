package carrier

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// counters reads how often the carriers of devices have changed (carrier_changes in sysfs). The kernel counts a change
// at once, and reads the count without a lock; a request of a link takes the lock that serializes all changes of the
// network configuration.
type counters struct {
	class string         // /sys/class/net; "" reads nothing
	files map[int]*count // by the link's index
}

// count is the open file of a device.
type count struct {
	name string
	fd   int // -1: there is none, or that of another device
}

func newCounters(class string) *counters { return &counters{class, map[int]*count{}} }

// equal reports whether each link has changed its carrier as often as is known, and false if a count cannot be read:
// for example, where sysfs shows another network namespace.
func (c *counters) equal(links []rtnl.Link) bool {
	if len(c.files) > len(links) {
		c.close() // those of devices that are gone
	}
	for _, l := range links {
		if n, ok := c.read(l); !ok || n != l.CarrierChanges {
			return false
		}
	}
	return true
}

// read returns the number of carrier changes of a link.
func (c *counters) read(l rtnl.Link) (uint32, bool) {
	at := c.files[l.Index]
	if at == nil || at.name != l.Name {
		c.drop(l.Index)
		at = &count{l.Name, c.open(l)}
		c.files[l.Index] = at
	}
	if at.fd < 0 {
		return 0, false
	}
	var buf [16]byte
	// The read does not block, and the runtime need not know of it, as in package rtnl.
	n, _, errno := unix.RawSyscall6(unix.SYS_PREAD64, uintptr(at.fd), uintptr(unsafe.Pointer(&buf)), uintptr(len(buf)), 0, 0, 0)
	if errno != 0 { // the device is gone
		c.drop(l.Index)
		return 0, false
	}
	return parseCount(buf[:n])
}

// parseCount reads a number that ends with a line feed.
func parseCount(text []byte) (n uint32, ok bool) {
	digits, ok := bytes.CutSuffix(text, []byte("\n"))
	if !ok || len(digits) == 0 {
		return 0, false
	}
	for _, d := range digits {
		if d < '0' || d > '9' {
			return 0, false
		}
		n = 10*n + uint32(d-'0')
	}
	return n, true
}

// open returns -1 if there is no such file, or it is that of another device.
func (c *counters) open(l rtnl.Link) int {
	if c.class == "" {
		return -1
	}
	dir := filepath.Join(c.class, l.Name)
	index, err := os.ReadFile(filepath.Join(dir, "ifindex"))
	if err != nil || string(index) != strconv.Itoa(l.Index)+"\n" {
		return -1
	}
	fd, err := unix.Open(filepath.Join(dir, "carrier_changes"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
}

func (c *counters) drop(index int) {
	if at := c.files[index]; at != nil && at.fd >= 0 {
		_ = unix.Close(at.fd) // nothing was written
	}
	delete(c.files, index)
}

func (c *counters) close() {
	for index := range c.files {
		c.drop(index)
	}
}
