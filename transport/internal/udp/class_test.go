package udp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestClassAndLabel checks the traffic class of datagrams, that of the endpoint and others, also of batches, and that
// the IPv6 flow label is the source port.
func TestClassAndLabel(t *testing.T) {
	const class, port = 0xb8, 61003
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			core, start := &device{}, time.Now()
			e, err := Open(Config{Address: f.b, Core: core, Do: core.do, Now: func() time.Duration { return time.Since(start) }, TrafficClass: class, FlowLabels: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(e.Close)
			core.do(func() { core.endpoint = e })
			conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(f.a, 0)))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			raw, err := conn.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			const flowInfo = 11 // IPV6_FLOWINFO
			if controlErr := raw.Control(func(fd uintptr) {
				if f.a.Is4() {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVTOS, 1)
				} else if err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1); err == nil {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, flowInfo, 1)
				}
			}); controlErr != nil || err != nil {
				t.Fatal(controlErr, err)
			}
			to := conn.LocalAddr().(*net.UDPAddr).AddrPort()
			// Two datagrams of each class make a batch; those of different classes alternate.
			core.do(func() {
				for range 2 {
					e.Send(to, port, []byte{class}, nil, nil)
					for _, other := range []byte{0, 0x48, class} {
						e.SendClass(other, to, port, []byte{other}, nil, nil)
					}
				}
			})
			got := map[byte]int{}
			for range 8 {
				b, oob := make([]byte, 16), make([]byte, 256)
				_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
				_, n, _, _, err := conn.ReadMsgUDP(b, oob)
				if err != nil {
					t.Fatalf("%v; %v", err, e.Counters())
				}
				messages, err := unix.ParseSocketControlMessage(oob[:n])
				if err != nil {
					t.Fatal(err)
				}
				var gotClass, gotLabel uint32
				for _, m := range messages {
					switch {
					case f.a.Is4() && m.Header.Type == unix.IP_TOS:
						gotClass = uint32(m.Data[0])
					case !f.a.Is4() && m.Header.Type == unix.IPV6_TCLASS:
						gotClass = binary.NativeEndian.Uint32(m.Data)
					case !f.a.Is4() && m.Header.Type == flowInfo:
						gotLabel = binary.BigEndian.Uint32(m.Data) & 0xfffff
					}
				}
				if gotClass != uint32(b[0]) || !f.a.Is4() && gotLabel != port {
					t.Errorf("class %#x, flow label %d; want %#x, %d", gotClass, gotLabel, b[0], port)
				}
				got[b[0]]++
			}
			if got[0] != 2 || got[0x48] != 2 || got[class] != 4 {
				t.Errorf("datagrams by class: %v", got)
			}
		})
	}
}
