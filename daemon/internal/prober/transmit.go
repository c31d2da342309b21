package prober

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
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
	fd, err := datagramSocket(f.domain)
	if err != nil {
		return out, err
	}
	defer closeSocket(fd)
	if len(b) > f.smallest {
		err = setOption(fd, f.level, f.discover, f.probe, "path MTU")
	}
	if how == nearby && err == nil {
		err = setOption(fd, f.level, f.hops, 1, "hop limit")
	}
	if how != plainly && err == nil {
		err = errors.Join(setOption(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, stamps, "SO_TIMESTAMPING"), setOption(fd, f.level, f.infoOption, 1, "packet info"))
	}
	if err == nil {
		err = f.takePort(fd, from.Port())
	}
	if err == nil {
		err = send(fd, b, f.source(from.Addr(), 0), to)
	}
	if err != nil || how == plainly {
		return out, err
	}
	reports := departures.Get().(*datagrams)
	defer departures.Put(reports)
	for i := range reports.receive(fd, unix.MSG_ERRQUEUE) {
		index, at := f.read(reports.control(i))
		if index > 0 {
			out.devices = append(out.devices, index)
		}
		if !at.IsZero() {
			out.at = at
		}
	}
	return out, nil
}

// departures are for the timestamps of a packet: two for each of at most four devices.
var departures = sync.Pool{New: func() any { return newDatagrams(8, 1) }}

// takePort gives a socket a source port. It binds to an unusual address of the loopback device: the port
// stays free at the loopbacks, where programs bind to slots' ports.
func (f *family) takePort(fd int, port uint16) error {
	at := netip.AddrPortFrom(f.shelter, port)
	err := bindTo(fd, at)
	if errors.Is(err, unix.EADDRNOTAVAIL) { // the loopback device is down
		if err = setOption(fd, f.level, f.free, 1, "free bind"); err == nil {
			err = bindTo(fd, at)
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
	for len(control) >= unix.SizeofCmsghdr {
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return index, at
		}
		control = rest
		switch level, kind := int(h.Level), int(h.Type); {
		case level == f.level && kind == f.info && len(data) >= f.packetInfo:
			index = int(binary.NativeEndian.Uint32(data[f.packetIndex:]))
		case level == unix.SOL_SOCKET && (kind == unix.SO_TIMESTAMPNS || kind == unix.SO_TIMESTAMPING) && len(data) >= 16:
			at = time.Unix(int64(binary.NativeEndian.Uint64(data)), int64(binary.NativeEndian.Uint64(data[8:])))
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
