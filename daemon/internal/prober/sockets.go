package prober

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/proof"
)

// message is a datagram with the device, -1 if unknown, and the time of its arrival, zero if unknown.
type message struct {
	data    []byte
	from    netip.Addr
	index   int
	arrived time.Time
}

// inbox has the datagrams that have been received and not been handled. The zero value is empty.
type inbox struct {
	all         *datagrams
	next, count int
}

// inboxSize is the number of datagrams that one system call receives.
const inboxSize = 16

// socket receives at a loopback: conn what is to be handled at once, which wakes a goroutine, and waiting all else,
// which wakes nobody. The kernel chooses by the flag in the packet.
type socket struct {
	family  *family
	waiting int
	conn    *net.UDPConn
	err     error
	done    chan struct{} // closed when the goroutine of conn has ended
}

// listen opens the sockets of a loopback, which may be added later.
func listen(at netip.AddrPort) *socket {
	s := &socket{family: familyOf(at.Addr()), waiting: -1, done: make(chan struct{})}
	if s.err = s.open(at); s.err != nil {
		s.close()
		close(s.done)
	}
	return s
}

func (s *socket) open(at netip.AddrPort) (err error) {
	f := s.family
	if s.waiting, err = unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		s.waiting = -1
		return os.NewSyscallError("socket", err)
	}
	if err := f.options(s.waiting); err != nil {
		return err
	}
	if err := unix.Bind(s.waiting, sockaddr(at)); err != nil {
		return os.NewSyscallError("bind", err)
	}
	// From now on, not before: another process that has the port must be an error.
	share := func(fd int) error {
		return os.NewSyscallError("SO_REUSEPORT", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	}
	if err := share(s.waiting); err != nil {
		return err
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) { inner = errors.Join(f.options(int(fd)), share(int(fd))) })
		return errors.Join(err, inner)
	}}
	packets, err := lc.ListenPacket(context.Background(), f.network, at.String())
	if err != nil {
		return err
	}
	s.conn = packets.(*net.UDPConn)
	return choose(s.waiting)
}

// options sets the options of a receiving socket.
func (f *family) options(fd int) error {
	return errors.Join(
		os.NewSyscallError("SO_TIMESTAMPNS", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)),
		os.NewSyscallError("free bind", unix.SetsockoptInt(fd, f.level, f.free, 1)),
		os.NewSyscallError("packet info", unix.SetsockoptInt(fd, f.level, f.infoOption, 1)),
		os.NewSyscallError("path MTU", unix.SetsockoptInt(fd, f.level, f.discover, f.probe))) // answers leave whole
}

// choose makes the kernel deliver packets that are to be handled at once to the second socket of a port, others to the
// first one. The program reads the payload.
func choose(fd int) error {
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: proof.FlagsAt, Size: 2}, // a packet that is too short has the result 0
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: proof.FlagAtOnce},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 1},
		bpf.RetConstant{Val: 1},
		bpf.RetConstant{Val: 0},
	})
	if err != nil {
		return err
	}
	filter := make([]unix.SockFilter, len(program))
	for i, x := range program {
		filter[i] = unix.SockFilter{Code: x.Op, Jt: x.Jt, Jf: x.Jf, K: x.K}
	}
	return os.NewSyscallError("SO_ATTACH_REUSEPORT_CBPF",
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}))
}

// next returns the next packet that waits, by an inbox that is for this socket alone until there is none.
func (s *socket) next(b *inbox) (message, bool) {
	if s.err != nil {
		return message{}, false
	}
	if b.all == nil {
		b.all = newDatagrams(inboxSize, maxPayload+1)
	}
	if b.next == b.count {
		last := b.count%inboxSize != 0 // those that came since then wait
		b.next, b.count = 0, 0
		if last {
			return message{}, false
		}
		if b.count = b.all.receive(s.waiting, 0); b.count == 0 {
			return message{}, false
		}
	}
	i := b.next
	b.next++
	out := message{data: b.all.payload(i), from: b.all.from(i)}
	out.index, out.arrived = s.family.read(b.all.control(i))
	return out, true
}

// sendBy sends a datagram out of a device.
func (s *socket) sendBy(index int, from netip.Addr, to netip.AddrPort, b []byte) error {
	return send(s.waiting, b, s.family.source(from, index), to)
}

// serve reads the packets that are to be handled at once until the socket is closed.
func (s *socket) serve(log *slog.Logger, handle func(*message)) {
	defer close(s.done)
	data, control := make([]byte, maxPayload+1), make([]byte, maxControl)
	for {
		n, m, _, from, err := s.conn.ReadMsgUDPAddrPort(data, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			log.Debug("a socket of proofs failed", "address", s.conn.LocalAddr(), "error", err)
			continue
		}
		x := message{data: data[:n], from: from.Addr().Unmap()}
		x.index, x.arrived = s.family.read(control[:m])
		handle(&x)
	}
}

// close closes the sockets: serve ends.
func (s *socket) close() {
	if s.waiting >= 0 {
		unix.Close(s.waiting)
		s.waiting = -1
	}
	if s.conn != nil {
		s.conn.Close()
	}
}
