package netnstest

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// SendWhole sends an IPv4 UDP datagram of size payload bytes that must not be fragmented (IP_PMTUDISC_DO). It returns
// EMSGSIZE if the path's MTU is smaller.
func (n *Namespace) SendWhole(from, to netip.AddrPort, size int) error {
	return n.Do(func() error {
		socket, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to))
		if err != nil {
			return err
		}
		defer socket.Close()
		raw, err := socket.SyscallConn()
		if err != nil {
			return err
		}
		if failed := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
		}); failed != nil || err != nil {
			return fmt.Errorf("IP_MTU_DISCOVER: %w, %w", failed, err)
		}
		_, err = socket.Write(make([]byte, size))
		return err
	})
}
