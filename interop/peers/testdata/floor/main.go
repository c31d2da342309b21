// Command floor is the least that a router in Go can do: it speaks BGP to four leaves, takes the speed of one
// destination out of each UPDATE, and writes the weights to the kernel, with one goroutine for each session and nothing
// else. It shows how much of a contestant's time is the kernel's and the language's.
//
//	floor route|group DESTINATION AS ROUTER-ID LOCAL,REMOTE,DEVICE...
//
// It writes a multipath route, as BIRD does, or a resilient nexthop group that it replaces in place, as fared does.
package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// From linux/rtnetlink.h and linux/nexthop.h.
const (
	rtmNewRoute, rtmNewNexthop          = 24, 104
	rtaDst, rtaMultipath, rtaNexthop    = 1, 9, 30
	rtaGateway                          = 5
	nhaID, nhaGroup, nhaType            = 1, 2, 3
	nhaOIF, nhaGateway, nhaResilient    = 5, 6, 12
	resilientBuckets, resilientIdle     = 1, 2
	groupType                           = 1
	buckets                             = 4096
	group                               = 100
	protocol, table, unicast, universe  = 186, 254, 1, 0
	request, ack, replace, create       = 1, 4, 0x100, 0x400
	kindOpen, kindUpdate, kindKeepalive = 1, 2, 4
	bandwidth                           = 0x0004 // type and sub-type of the Link Bandwidth community
)

type plane struct {
	gateway [4]byte
	index   uint32
	gbps    float64 // 0: no session
}

type router struct {
	mu      sync.Mutex
	netlink int
	grouped bool
	to      [4]byte
	planes  []plane
	begun   bool // all planes have had a speed
	answer  [4096]byte
}

var order = binary.NativeEndian

func attribute(b []byte, kind uint16, value []byte) []byte {
	b = order.AppendUint16(order.AppendUint16(b, uint16(4+len(value))), kind)
	b = append(b, value...)
	return append(b, make([]byte, -len(value)&3)...)
}

// exchange sends a request and reads the kernel's answer.
func (r *router) exchange(kind uint16, body []byte) error {
	b := order.AppendUint32(nil, uint32(16+len(body)))
	b = order.AppendUint16(order.AppendUint16(b, kind), request|ack|replace|create)
	b = append(append(b, make([]byte, 8)...), body...)
	if err := syscall.Sendto(r.netlink, b, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}); err != nil {
		return err
	}
	n, _, err := syscall.Recvfrom(r.netlink, r.answer[:], 0)
	if err != nil || n < 20 {
		return fmt.Errorf("%d octets of an answer, %v", n, err)
	}
	if e := int32(order.Uint32(r.answer[16:])); e != 0 {
		return syscall.Errno(-e)
	}
	return nil
}

// write writes the weights. A plane without a session is left out.
func (r *router) write() error {
	if !r.grouped {
		var hops []byte
		for _, p := range r.planes {
			if p.gbps > 0 {
				hops = append(order.AppendUint16(hops, 16), 0, byte(p.gbps-1))
				hops = attribute(order.AppendUint32(hops, p.index), rtaGateway, p.gateway[:])
			}
		}
		return r.route(attribute(nil, rtaMultipath, hops))
	}
	var members []byte
	for i, p := range r.planes {
		if p.gbps > 0 {
			members = append(order.AppendUint32(members, uint32(1+i)), byte(p.gbps-1), 0, 0, 0)
		}
	}
	b := attribute(make([]byte, 8), nhaID, order.AppendUint32(nil, group))
	b = attribute(b, nhaGroup, members)
	b = attribute(b, nhaType, order.AppendUint16(nil, groupType))
	var size []byte // of a new group
	if !r.begun {
		size = attribute(nil, resilientBuckets, order.AppendUint16(nil, buckets))
		size = attribute(size, resilientIdle, order.AppendUint32(nil, 0)) // buckets move at once
	}
	if err := r.exchange(rtmNewNexthop, attribute(b, nhaResilient|0x8000, size)); err != nil || r.begun {
		return err
	}
	return r.route(attribute(nil, rtaNexthop, order.AppendUint32(nil, group)))
}

func (r *router) route(hops []byte) error {
	b := []byte{syscall.AF_INET, 32, 0, 0, table, protocol, universe, unicast, 0, 0, 0, 0}
	return r.exchange(rtmNewRoute, append(attribute(b, rtaDst, r.to[:]), hops...))
}

// set takes a plane's speed over.
func (r *router) set(plane int, gbps float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.planes[plane].gbps = gbps
	for _, p := range r.planes {
		if !r.begun && p.gbps == 0 {
			return
		}
	}
	if err := r.write(); err != nil {
		fmt.Fprintln(os.Stderr, "the kernel refused the weights:", err)
		os.Exit(1)
	}
	r.begun = true
}

func message(kind byte, body []byte) []byte {
	b := append(bytes.Repeat([]byte{0xff}, 16), 0, byte(19+len(body)), kind)
	return append(b, body...)
}

// speed returns the speed of an UPDATE in Gbit/s, or false if it announces none.
func speed(update []byte) (float64, bool) {
	at := 4 + int(binary.BigEndian.Uint16(update))
	for end := at + int(binary.BigEndian.Uint16(update[at-2:])); at < end; {
		flags, kind, n := update[at], update[at+1], int(update[at+2])
		if at += 3; flags&0x10 != 0 {
			n, at = n<<8|int(update[at]), at+1
		}
		if kind == 16 && n == 8 && binary.BigEndian.Uint16(update[at:]) == bandwidth {
			return float64(math.Float32frombits(binary.BigEndian.Uint32(update[at+4:]))) * 8 / 1e9, true
		}
		at += n
	}
	return 0, false
}

// serve holds the session of a plane until it ends. An error means that there was none.
func (r *router) serve(plane int, local, remote string, open []byte) error {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}}
	c, err := dialer.Dial("tcp4", net.JoinHostPort(remote, "179"))
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write(append(open, message(kindKeepalive, nil)...)); err != nil {
		return err
	}
	b := make([]byte, 1<<16)
	for have := 0; ; {
		n, err := c.Read(b[have:])
		if err != nil {
			return nil
		}
		have += n
		for have >= 19 && have >= int(binary.BigEndian.Uint16(b[16:])) {
			n := int(binary.BigEndian.Uint16(b[16:]))
			switch b[18] {
			case kindUpdate:
				if gbps, ok := speed(b[19:n]); ok {
					r.set(plane, gbps)
				}
			case kindKeepalive:
				if _, err := c.Write(message(kindKeepalive, nil)); err != nil {
					return err
				}
			}
			have = copy(b, b[n:have])
		}
	}
}

func run(args []string) error {
	if len(args) < 5 || args[0] != "route" && args[0] != "group" {
		return fmt.Errorf("usage: floor route|group DESTINATION AS ROUTER-ID LOCAL,REMOTE,DEVICE...")
	}
	to, err := netip.ParseAddr(args[1])
	if err != nil {
		return err
	}
	as, err := strconv.ParseUint(args[2], 10, 16)
	if err != nil {
		return err
	}
	id, err := netip.ParseAddr(args[3])
	if err != nil {
		return err
	}
	r := &router{grouped: args[0] == "group", to: to.As4(), planes: make([]plane, len(args)-4)}
	if r.netlink, err = syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	number, router := uint16(as), id.As4()
	capabilities := []byte{2, 12, 1, 4, 0, 1, 0, 1, 65, 4, 0, 0, byte(number >> 8), byte(number)}
	open := append([]byte{4, byte(number >> 8), byte(number), 0, 90}, router[:]...)
	open = message(kindOpen, append(append(open, byte(len(capabilities))), capabilities...))
	var sessions sync.WaitGroup
	for i, text := range args[4:] {
		word := strings.Split(text, ",")
		d, err := net.InterfaceByName(word[2])
		if err != nil {
			return err
		}
		p := &r.planes[i]
		p.gateway, p.index = netip.MustParseAddr(word[1]).As4(), uint32(d.Index)
		if r.grouped {
			b := attribute([]byte{syscall.AF_INET, 0, protocol, 0, 0, 0, 0, 0}, nhaID, order.AppendUint32(nil, uint32(1+i)))
			b = attribute(attribute(b, nhaOIF, order.AppendUint32(nil, p.index)), nhaGateway, p.gateway[:])
			if err := r.exchange(rtmNewNexthop, b); err != nil {
				return err
			}
		}
		sessions.Go(func() {
			for { // a leaf may come back
				if err := r.serve(i, word[0], word[1], open); err == nil {
					r.set(i, 0)
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}
	sessions.Wait()
	return nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
		os.Exit(1)
	}
}
