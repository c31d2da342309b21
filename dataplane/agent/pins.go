package agent

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/bpf"
)

// hostCookie is the cookie of the first network namespace: the kernel counts them up and never uses one twice.
const hostCookie = 1

// defaultPins is the directory for pins of the calling thread's network namespace: bpf.DefaultPinDir for the host's, one
// beside it for each other, because a BPF file system is shared by all.
func defaultPins() (string, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("network namespace: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return "", fmt.Errorf("network namespace: %w: set --pin-dir", err)
	}
	if cookie == hostCookie {
		return bpf.DefaultPinDir, nil
	}
	return fmt.Sprintf("%s-%d", bpf.DefaultPinDir, cookie), nil
}
