package linux

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/wecmp"
)

// TestPolicyOfFields checks by packets that source ports take the sub-ports that Landing returns, on a host whose
// configuration has chosen fib_multipath_hash_policy 3 with the fields of policy 1: before the agent starts, and while
// it runs.
func TestPolicyOfFields(t *testing.T) {
	h := newHost(t, 4)
	choose := func() {
		for _, family := range []string{"ipv4", "ipv6"} {
			h.Sysctl("net."+family+".fib_multipath_hash_fields=0x37", "net."+family+".fib_multipath_hash_policy=3")
		}
	}
	choose()
	d, c := h.start()
	program(t, c.server).do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	e := h.tap()
	for _, when := range []string{"before the start", "while the agent runs"} {
		for f, text := range []string{target4(0), target6(0)} {
			h.landsAsAnswered(e, when, c, mustPrefix(h.forwarding.Loopbacks[f]).Addr(), mustPrefix(text).Addr())
		}
		choose()
		netnstest.Eventually(t, time.Minute, func() error {
			out, err := h.Output("sysctl", "-n", "net.ipv4.fib_multipath_hash_policy", "net.ipv6.fib_multipath_hash_policy")
			if string(out) != "1\n1\n" {
				return fmt.Errorf("the policies are %q: %v", out, err)
			}
			return nil
		})
		if err := d.SetForwarding(h.forwarding); err != nil { // the daemon's next Hello
			t.Fatal(err)
		}
	}
}

// landsAsAnswered sends a packet from source ports of each sub-port.
func (h *host) landsAsAnswered(e *ends, when string, c *client, source, to netip.Addr) {
	h.t.Helper()
	answer, err := c.server.Landing(context.Background(), &farev1.LandingRequest{Source: source.String(), Destination: to.String(), DestinationPort: wecmp.PortRoCE})
	if err != nil {
		h.t.Fatal(err)
	}
	sent := map[byte]int{}
	for i, owner := range answer.SubPortOfPort {
		if owner == 0 || sent[owner] == 8 {
			continue
		}
		sent[owner]++
		e.mark++
		payload := binary.BigEndian.AppendUint64([]byte("fared-count-"), e.mark)
		h.Must(func() error {
			socket, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, uint16(wecmp.MinPort+i))), net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, wecmp.PortRoCE)))
			if err != nil {
				return err
			}
			defer socket.Close()
			_, err = socket.Write(payload)
			return err
		})
		counts, want := map[string]int{}, answer.Devices[owner-1]
		if e.receive(payload, 1, counts); counts[want] != 1 {
			h.t.Errorf("policy 3 %s: a packet to %v from port %d arrived at %v, want %s", when, to, wecmp.MinPort+i, counts, want)
		}
	}
	if len(sent) != len(answer.Devices) {
		h.t.Errorf("policy 3 %s: source ports to %v of %d sub-ports", when, to, len(sent))
	}
}
