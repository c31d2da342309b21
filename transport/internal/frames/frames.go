// Package frames carries the payloads of Ethernet frames of one EtherType over the devices of a host, for protocols
// without IP. The kernel's routes and neighbor tables provide the Ethernet addresses of next hops.
//
//	frames.go     Endpoint: the packet socket
//	neighbors.go  resolves next hops
package frames

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config is the configuration of an endpoint. All fields are required.
type Config struct {
	EtherType uint16
	// Filter selects the frames to receive: classic BPF on the payload.
	Filter []unix.SockFilter
	// Receive handles the payload of a frame, with the device's lock held. It is valid only during the call.
	Receive func([]byte)
	// Do calls a function with the device's lock held.
	Do func(func())
	// Now returns the time since a fixed moment; it is monotonic.
	Now func() time.Duration
}

// Endpoint sends and receives frames on all devices of a network namespace.
type Endpoint struct {
	config    Config
	fd        int
	file      *os.File
	raw       syscall.RawConn
	neighbors *neighbors
	wait      sync.WaitGroup

	// Guarded by the device's lock:
	count counters

	// mu guards fd against Close, which does not hold the device's lock. mu is acquired inside the device's lock.
	mu     sync.Mutex
	closed bool
}

// counters count frames unless noted otherwise.
type counters struct {
	sent, sentBytes, received, receivedBytes                     uint64
	unresolved, noDevice, tooBig, full, down, failed, afterwards uint64
	kernelDrops                                                  uint64
}

const (
	maxPayload = 1 << 16
	// Socket buffers, as of package udp.
	receiveBuffer, sendBuffer = 8 << 20, 4 << 20
	// turn is the maximum number of frames that one hold of the device's lock handles.
	turn = 32
	// maxWaiting is the maximum number of frames that wait for the address of one next hop: a transport's first window.
	maxWaiting = 512
)

// Open opens the packet socket, in the network namespace of the calling thread. It needs CAP_NET_RAW.
func Open(config Config) (*Endpoint, error) {
	// Protocol 0 receives nothing until the filter is attached.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("packet socket: %w: frames without IP need CAP_NET_RAW", err)
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	program := unix.SockFprog{Len: uint16(len(config.Filter)), Filter: &config.Filter[0]}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(config.EtherType)})
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	for _, b := range []struct{ force, modest, bytes int }{{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer}} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, b.force, b.bytes) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, b.modest, b.bytes) // cannot fail: excess is truncated
		}
	}
	e := &Endpoint{config: config, fd: fd, file: os.NewFile(uintptr(fd), "frames")}
	if e.raw, err = e.file.SyscallConn(); err == nil {
		e.neighbors, err = newNeighbors(config.Do, config.Now, e.resolved)
	}
	if err != nil {
		e.file.Close()
		return nil, err
	}
	e.wait.Go(e.receive)
	return e, nil
}

// Send sends a frame through a device toward an address: head and payload, which may change after the call. Frames wait
// for the next hop's Ethernet address as they do in the kernel. Those that cannot be sent are dropped and counted, as
// on any network.
func (e *Endpoint) Send(device string, to netip.Addr, head, payload []byte) {
	if device == "" {
		e.count.noDevice++
		return
	}
	switch h := e.neighbors.lookup(device, to); {
	case h.known:
		e.transmit(h, head, payload)
	case h.asking && len(h.waiting) < maxWaiting:
		h.waiting = append(h.waiting, append(append(make([]byte, 0, len(head)+len(payload)), head...), payload...))
	default:
		e.count.unresolved++
	}
}

// resolved handles the frames that have waited for a next hop, after its resolution or its failure.
func (e *Endpoint) resolved(h *hop) {
	waiting := h.waiting
	h.waiting = nil
	for _, frame := range waiting {
		if h.known {
			e.transmit(h, frame, nil)
		} else {
			e.count.unresolved++
		}
	}
}

// transmit sends a frame to a next hop.
func (e *Endpoint) transmit(h *hop, head, payload []byte) {
	address := unix.SockaddrLinklayer{Protocol: htons(e.config.EtherType), Ifindex: h.index, Halen: 6}
	copy(address.Addr[:], h.mac[:])
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		e.count.afterwards++
		return
	}
	_, err := unix.SendmsgBuffers(e.fd, [][]byte{head, payload}, nil, &address, unix.MSG_DONTWAIT)
	switch {
	case err == nil:
		e.count.sent++
		e.count.sentBytes += uint64(len(head) + len(payload))
	case errors.Is(err, unix.EMSGSIZE):
		e.count.tooBig++
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		e.count.full++
	case errors.Is(err, unix.ENETDOWN), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		e.count.down++
		e.neighbors.ask(h)
	default:
		e.count.failed++
	}
}

// receive reads frames until the socket is closed.
func (e *Endpoint) receive() {
	buffers := make([]byte, turn*maxPayload)
	var sizes [turn]int
	n := 0
	deliver := func() {
		for i, size := range sizes[:n] {
			e.count.received++
			e.count.receivedBytes += uint64(size)
			e.config.Receive(buffers[i*maxPayload:][:size:size])
		}
	}
	read := func(fd uintptr) bool {
		for n = 0; n < turn; n++ {
			size, err := unix.Read(int(fd), buffers[n*maxPayload:][:maxPayload])
			if err != nil {
				break // none is left, or a device is down: ENETDOWN is reported once
			}
			sizes[n] = size
		}
		return n > 0
	}
	for e.raw.Read(read) == nil {
		e.config.Do(deliver)
	}
}

// Counters returns the following counters, in frames unless the name differs:
//
//	sent, sent_bytes      accepted by the kernel; bytes of payload
//	dropped_unresolved    the next hop's Ethernet address was not found, or too many frames waited for it
//	dropped_no_device     sent through no device
//	dropped_too_big       longer than the device's MTU
//	dropped_full          socket buffer or device queue full
//	dropped_device_down   the device is down or gone
//	dropped_failed        any other error
//	dropped_closed        sent after Close
//	received, received_bytes
//	kernel_drops          dropped by the kernel before they were read: the receive buffer was full
func (e *Endpoint) Counters() map[string]uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closed {
		if s, err := unix.GetsockoptTpacketStats(e.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err == nil {
			e.count.kernelDrops += uint64(s.Drops) // since the last call
		}
	}
	c := &e.count
	return map[string]uint64{"sent": c.sent, "sent_bytes": c.sentBytes, "dropped_unresolved": c.unresolved, "dropped_no_device": c.noDevice, "dropped_too_big": c.tooBig,
		"dropped_full": c.full, "dropped_device_down": c.down, "dropped_failed": c.failed, "dropped_closed": c.afterwards, "received": c.received, "received_bytes": c.receivedBytes,
		"kernel_drops": c.kernelDrops}
}

// Close stops receiving, waits for calls of Receive to end, and closes the socket. It must be called without the
// device's lock. Frames sent afterwards are dropped. A second call does nothing.
func (e *Endpoint) Close() {
	e.mu.Lock()
	if !e.closed {
		e.closed = true
		_ = e.file.Close() // wakes the reader
	}
	e.mu.Unlock()
	e.neighbors.close()
	e.wait.Wait()
}

func htons(n uint16) uint16 { return n<<8 | n>>8 }
