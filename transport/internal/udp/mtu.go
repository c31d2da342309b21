package udp

import (
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/wire"
)

var _ wire.Routes = (*Endpoint)(nil)

// PathMTU implements wire.Routes: the MTU of the route that the kernel selects, or less where an ICMP message has
// reported less.
func (e *Endpoint) PathMTU(to netip.Addr) (mtu int, err error) {
	err = e.sender.space.Do(func() error {
		fd, err := e.family.socket(netip.AddrPortFrom(e.config.Address, 0))
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		level, name := unix.IPPROTO_IP, unix.IP_MTU
		var peer unix.Sockaddr = &unix.SockaddrInet4{Port: int(e.port), Addr: [4]byte(to.AsSlice()[:4])}
		if e.family == unix.AF_INET6 {
			level, name = unix.IPPROTO_IPV6, unix.IPV6_MTU
			peer = &unix.SockaddrInet6{Port: int(e.port), Addr: to.As16()}
		}
		if err := unix.Connect(fd, peer); err != nil {
			return os.NewSyscallError("connect", err)
		}
		mtu, err = unix.GetsockoptInt(fd, level, name)
		return os.NewSyscallError("getsockopt", err)
	})
	return mtu, err
}
