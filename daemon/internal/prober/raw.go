package prober

import (
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// These system calls never block, so they need not be known to the runtime. If they were, the first one of each wake-up
// would wake the runtime's monitor thread, which then polls every 20 us while a goroutine runs.

// datagrams has room for some datagrams, which one system call receives. The zero value has none.
type datagrams struct {
	headers  []mmsghdr
	vectors  []unix.Iovec
	names    []rawAddress
	data     []byte
	controls [][maxControl]byte
	size     int
}

// maxControl is the room for control messages of a datagram.
const maxControl = 192

// mmsghdr is struct mmsghdr of the kernel.
type mmsghdr struct {
	header unix.Msghdr
	size   uint32
}

// rawAddress is a struct sockaddr_in or sockaddr_in6.
type rawAddress [unix.SizeofSockaddrInet6]byte

func newDatagrams(count, size int) *datagrams {
	d := &datagrams{
		headers: make([]mmsghdr, count), vectors: make([]unix.Iovec, count), names: make([]rawAddress, count), data: make([]byte, count*size),
		controls: make([][maxControl]byte, count), size: size,
	}
	for i := range d.headers {
		d.vectors[i].Base = &d.data[i*size]
		d.vectors[i].SetLen(size)
	}
	return d
}

// receive receives the datagrams that wait at a socket, as far as there is room, and returns their number. flags are in
// addition to MSG_DONTWAIT. Without memory it returns 0, too.
func (d *datagrams) receive(fd, flags int) int {
	for i := range d.headers {
		h := &d.headers[i].header
		*h = unix.Msghdr{Name: &d.names[i][0], Namelen: uint32(len(d.names[i])), Iov: &d.vectors[i], Control: &d.controls[i][0]}
		h.SetIovlen(1)
		h.SetControllen(maxControl)
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(d.headers))), uintptr(len(d.headers)),
		uintptr(flags|unix.MSG_DONTWAIT), 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

// payload, control and from return parts of a received datagram, valid until the next receive.
func (d *datagrams) payload(i int) []byte { return d.data[i*d.size:][:d.headers[i].size] }

func (d *datagrams) control(i int) []byte { return d.controls[i][:d.headers[i].header.Controllen] }

func (d *datagrams) from(i int) netip.Addr {
	if a := &d.names[i]; binary.NativeEndian.Uint16(a[:]) == unix.AF_INET {
		return netip.AddrFrom4([4]byte(a[4:]))
	}
	return netip.AddrFrom16([16]byte(d.names[i][8:]))
}

// set sets an address.
func (a *rawAddress) set(to netip.AddrPort) {
	binary.BigEndian.PutUint16(a[2:], to.Port())
	if to.Addr().Is4() {
		binary.NativeEndian.PutUint16(a[:], unix.AF_INET)
		ip := to.Addr().As4()
		copy(a[4:], ip[:])
		return
	}
	binary.NativeEndian.PutUint16(a[:], unix.AF_INET6)
	ip := to.Addr().As16()
	copy(a[8:], ip[:])
}

// size returns the size of an address.
func (a *rawAddress) size() uint32 {
	if binary.NativeEndian.Uint16(a[:]) == unix.AF_INET {
		return unix.SizeofSockaddrInet4
	}
	return unix.SizeofSockaddrInet6
}

// datagramSocket opens a UDP socket.
func datagramSocket(domain int) (int, error) {
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, uintptr(domain), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	return int(fd), named("socket", errno)
}

func closeSocket(fd int) { unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

func setOption(fd, level, option, value int, name string) error {
	v := int32(value)
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(unsafe.Pointer(&v)), unsafe.Sizeof(v), 0)
	return named(name, errno)
}

// ask requests a property of a device.
func ask(fd int, request uintptr, device *unix.Ifreq) bool {
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(device)))
	return errno == 0
}

func bindTo(fd int, from netip.AddrPort) error {
	var a rawAddress
	a.set(from)
	_, _, errno := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&a)), uintptr(a.size()))
	return named("bind", errno)
}

// send sends a datagram with control messages.
func send(fd int, b, control []byte, to netip.AddrPort) error {
	var a rawAddress
	a.set(to)
	h := unix.Msghdr{Name: &a[0], Namelen: a.size(), Control: unsafe.SliceData(control)}
	v := unix.Iovec{Base: unsafe.SliceData(b)}
	v.SetLen(len(b))
	h.Iov = &v
	h.SetIovlen(1)
	h.SetControllen(len(control))
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&h)), unix.MSG_DONTWAIT)
	return named("send", errno)
}

// outbox has datagrams that few system calls send. The zero value has none.
type outbox struct {
	data     []byte // of all
	sizes    []int
	names    []rawAddress
	controls [][]byte
	headers  []mmsghdr
	vectors  []unix.Iovec
}

func (o *outbox) reset() {
	o.data, o.sizes, o.names, o.controls = o.data[:0], o.sizes[:0], o.names[:0], o.controls[:0]
}

// add adds a datagram with control messages.
func (o *outbox) add(b, control []byte, to netip.AddrPort) {
	var a rawAddress
	a.set(to)
	o.data, o.sizes, o.names, o.controls = append(o.data, b...), append(o.sizes, len(b)), append(o.names, a), append(o.controls, control)
}

// send sends all datagrams, except those that the kernel refuses.
func (o *outbox) send(fd int) {
	n := len(o.sizes)
	o.headers, o.vectors = slices.Grow(o.headers[:0], n)[:n], slices.Grow(o.vectors[:0], n)[:n]
	rest := o.data
	for i, size := range o.sizes {
		o.vectors[i] = unix.Iovec{Base: &rest[0]}
		o.vectors[i].SetLen(size)
		rest = rest[size:]
		h := unix.Msghdr{Name: &o.names[i][0], Namelen: o.names[i].size(), Control: unsafe.SliceData(o.controls[i]), Iov: &o.vectors[i]}
		h.SetIovlen(1)
		h.SetControllen(len(o.controls[i]))
		o.headers[i] = mmsghdr{header: h}
	}
	for left := o.headers; len(left) > 0; {
		n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(left))), uintptr(len(left)), unix.MSG_DONTWAIT, 0, 0)
		if errno != 0 {
			n = 1 // the first one is refused
		}
		left = left[n:]
	}
}

// named returns the error of a system call, nil for 0.
func named(call string, errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return os.NewSyscallError(call, errno)
}
