package linux

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// readOnly makes everything below /proc/sys read-only for the calling thread, as in containers. The thread ends with
// its goroutine.
func readOnly() error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	for _, m := range []struct {
		source, target string
		flags          uintptr
	}{
		{"", "/", unix.MS_REC | unix.MS_PRIVATE},
		{"/proc/sys", "/proc/sys", unix.MS_BIND},
		{"", "/proc/sys", unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY},
	} {
		if err := unix.Mount(m.source, m.target, "", m.flags, ""); err != nil {
			return fmt.Errorf("mount %+v: %w", m, err)
		}
	}
	return nil
}

// TestSettingsThatCannotBeMade checks that an unwritable wrong setting is an error that names it, and that a right one
// is not written.
func TestSettingsThatCannotBeMade(t *testing.T) {
	all := func() (int, error) {
		changed, err := setUp(true)
		if err != nil {
			return len(changed), err
		}
		more, err := setUpTransit(true)
		if err == nil {
			_, _, err = setUpSeed(7)
		}
		return len(changed) + len(more), err
	}
	set := []string{ // in the order in which they are set
		"net.ipv4.nexthop_compat_mode=0", "net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1",
		"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.fib_multipath_hash_seed=7",
	}
	if _, err := newHost(t, 0).Output("sysctl", "-n", "net.ipv4.fib_multipath_hash_seed"); err != nil {
		set = set[:len(set)-1] // kernels before 6.11 lack it
	}
	for wrong := range len(set) + 1 { // in the last round none is wrong
		name := "none"
		if wrong < len(set) {
			name, _, _ = strings.Cut(set[wrong], "=")
		}
		t.Run(name, func(t *testing.T) {
			h := newHost(t, 0)
			for i, s := range set {
				if i == wrong {
					s = name + map[bool]string{true: "=1", false: "=0"}[strings.HasSuffix(s, "=0")]
				}
				h.Sysctl(s)
			}
			n := netnstest.In(h.Namespace, netns.Current)
			defer n.Close()
			var changed int
			var setUpErr error
			if err := n.Do(func() error {
				err := readOnly()
				if err == nil {
					changed, setUpErr = all()
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if changed != 0 {
				t.Errorf("%d settings changed below a read-only /proc/sys", changed)
			}
			if wrong == len(set) {
				if setUpErr != nil {
					t.Errorf("all is set, and %v", setUpErr)
				}
			} else if setUpErr == nil || !strings.Contains(setUpErr.Error(), name+" to "+set[wrong][len(name)+1:]) {
				t.Errorf("%s is wrong, and the error is %v", name, setUpErr)
			}
		})
	}
}
