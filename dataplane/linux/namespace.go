package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// namespace is the network namespace that a Plane works in.
type namespace struct {
	file *os.File
	id   fileID
}

type fileID struct{ device, inode uint64 }

const threadNamespace = "/proc/thread-self/ns/net"

func identify(path string) (fileID, error) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return fileID{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return fileID{stat.Dev, stat.Ino}, nil
}

// openNamespace returns the calling thread's.
func openNamespace() (n namespace, err error) {
	if n.id, err = identify(threadNamespace); err == nil {
		n.file, err = os.Open(threadNamespace)
	}
	if err != nil {
		return n, fmt.Errorf("network namespace: %w", err)
	}
	return n, nil
}

func (n namespace) Close() error { return n.file.Close() }

// do runs f on a thread inside the namespace: /proc/sys/net is that of the thread that opens it.
func (n namespace) do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		at, err := identify(threadNamespace)
		if err == nil && at != n.id {
			// Never unlocked: the thread is thrown away with the goroutine.
			if err = unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err == nil {
				err = f()
			}
			done <- err
			return
		}
		if err == nil {
			err = f()
		}
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// is says whether name, as in ForwardingSubPort.netns, is this namespace: a name that `ip netns` knows, or a path.
func (n namespace) is(name string) (bool, error) {
	path := name
	if !filepath.IsAbs(name) {
		path = filepath.Join("/run/netns", name)
	}
	id, err := identify(path)
	return id == n.id, err
}

// The settings that the kernel's forwarding by groups depends on.
const (
	compatMode   = "net/ipv4/nexthop_compat_mode"
	hashPolicyV4 = "net/ipv4/fib_multipath_hash_policy"
	hashPolicyV6 = "net/ipv6/fib_multipath_hash_policy"
	hashSeed     = "net/ipv4/fib_multipath_hash_seed"
	forwardV4    = "net/ipv4/ip_forward"
	forwardV6    = "net/ipv6/conf/all/forwarding"
)

// The values of hashPolicyV4 and hashPolicyV6 that hash a flow's addresses, protocol and ports (Documentation/networking/
// ip-sysctl.rst). hashFlow takes the hash that the sender's socket left in the packet, if there is one; a veth pair carries it
// on, so a leaf made of Linux would hash by something else. hashFields never does: it hashes what the bits of flowFields stand for.
const (
	hashFlow   = 1
	hashFields = 3
	flowFields = 0x37
)

func readSysctl(name string) (uint64, error) {
	text, err := os.ReadFile(filepath.Join("/proc/sys", name))
	if err != nil {
		return 0, err
	}
	value, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("/proc/sys/%s: %w", name, err)
	}
	return value, nil
}

// setSysctl writes a value where another stands, and says whether it had to.
func setSysctl(name string, value uint64) (changed bool, err error) {
	if at, err := readSysctl(name); err == nil && at == value {
		return false, nil
	}
	if err := os.WriteFile(filepath.Join("/proc/sys", name), strconv.AppendUint(nil, value, 10), 0); err != nil {
		return false, fmt.Errorf("set %s to %d: %w; set it by sysctl before the start, or give the process the right to",
			strings.ReplaceAll(name, "/", "."), value, err)
	}
	return true, nil
}

// setUp sets what forwarding depends on. It returns how many settings it had to change. The caller is inside the namespace.
func setUp() (changed int, err error) {
	did, err := setSysctl(compatMode, 0)
	if err != nil {
		return 0, err
	}
	if did {
		changed++
	}
	for _, policy := range []string{hashPolicyV4, hashPolicyV6} {
		if hashesFields(policy) {
			continue
		}
		did, err := setSysctl(policy, hashFlow)
		if policy == hashPolicyV6 && errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return changed, err
		}
		if did {
			changed++
		}
	}
	return changed, nil
}

// setUpTransit has the kernel forward what is not its own: IPv4, and IPv6 when asked for. It returns how many settings it had
// to change. The caller is inside the namespace.
func setUpTransit(ipv6 bool) (changed int, err error) {
	for _, name := range []string{forwardV4, forwardV6} {
		if name == forwardV6 && !ipv6 {
			continue
		}
		did, err := setSysctl(name, 1)
		if err != nil {
			return changed, err
		}
		if did {
			changed++
		}
	}
	return changed, nil
}

// hashesFields says whether a policy is set that will do as it is: somebody chose it, for a reason.
func hashesFields(policy string) bool {
	at, err := readSysctl(policy)
	if err != nil || at != hashFields {
		return false
	}
	fields, err := readSysctl(strings.Replace(policy, "_policy", "_fields", 1))
	return err == nil && fields == flowFields
}

// setUpSeed returns the hash seed, and sets it first when none is set. ok is false on a kernel that does not have one.
// The caller is inside the namespace.
func setUpSeed(wish uint32) (seed uint32, ok bool, err error) {
	at, err := readSysctl(hashSeed)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	if at != 0 {
		return uint32(at), true, nil
	}
	if _, err := setSysctl(hashSeed, uint64(wish)); err != nil {
		return 0, false, err
	}
	return wish, true, nil
}
