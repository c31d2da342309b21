package linux

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// ends counts packets of a host at the far ends of its sub-ports: UDP datagrams that carry the current mark, by
// sub-port.
type ends struct {
	t       testing.TB
	h       *host
	fd      int
	names   map[int]string // of the leaf's devices
	senders map[string]*net.UDPConn
	mark    uint64 // of the datagrams of this round
}

// tap listens on all devices of the leaf. Neighbors are permanent, so that no packet waits for address resolution.
func (h *host) tap() *ends {
	h.t.Helper()
	e := &ends{t: h.t, h: h, names: map[int]string{}, senders: map[string]*net.UDPConn{}}
	var links []net.Interface
	h.leaf.Must(func() (err error) {
		if links, err = net.Interfaces(); err != nil {
			return err
		}
		e.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		if err != nil {
			return err
		}
		return unix.SetsockoptInt(e.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	})
	h.t.Cleanup(func() {
		unix.Close(e.fd)
		for _, s := range e.senders {
			s.Close()
		}
	})
	var lines []string
	for _, l := range links {
		var i int
		if _, err := fmt.Sscanf(l.Name, "p%d", &i); err == nil {
			e.names[l.Index] = l.Name
			for _, gateway := range []string{fmt.Sprintf("10.1.%d.2", i), fmt.Sprintf("fd01:%d::2", i)} {
				lines = append(lines, fmt.Sprintf("neigh replace %s lladdr %v dev %s", gateway, l.HardwareAddr, l.Name))
			}
		}
	}
	batch(h.t, h.Namespace, lines)
	return e
}

func htons(v uint16) uint16 { return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v)) }

// sender returns a socket that is bound to a source address, or to none, and to its own port.
func (e *ends) sender(source string, i int) *net.UDPConn {
	e.t.Helper()
	key := fmt.Sprint(source, i)
	if s := e.senders[key]; s != nil {
		return s
	}
	e.h.Must(func() error {
		network := "udp4"
		if strings.Contains(source, ":") {
			network = "udp6"
		}
		socket, err := net.ListenUDP(network, net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(source), 0)))
		if err == nil {
			e.senders[key] = socket
		}
		return err
	})
	return e.senders[key]
}

// send sends one datagram for each of n flows from a source address to a destination, and returns the number of
// datagrams received at the far end of each sub-port. Refusals by the kernel count as "refused".
func (e *ends) send(source, destination string, flows int) map[string]int {
	e.t.Helper()
	const ports, burst = 4096, 512
	to := netip.MustParsePrefix(destination).Addr()
	e.mark++
	payload := binary.BigEndian.AppendUint64([]byte("fared-count-"), e.mark)
	counts := map[string]int{}
	wait := 0
	for sent := 0; sent < flows; {
		n := min(burst, flows-sent)
		wait += n
		for i := range n {
			flow := sent + i
			at := netip.AddrPortFrom(to, uint16(20000+flow%ports))
			if _, err := e.sender(source, flow/ports).WriteToUDPAddrPort(payload, at); err != nil {
				counts["refused"]++
				wait--
			}
		}
		wait = e.receive(payload, wait, counts) // a busy machine delivers a burst late
		sent += n
	}
	return counts
}

// receive counts datagrams with a payload until n have arrived or no more arrive. It returns the number of those that
// have not.
func (e *ends) receive(payload []byte, n int, counts map[string]int) int {
	e.t.Helper()
	buffer := make([]byte, 2048)
	for patience := 0; n > 0; {
		size, from, err := unix.Recvfrom(e.fd, buffer, unix.MSG_DONTWAIT)
		if err == unix.EAGAIN {
			poll := []unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}}
			if ready, _ := unix.Poll(poll, 200); ready == 0 {
				if patience++; patience == 4 {
					return n // the rest was dropped
				}
			}
			continue
		}
		if err != nil {
			e.t.Fatal(err)
		}
		l, ok := from.(*unix.SockaddrLinklayer)
		if ok && l.Pkttype == unix.PACKET_HOST && size > len(payload) && string(buffer[size-len(payload):size]) == string(payload) {
			counts[e.names[l.Ifindex]]++
			n--
		}
	}
	return 0
}
