package netnstest

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// NIC is Veth with one interface index for both ends. Then ifindex equals iflink, as in a physical device, so the
// kernel does not regard a lost carrier as urgent (net/core/link_watch.c).
func NIC(t testing.TB, a *Namespace, deviceA string, b *Namespace, deviceB string) {
	t.Helper()
	const first = 1_000_000 // above the indexes of existing devices; those of containers continue the host's
	index := fmt.Sprint(first + indexes.Add(1))
	IP(t, "link", "add", "name", deviceA, "index", index, "netns", a.Name,
		"type", "veth", "peer", "name", deviceB, "index", index, "netns", b.Name)
}

// CPU returns the processor time of the process, which on a busy machine is a better measure than elapsed time.
func CPU(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// SecondCable fails unless a program under test notices the second failed cable of a port without the kernel's
// announcement, which may come a second later. first and second are devices of the leaf that NIC made; dark reports
// whether the program, which watches the links of server, has noticed the lost carrier at a device's far end. Later
// events of server's links do not arrive (Deafen).
func SecondCable(t testing.TB, server, leaf *Namespace, first, second string, dark func(device string) bool) {
	t.Helper()
	noticed := func(device string, want bool) {
		t.Helper()
		Eventually(t, time.Minute, func() error {
			if dark(device) != want {
				return fmt.Errorf("the loss of carrier of %s is known: %v", device, !want)
			}
			return nil
		})
	}
	noticed(first, false)
	noticed(second, false)
	leaf.IP("link", "set", first, "down")
	noticed(first, true)
	server.Deafen()
	leaf.IP("link", "set", second, "down")
	noticed(second, true)
}
