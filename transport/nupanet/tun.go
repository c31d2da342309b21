package nupanet

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/nupa"
)

// tun is a TUN device whose packets have a virtio_net_hdr in front, so that the kernel need not segment or checksum
// them.
type tun struct {
	*os.File // reads
	fd       int
}

const (
	headerSize = 10 // virtio_net_hdr
	maxPacket  = nupa.MaxOp
)

// openTUN makes a device without carrier, or takes an existing one without a user, and brings it up.
func openTUN(name string, mtu int) (t *tun, err error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, fmt.Errorf("device %q: %w", name, err)
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return nil, fmt.Errorf("device %s: %w", name, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6); err != nil {
		return nil, fmt.Errorf("device %s: offloads: %w", name, err)
	}
	t = &tun{fd: fd}
	if err := t.setCarrier(false); err != nil {
		return nil, fmt.Errorf("device %s: carrier: %w", name, err)
	}
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(socket)
	request.SetUint32(uint32(mtu))
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFMTU, request); err != nil {
		return nil, fmt.Errorf("device %s: MTU %d: %w", name, mtu, err)
	}
	request.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil {
		return nil, fmt.Errorf("device %s: up: %w", name, err)
	}
	t.File = os.NewFile(uintptr(fd), name)
	return t, nil
}

// setCarrier sets the carrier of the device.
func (t *tun) setCarrier(on bool) error {
	v := 0
	if on {
		v = 1
	}
	return unix.IoctlSetPointerInt(t.fd, unix.TUNSETCARRIER, v)
}

// send gives a packet and its header to the kernel.
func (t *tun) send(packet []byte) error {
	_, err := unix.Write(t.fd, packet)
	return err
}
