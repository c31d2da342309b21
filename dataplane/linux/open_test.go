package linux

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestOpenFails: an Open that fails returns the cause and leaves no descriptor open, whichever step fails. Close leaves
// none open either, and returns the same error each time.
func TestOpenFails(t *testing.T) {
	h := newHost(t, 1)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the garbage collector would close files
	before := descriptors(t)
	unchanged := func(what string) {
		t.Helper()
		if n := descriptors(t); n != before {
			t.Errorf("%s: %d descriptors, before %d", what, n, before)
		}
	}
	failed := 0
	for free := 0; ; free++ {
		var d *Driver
		err := h.Do(func() (err error) {
			release := leaveDescriptors(t, free)
			defer release()
			d, err = Open(h.config)
			return err
		})
		if err == nil {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			unchanged("after Close")
			break
		}
		failed++
		if !errors.Is(err, unix.EMFILE) || d != nil || free == 32 {
			t.Fatalf("%d descriptors: %v, %v", free, d, err)
		}
		unchanged(fmt.Sprintf("%d descriptors", free))
	}
	if failed < 5 {
		t.Errorf("Open succeeded with %d descriptors", failed)
	}
	h.IP("link", "set", "lo", "down")
	if err := h.Do(func() error {
		_, err := Open(h.config)
		return err
	}); !errors.Is(err, unix.ENETDOWN) || !strings.Contains(err.Error(), "ip link set lo up") {
		t.Errorf("with the loopback down: %v", err)
	}
	unchanged("with the loopback down")
	h.IP("link", "set", "lo", "up")
	// A setting that cannot be made.
	h.Sysctl("net.ipv4.nexthop_compat_mode=1")
	n := netnstest.In(h.Namespace, netns.Current)
	var openErr error
	if err := n.Do(func() error {
		err := readOnly()
		if err == nil {
			_, openErr = Open(h.config)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	n.Close()
	if openErr == nil || !strings.Contains(openErr.Error(), "net.ipv4.nexthop_compat_mode to 0") {
		t.Errorf("below a read-only /proc/sys: %v", openErr)
	}
	unchanged("below a read-only /proc/sys")
	d := h.open()
	if err := d.kernel.conn.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.Close(); !errors.Is(err, unix.EBADF) {
			t.Errorf("Close of what is closed: %v", err)
		}
	}
	unchanged("after Close of what is closed")
}

// settings runs f on a thread whose /proc/sys has these files alone, and returns their contents afterwards.
func settings(t *testing.T, files map[string]string, f func()) (after map[string]string) {
	t.Helper()
	netnstest.Require(t)
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount(dir, "/proc/sys", "", unix.MS_BIND, "")
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	after = map[string]string{}
	for name := range files {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		after[name] = string(text)
	}
	return after
}

// TestSettingsOfOtherKernels checks the settings made on kernels without IPv6, without a seed, and with hash fields of
// the administrator.
func TestSettingsOfOtherKernels(t *testing.T) {
	const fieldsV4, fieldsV6 = "net/ipv4/fib_multipath_hash_fields", "net/ipv6/fib_multipath_hash_fields"
	type files = map[string]string
	for _, c := range []struct {
		what    string
		before  files
		changed int
		names   string // that the error names; "": none
		after   files
		sender  bool
	}{
		{"all wrong", files{compatMode: "1\n", hashPolicyV4: "0\n", hashPolicyV6: "2\n"}, 3, "", files{compatMode: "0", hashPolicyV4: "1", hashPolicyV6: "1"}, false},
		{"all right", files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "1\n"}, 0, "", files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "1\n"}, false},
		{"no IPv6", files{compatMode: "1\n", hashPolicyV4: "0\n"}, 2, "", files{compatMode: "0", hashPolicyV4: "1"}, false},
		{"no IPv4", files{compatMode: "1\n", hashPolicyV6: "0\n"}, 1, hashPolicyV4, files{compatMode: "0", hashPolicyV6: "0\n"}, false},
		{"no mode", files{hashPolicyV4: "0\n", hashPolicyV6: "0\n"}, 0, compatMode, files{hashPolicyV4: "0\n", hashPolicyV6: "0\n"}, false},
		{"no number", files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "x\n"}, 0, hashPolicyV6, files{compatMode: "0\n", hashPolicyV4: "1\n", hashPolicyV6: "x\n"}, false},
		{"fields", files{compatMode: "0\n", hashPolicyV4: "3\n", fieldsV4: "55\n", hashPolicyV6: "3\n", fieldsV6: "7\n"}, 1, "",
			files{compatMode: "0\n", hashPolicyV4: "3\n", fieldsV4: "55\n", hashPolicyV6: "1", fieldsV6: "7\n"}, false},
		{"fields that cannot be read", files{compatMode: "0\n", hashPolicyV4: "3\n", hashPolicyV6: "3\n", fieldsV6: "55\n"}, 1, "",
			files{compatMode: "0\n", hashPolicyV4: "1", hashPolicyV6: "3\n", fieldsV6: "55\n"}, false},
		{"fields of a sender", files{compatMode: "0\n", hashPolicyV4: "3\n", fieldsV4: "55\n", hashPolicyV6: "3\n", fieldsV6: "55\n"}, 2, "",
			files{compatMode: "0\n", hashPolicyV4: "1", fieldsV4: "55\n", hashPolicyV6: "1", fieldsV6: "55\n"}, true},
	} {
		var changed []string
		var err error
		after := settings(t, c.before, func() { changed, err = setUp(!c.sender) })
		if len(changed) != c.changed || (err == nil) != (c.names == "") || err != nil && !strings.Contains(err.Error(), c.names) || !maps.Equal(after, c.after) {
			t.Errorf("%s: %q changed, %v, now %q; want %d, %q, %q", c.what, changed, err, after, c.changed, c.names, c.after)
		}
	}
	for _, c := range []struct {
		what    string
		ipv6    bool
		before  files
		changed int
		fails   bool
		after   files
	}{
		{"both", true, files{forwardV4: "0\n", forwardV6: "0\n"}, 2, false, files{forwardV4: "1", forwardV6: "1"}},
		{"IPv4 alone", false, files{forwardV4: "0\n", forwardV6: "0\n"}, 1, false, files{forwardV4: "1", forwardV6: "0\n"}},
		{"one was set", true, files{forwardV4: "1\n", forwardV6: "0\n"}, 1, false, files{forwardV4: "1\n", forwardV6: "1"}},
		{"one is not there", true, files{forwardV4: "0\n"}, 1, true, files{forwardV4: "1"}},
	} {
		var changed []string
		var err error
		after := settings(t, c.before, func() { changed, err = setUpTransit(c.ipv6) })
		if len(changed) != c.changed || (err != nil) != c.fails || !maps.Equal(after, c.after) {
			t.Errorf("forward %s: %q changed, %v, now %q; want %d, %q", c.what, changed, err, after, c.changed, c.after)
		}
	}
	for _, c := range []struct {
		text  string // "": no such setting
		seed  uint32
		ok    bool
		fails bool
		after string
	}{{"0\n", 7, true, false, "7"}, {"42\n", 42, true, false, "42\n"}, {"x", 0, false, true, "x"}, {"", 0, false, false, ""}} {
		before := files{compatMode: "0"}
		if c.text != "" {
			before[hashSeed] = c.text
		}
		var seed uint32
		var ok bool
		var err error
		after := settings(t, before, func() { seed, ok, err = setUpSeed(7) })
		if seed != c.seed || ok != c.ok || (err != nil) != c.fails || after[hashSeed] != c.after {
			t.Errorf("the seed %q: %d, %v, %v, now %q", c.text, seed, ok, err, after[hashSeed])
		}
	}
	for _, c := range []struct {
		what   string
		before files
		names  string
	}{
		{"IPv6", files{hashPolicyV6: "1\n", loopbackOff: "0\n"}, ""}, {"no setting of the loopback", files{hashPolicyV6: "1\n"}, ""},
		{"no IPv6", files{loopbackOff: "0\n"}, "the kernel has no IPv6"}, {"IPv6 is off", files{hashPolicyV6: "1\n", loopbackOff: "1\n"}, "disable_ipv6 is 1"},
	} {
		var why string
		settings(t, c.before, func() { why = lacksIPv6() })
		if (why == "") != (c.names == "") || !strings.Contains(why, c.names) {
			t.Errorf("%s: %q, want %q", c.what, why, c.names)
		}
	}
}
