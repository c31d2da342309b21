package udp

import (
	"errors"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/wire"
)

// family is AF_INET or AF_INET6.
type family int

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (f family) maxPayload() int {
	if f == unix.AF_INET {
		return maxPayload4
	}
	return maxPayload6
}

// reaches reports whether a socket of the family can send to an address.
func (f family) reaches(a netip.Addr) bool {
	if f == unix.AF_INET {
		return a.Is4()
	}
	return a.Is6() && !a.Is4In6() && a.Zone() == ""
}

// name writes a socket address, and returns its length.
func (f family) name(to *address, a netip.AddrPort) uint32 {
	if f == unix.AF_INET {
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(to)) = unix.RawSockaddrInet4{
			Family: unix.AF_INET, Port: htons(a.Port()), Addr: a.Addr().As4(),
		}
		return unix.SizeofSockaddrInet4
	}
	*to = address{Family: unix.AF_INET6, Port: htons(a.Port()), Addr: a.Addr().As16()}
	return unix.SizeofSockaddrInet6
}

type option struct{ level, name, value int }

// capable returns the option that sets ECT(0) in all packets.
func (f family) capable() option {
	const ect0 = 2
	if f == unix.AF_INET {
		return option{unix.IPPROTO_IP, unix.IP_TOS, ect0}
	}
	return option{unix.IPPROTO_IPV6, unix.IPV6_TCLASS, ect0}
}

// mark returns the option that sets a traffic class in all packets, with ECT(0) if the core is ECN-capable.
func (f family) mark(c *Config, class uint8) option {
	o := f.capable()
	if _, ok := c.Core.(wire.Marked); !ok {
		o.value = 0
	}
	o.value |= int(class)
	return o
}

// classOf returns the class of a flow whose datagrams have a traffic class.
func (f family) classOf(c *Config, trafficClass uint8) class {
	return classed | class(f.mark(c, trafficClass).value)
}

// marks returns the options for the traffic class, including ECT(0) if the core is ECN-capable, and for flow labels.
func (f family) marks(c *Config) (options []option) {
	if class := f.mark(c, c.TrafficClass); class.value != 0 {
		options = append(options, class)
	}
	if f == unix.AF_INET6 && c.FlowLabels {
		const flowInfoSend = 33 // IPV6_FLOWINFO_SEND
		options = append(options, option{unix.IPPROTO_IPV6, flowInfoSend, 1})
	}
	return options
}

// receiver opens the receiving socket. It has no SO_REUSEADDR, so that no other socket can receive its datagrams.
func (f family) receiver(c *Config) (int, error) {
	options := f.marks(c)
	if !c.NoGSO {
		options = append(options, option{unix.IPPROTO_UDP, unix.UDP_GRO, 1})
	}
	if f == unix.AF_INET6 && c.NoChecksum {
		options = append(options, option{unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX, 1})
	}
	if _, ok := c.Core.(wire.Marked); ok {
		if f == unix.AF_INET {
			options = append(options, option{unix.IPPROTO_IP, unix.IP_RECVTOS, 1})
		} else {
			options = append(options, option{unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1})
		}
	}
	fd, err := f.socket(netip.AddrPortFrom(c.Address, c.Port), options...)
	if err == nil {
		setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, c.ReceiveBuffer)
		setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, c.SendBuffer)
	}
	return fd, err
}

// sender opens a socket that only sends from a source port.
func (f family) sender(c *Config, port uint16) (int, error) {
	options := append(f.marks(c), option{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1})
	fd, err := f.socket(netip.AddrPortFrom(c.Address, port), options...)
	if err != nil {
		return -1, err
	}
	setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, c.SendBuffer)
	// The socket is never read: a filter that keeps 0 bytes drops all incoming datagrams.
	nothing := [1]unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	program := unix.SockFprog{Len: uint16(len(nothing)), Filter: &nothing[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program); err != nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("setsockopt", err)
	}
	return fd, nil
}

// socket opens a nonblocking, bound socket that sets DF.
func (f family) socket(at netip.AddrPort, options ...option) (int, error) {
	fd, err := unix.Socket(int(f), unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if f == unix.AF_INET {
		options = append(options, option{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO})
	} else {
		options = append(options,
			option{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
			option{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO},
			option{unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 1})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			unix.Close(fd)
			return -1, os.NewSyscallError("setsockopt", err)
		}
	}
	var name unix.Sockaddr
	if f == unix.AF_INET {
		name = &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	} else {
		name = &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	if err := unix.Bind(fd, name); err != nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("bind", err)
	}
	return fd, nil
}

// setBuffer requests a socket buffer beyond the system limit or, without that privilege, as large as possible. The
// kernel doubles the number for its own bookkeeping.
func setBuffer(fd, force, modest, bytes int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, bytes) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, modest, bytes) // cannot fail: excess is truncated
	}
}

func boundPort(fd int) (uint16, error) {
	name, err := unix.Getsockname(fd)
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port), nil
	case *unix.SockaddrInet6:
		return uint16(a.Port), nil
	}
	return 0, errors.Join(errors.New("no port"), err)
}

// drops returns the number of datagrams that the kernel has dropped at a socket, modulo 2^32: the number that
// SO_RXQ_OVFL would report with the next datagram, but without waiting for one.
func drops(fd int) uint32 {
	var info [16]uint32 // SK_MEMINFO_VARS is 9
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	const skMemInfoDrops = 8
	if errno != 0 {
		return 0
	}
	return info[skMemInfoDrops]
}
