package agent

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/bpf"
)

// hostCookie is the cookie of the initial network namespace: the kernel numbers namespaces and never reuses a number.
const hostCookie = 1

// defaultPins returns the directory for pins of the calling thread's network namespace: bpf.DefaultPinDir for the
// host's, and a numbered sibling for any other one, because all of them may share one BPF file system.
func defaultPins() (string, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("network namespace: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return "", &FieldError{"BPF.PinDir", fmt.Errorf("no default, because the network namespace has no known number: %w", err)}
	}
	if cookie == hostCookie {
		return bpf.DefaultPinDir, nil
	}
	return fmt.Sprintf("%s-%d", bpf.DefaultPinDir, cookie), nil
}
