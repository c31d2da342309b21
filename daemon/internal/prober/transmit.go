package prober

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/proof"
)

// family has the constants of an IP version.
type family struct {
	domain, level           int
	info, infoOption        int // the control message and its socket option
	discover, probe, hops   int
	free                    int
	header                  int // bytes of IP and UDP
	smallest                int // payload that every link carries whole
	network                 string
	packetInfo, packetIndex int // length of the control message, and place of the index in it
	shelter                 netip.Addr
}

var families = [2]family{
	{unix.AF_INET, unix.IPPROTO_IP, unix.IP_PKTINFO, unix.IP_PKTINFO, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE, unix.IP_TTL, unix.IP_FREEBIND, 28, 576 - 28, "udp4", 12, 0, netip.MustParseAddr("127.255.255.254")},
	{unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.IPV6_RECVPKTINFO, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE, unix.IPV6_UNICAST_HOPS, unix.IPV6_FREEBIND, 48, 1280 - 48, "udp6", 20, 16, netip.IPv6Loopback()},
}

func familyOf(a netip.Addr) *family {
	if a.Is4() {
		return &families[0]
	}
	return &families[1]
}

// stamps are the timestamps of transmission whose control messages name devices.
const stamps = unix.SOF_TIMESTAMPING_TX_SCHED | unix.SOF_TIMESTAMPING_TX_SOFTWARE | unix.SOF_TIMESTAMPING_SOFTWARE | unix.SOF_TIMESTAMPING_OPT_CMSG

// departure is the way of a packet out of this host: the indexes of the devices by which it has left, in their order,
// and when it left the last one. It is empty for a packet that waits for its neighbor.
type departure struct {
	devices []int
	at      time.Time
}

// manner is how a datagram is sent.
type manner uint8

const (
	plainly manner = iota
	stamped        // its departure is reported
	nearby         // stamped, too, and the first router drops it
)

// transmit sends a datagram, whole.
func transmit(from, to netip.AddrPort, b []byte, how manner) (out departure, err error) {
	f := familyOf(from.Addr())
	fd, err := unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return out, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if len(b) > f.smallest {
		err = os.NewSyscallError("path MTU", unix.SetsockoptInt(fd, f.level, f.discover, f.probe))
	}
	if how == nearby && err == nil {
		err = os.NewSyscallError("hop limit", unix.SetsockoptInt(fd, f.level, f.hops, 1))
	}
	if how != plainly && err == nil {
		err = errors.Join(
			os.NewSyscallError("SO_TIMESTAMPING", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, stamps)),
			os.NewSyscallError("packet info", unix.SetsockoptInt(fd, f.level, f.infoOption, 1)))
	}
	if err != nil {
		return out, err
	}
	if err := f.takePort(fd, from.Port()); err != nil {
		return out, os.NewSyscallError("bind", err)
	}
	if _, err := unix.SendmsgN(fd, b, f.source(from.Addr(), 0), sockaddr(to), 0); err != nil {
		return out, os.NewSyscallError("send", err)
	}
	if how == plainly {
		return out, nil
	}
	var oob [256]byte
	var none [1]byte // without it Recvmsg asks for the type of the socket
	for range 8 {
		_, n, _, _, err := unix.Recvmsg(fd, none[:], oob[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
		if err != nil {
			break // no more of them
		}
		index, at := f.read(oob[:n])
		if index > 0 {
			out.devices = append(out.devices, index)
		}
		if !at.IsZero() {
			out.at = at
		}
	}
	return out, nil
}

// takePort gives a socket a source port. It binds to an unusual address of the loopback device: the port
// stays free at the loopbacks, where programs bind to slots' ports.
func (f *family) takePort(fd int, port uint16) error {
	at := sockaddr(netip.AddrPortFrom(f.shelter, port))
	err := unix.Bind(fd, at)
	if errors.Is(err, unix.EADDRNOTAVAIL) { // the loopback device is down
		if err = unix.SetsockoptInt(fd, f.level, f.free, 1); err == nil {
			err = unix.Bind(fd, at)
		}
	}
	return err
}

// source returns the control message for a packet from an address, out of a device unless index is 0.
func (f *family) source(from netip.Addr, index int) []byte {
	if f.domain == unix.AF_INET {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: from.As4(), Ifindex: int32(index)})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: from.As16(), Ifindex: uint32(index)})
}

// read returns the device and the time of control messages, zero if there are none.
func (f *family) read(control []byte) (index int, at time.Time) {
	messages, _ := unix.ParseSocketControlMessage(control) // ignore the error: there are no messages then
	for _, m := range messages {
		switch level, kind := int(m.Header.Level), int(m.Header.Type); {
		case level == f.level && kind == f.info && len(m.Data) >= f.packetInfo:
			index = int(binary.NativeEndian.Uint32(m.Data[f.packetIndex:]))
		case level == unix.SOL_SOCKET && (kind == unix.SO_TIMESTAMPNS || kind == unix.SO_TIMESTAMPING) && len(m.Data) >= 16:
			at = time.Unix(int64(binary.NativeEndian.Uint64(m.Data)), int64(binary.NativeEndian.Uint64(m.Data[8:])))
		}
	}
	return index, at
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// faultOf returns the kind of an error of transmit.
func faultOf(err error) proof.Fault {
	switch {
	case err == nil:
		return proof.None
	case errors.Is(err, unix.EADDRINUSE), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		return proof.Busy
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return proof.Refused
	case errors.Is(err, unix.EMSGSIZE):
		return proof.TooBig
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EINVAL):
		return proof.NoRoute
	}
	return proof.Failed
}
