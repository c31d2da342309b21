package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// listener is a socket that receives notifications of changes.
type listener struct {
	file *os.File
	raw  syscall.RawConn
	rx   []byte
}

// listen opens a socket that is a member of groups (RTNLGRP_ numbers). buffer is its receive buffer size in bytes; 0
// selects 8 MiB. Without waits the runtime's poller does not watch the socket, and Wait must not be called.
func listen(waits bool, buffer int, groups ...int) (*listener, error) {
	if buffer == 0 {
		buffer = bufferSize
	}
	var mask uint32
	for _, g := range groups {
		mask |= 1 << (g - 1)
	}
	fd, err := open(mask, buffer)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, waits); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: %w", err), unix.Close(fd))
	}
	l := &listener{file: os.NewFile(uintptr(fd), "netlink"), rx: make([]byte, datagramSize)}
	if l.raw, err = l.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: %w", err), l.file.Close())
	}
	return l, nil
}

// Wait returns when there may be events. After Close it returns os.ErrClosed.
func (l *listener) Wait() error {
	err := l.raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
	if err != nil {
		return fmt.Errorf("netlink: %w: %w", os.ErrClosed, err)
	}
	return nil
}

// poll calls f for the pending messages, without waiting. On an error f may have been called for some of them.
func (l *listener) poll(f func(Message)) (err error) {
	control := l.raw.Control(func(fd uintptr) {
		for {
			n, port, failed := receiveNow(int(fd), l.rx)
			switch {
			case failed == unix.EAGAIN:
				return
			case failed == unix.EINTR:
			case failed == unix.ENOBUFS || failed == 0 && n > len(l.rx):
				// Until the buffer is empty, the kernel does not report further losses.
				err = ErrOverrun
			case failed != 0:
				err = fmt.Errorf("netlink: receive: %w", failed)
				return
			case err == nil:
				if port == 0 {
					for m := range Messages(l.rx[:n]) {
						f(m)
					}
				}
			}
		}
	})
	if control != nil {
		return fmt.Errorf("netlink: %w: %w", os.ErrClosed, control)
	}
	return err
}

// Close ends Wait and closes the socket.
func (l *listener) Close() error { return l.file.Close() }

// Watch receives link events. The deadline of Wait is a timer of the kernel, because a timer of the runtime also wakes
// the runtime's monitor thread each time, as would its system calls (raw.go).
type Watch struct {
	*listener
	signs   *listener // receives the link events of all namespaces; nil if that is not permitted
	both    *os.File  // epoll, of the sockets and the timer
	rawBoth syscall.RawConn

	mu    sync.Mutex // guards timer
	timer int        // timerfd; -1 after Close
}

// WatchLinks opens a socket in the network namespace of the calling thread that receives an event for every later
// change of a link. buffer is its receive buffer size in bytes; 0 selects 8 MiB. If it overflows, events are lost and
// Next and Poll return ErrOverrun.
func WatchLinks(buffer int) (*Watch, error) { return watchLinks(buffer, nil) }

// WatchLinksEverywhere is WatchLinks with signs of the link events of other network namespaces, where the kernel
// permits that. Signs must follow each Wait, which does not wait while there are any.
func WatchLinksEverywhere(buffer int) (*Watch, error) { return watchLinks(buffer, listenEverywhere()) }

func watchLinks(buffer int, signs *listener) (*Watch, error) {
	w := &Watch{timer: -1, signs: signs}
	var err error
	if w.listener, err = listen(false, buffer, unix.RTNLGRP_LINK); err != nil {
		if signs != nil {
			err = errors.Join(err, signs.Close())
		}
		return nil, err
	}
	if err := w.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: watch: %w", err), w.Close())
	}
	return w, nil
}

// listenEverywhere opens a socket that receives the link events of all network namespaces that have an id in this one,
// as those at the other end of a veth pair have. It returns nil if the kernel refuses that, for example without
// CAP_NET_BROADCAST.
func listenEverywhere() *listener {
	const buffer = 64 << 10 // an overrun is a sign too
	l, err := listen(false, buffer, unix.RTNLGRP_LINK)
	if err != nil {
		return nil
	}
	var refused error
	err = l.raw.Control(func(fd uintptr) {
		refused = unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID, 1)
	})
	if err != nil || refused != nil {
		_ = l.Close()
		return nil
	}
	return l
}

// Filter makes the kernel run a BPF program on each later event of this namespace at the moment at which it sends the
// event. The program, of the type for socket filters, is given by its descriptor, and returns how many bytes to keep.
func (w *Watch) Filter(program int) error {
	var refused error
	err := w.raw.Control(func(fd uintptr) {
		refused = os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_BPF, program))
	})
	if err = errors.Join(err, refused); err != nil {
		return fmt.Errorf("netlink: filter: %w", err)
	}
	return nil
}

// Everywhere reports whether Wait also returns after link events of other network namespaces, for Signs.
func (w *Watch) Everywhere() bool { return w.signs != nil }

// Signs discards the pending link events of all namespaces, and reports whether there were any. It must be called by
// one goroutine at a time, after each Wait if Everywhere is true.
func (w *Watch) Signs() (any bool) {
	if w.signs == nil {
		return false
	}
	err := w.signs.poll(func(Message) { any = true })
	return any || errors.Is(err, ErrOverrun)
}

// open opens the timer, and epoll of the sockets and the timer.
func (w *Watch) open() (err error) {
	if w.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC); err != nil {
		return os.NewSyscallError("timerfd_create", err)
	}
	both, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	err = unix.SetNonblock(both, true) // for the runtime's poller
	w.both = os.NewFile(uintptr(both), "epoll")
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if w.rawBoth, err = w.both.SyscallConn(); err != nil {
		return err
	}
	add := func(fd int) error {
		return os.NewSyscallError("epoll_ctl", unix.EpollCtl(both, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}))
	}
	var added error
	for _, l := range []*listener{w.listener, w.signs} {
		if l != nil {
			err = errors.Join(err, l.raw.Control(func(socket uintptr) { added = errors.Join(added, add(int(socket))) }))
		}
	}
	return errors.Join(err, added, add(w.timer))
}

// Wait returns when there may be events, or at the deadline. After Close it returns os.ErrClosed.
func (w *Watch) Wait() error {
	err := w.rawBoth.Read(func(fd uintptr) bool {
		ready, err := epollReady(int(fd))
		return ready || err != nil
	})
	if err != nil {
		return fmt.Errorf("netlink: %w: %w", os.ErrClosed, err)
	}
	return nil
}

// SetDeadline sets the latest time at which Wait returns, also for a Wait in progress; the zero time means no deadline.
// It returns os.ErrClosed after Close.
func (w *Watch) SetDeadline(t time.Time) error {
	var spec unix.ItimerSpec // stops the timer
	if !t.IsZero() {
		spec.Value = unix.NsecToTimespec(max(1, int64(time.Until(t))))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer < 0 {
		return fmt.Errorf("netlink: %w", os.ErrClosed)
	}
	return os.NewSyscallError("timerfd_settime", setTimer(w.timer, &spec)) // until the next call an expired timer stays ready
}

// Close ends Wait and closes the Watch.
func (w *Watch) Close() error {
	var errs []error
	if w.both != nil {
		errs = append(errs, w.both.Close())
	}
	errs = append(errs, w.listener.Close())
	if w.signs != nil {
		errs = append(errs, w.signs.Close())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.timer >= 0 {
		errs = append(errs, unix.Close(w.timer))
		w.timer = -1
	}
	return errors.Join(errs...)
}

// Next waits for events and returns them, like Wait and Poll.
func (w *Watch) Next() ([]LinkEvent, error) {
	for {
		if err := w.Wait(); err != nil {
			return nil, err
		}
		if events, err := w.Poll(); len(events) > 0 || err != nil {
			return events, err
		}
	}
}

// Poll returns the pending events, without waiting. ErrOverrun means that events were lost and all links must be read
// again; the pending events are discarded, so that later events are newer than such a read. It must be called by one
// goroutine at a time.
//
// The kernel sends a link event before it executes the next request of any socket: Poll after Conn.Do returns all
// events from before the execution of the last message of the batch.
func (w *Watch) Poll() (events []LinkEvent, err error) {
	err = w.poll(func(m Message) {
		if e, ok := parseLinkEvent(m); ok {
			events = append(events, e)
		}
	})
	if err != nil {
		return nil, err
	}
	return events, nil
}

// ObjectEvent is an event for a nexthop object, a route, a rule or an address that a socket other than the watcher's
// own ones set or removed. Exactly one of Nexthop, Route, Rule and Address is not nil.
type ObjectEvent struct {
	// Gone is true if the object was removed. Implicit removals have no event: the routes of a removed nexthop object
	// or group, and the nexthop objects of a device without a carrier.
	Gone    bool
	Nexthop *Nexthop
	Route   *Route
	Rule    *Rule
	Address *Address
}

// ObjectWatch receives events for nexthop objects, routes, rules and addresses.
type ObjectWatch struct{ *listener }

// WatchObjects opens a socket in the network namespace of the calling thread that receives an event for every nexthop
// object, rule and address that is set or removed from now on, for routes of all tables but main, and for routes of
// main with the given protocol or to a single address (a /32 of IPv4, a /32 or /128 of IPv6). Changes by the sockets
// with the port ids own (Conn.Port) are excluded: the kernel does not even queue them. All events are therefore changes
// by other programs, after which the owner of mirrored objects compares them with the kernel:
//
//	for watch.Wait() == nil {
//		events, err := watch.Poll()
//		if err != nil || slices.ContainsFunc(events, concernsMe) {
//			readEverythingAgainAndRepair()
//		}
//	}
//
// buffer is the receive buffer size as in WatchLinks.
func WatchObjects(buffer int, protocol uint8, own ...uint32) (*ObjectWatch, error) {
	l, err := listen(true, buffer, unix.RTNLGRP_NEXTHOP, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return nil, err
	}
	program := objectFilter(protocol, own)
	var failed error
	err = l.raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	})
	if err := errors.Join(err, failed); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: attach a filter: %w", err), l.Close())
	}
	return &ObjectWatch{l}, nil
}

// objectFilter returns the classic BPF program of WatchObjects. BPF loads use network byte order, netlink headers host
// byte order.
func objectFilter(protocol uint8, own []uint32) (program []unix.SockFilter) {
	const (
		load32, load16, load8         = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, unix.BPF_LD | unix.BPF_B | unix.BPF_ABS
		equal, answer                 = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		kindAt, portAt                = 4, 12                                          // struct nlmsghdr
		lengthAt, tableAt, protocolAt = headerSize + 1, headerSize + 4, headerSize + 5 // struct rtmsg; tables above 255 have RT_TABLE_COMPAT
		drop, pass                    = 0, 1<<32 - 1
	)
	add := func(code uint16, k uint32, yes, no uint8) {
		program = append(program, unix.SockFilter{Code: code, Jt: yes, Jf: no, K: k})
	}
	host32 := func(v uint32) uint32 { return binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, v)) }
	host16 := func(v uint16) uint32 {
		return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, v)))
	}
	add(load32, portAt, 0, 0)
	for _, port := range own {
		add(equal, host32(port), 0, 1)
		add(answer, drop, 0, 0)
	}
	add(load16, kindAt, 0, 0)
	add(equal, host16(unix.RTM_NEWROUTE), 2, 0)
	add(equal, host16(unix.RTM_DELROUTE), 1, 0)
	add(answer, pass, 0, 0)
	add(load8, tableAt, 0, 0)
	add(equal, unix.RT_TABLE_MAIN, 1, 0)
	add(answer, pass, 0, 0)
	add(load8, protocolAt, 0, 0)
	add(equal, uint32(protocol), 3, 0)
	add(load8, lengthAt, 0, 0)
	add(equal, 32, 1, 0)
	add(equal, 128, 0, 1)
	add(answer, pass, 0, 0)
	add(answer, drop, 0, 0)
	return program
}

// Poll returns the pending events, without waiting. ErrOverrun means that events were lost; the pending ones are
// discarded. It must be called by one goroutine at a time.
func (w *ObjectWatch) Poll() (events []ObjectEvent, err error) {
	err = w.poll(func(m Message) {
		if e, ok := parseObjectEvent(m); ok {
			events = append(events, e)
		}
	})
	if err != nil {
		return nil, err
	}
	return events, nil
}

func parseObjectEvent(m Message) (e ObjectEvent, ok bool) {
	switch m.Kind {
	case unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		var n Nexthop
		n, ok = parseNexthop(m.Body)
		e.Nexthop, e.Gone = &n, m.Kind == unix.RTM_DELNEXTHOP
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		var r Route
		r, ok = parseRoute(m.Body)
		e.Route, e.Gone = &r, m.Kind == unix.RTM_DELROUTE
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		var r Rule
		r, ok = parseRule(m.Body)
		e.Rule, e.Gone = &r, m.Kind == unix.RTM_DELRULE
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		var a Address
		a, ok = ParseAddress(m.Body)
		e.Address, e.Gone = &a, m.Kind == unix.RTM_DELADDR
	}
	return e, ok
}
