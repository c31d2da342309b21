package packettap

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// frameBytes is larger than any frame, also one that the kernel has not yet divided into segments.
const frameBytes = 1 << 17

// Frames passes each frame that a device sends or receives to take, in their order, from its Ethernet header on. take
// is called by one goroutine at a time and must not keep the frame. stop passes what is left in the socket and ends; no
// call of take follows it.
func Frames(t testing.TB, n *netnstest.Namespace, device string, take func(frame []byte)) (stop func()) {
	t.Helper()
	var file *os.File
	err := n.Do(func() error {
		i, err := net.InterfaceByName(device)
		if err != nil {
			return err
		}
		all := binary.NativeEndian.Uint16([]byte{unix.ETH_P_ALL >> 8, unix.ETH_P_ALL & 0xff})
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all))
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), "frames")
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}))
	})
	if err != nil {
		t.Fatalf("frames of %s: %v", device, err)
	}
	var reader sync.WaitGroup
	reader.Go(func() {
		for b := make([]byte, frameBytes); ; {
			n, err := file.Read(b)
			if err != nil {
				return
			}
			take(b[:n])
		}
	})
	return func() {
		file.SetReadDeadline(time.Now())
		reader.Wait()
		file.SetReadDeadline(time.Time{})
		defer file.Close()
		raw, err := file.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, frameBytes)
		raw.Read(func(fd uintptr) bool { // what was on the wire is in the socket
			for {
				n, err := unix.Read(int(fd), b)
				if err != nil {
					return true
				}
				take(b[:n])
			}
		})
	}
}
