package systemd

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// sender sends a UDP packet from each of 64 sockets, again and again, to a data port on which nothing listens, until a
// file exists; then it writes the number of packets. A write that reports the answer to an earlier packet (port
// unreachable) sends nothing and is repeated; a packet that the kernel still refuses counts, as it is lost.
const sender = `sent=0
for fd in {10..73}; do eval "exec $fd>/dev/udp/$1/4791"; done
while [ ! -e /tmp/traffic.stop ]; do
  for fd in {10..73}; do
    for try in {1..9}; do printf x >&$fd 2>/dev/null && break; done
    sent=$((sent + 1))
  done
  sleep 0.02
done
echo $sent >/tmp/traffic.sent
`

// carries runs fn while packets are sent to the destination, and fails if one of them does not arrive at a leaf.
func (m *machine) carries(step string, fn func()) {
	m.t.Helper()
	m.write("/tmp/traffic.sh", sender)
	before := m.arrived()
	m.run("rm -f /tmp/traffic.stop /tmp/traffic.sent; setsid bash /tmp/traffic.sh " + destination + " >/dev/null 2>&1 </dev/null &")
	fn()
	m.run("touch /tmp/traffic.stop")
	var sent, arrived int
	netnstest.Eventually(m.t, time.Minute, func() (err error) {
		out, err := m.try("cat /tmp/traffic.sent")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if sent, err = strconv.Atoi(out); err != nil {
			return err
		}
		if arrived = m.arrived() - before; arrived != sent || sent == 0 {
			return fmt.Errorf("%s: %d packets sent, %d arrived", step, sent, arrived)
		}
		return nil
	})
	m.t.Logf("%s: %d packets sent, %d arrived", step, sent, arrived)
}

// arrived returns the number of UDP packets that have reached the leaves for ports without a listener: those of BFD
// have one, and the leaves drop probes.
func (m *machine) arrived() (n int) {
	m.t.Helper()
	for plane := range 4 {
		lines := strings.Split(m.run(fmt.Sprintf("ip netns exec leaf%d grep ^Udp: /proc/net/snmp", plane)), "\n")
		if len(lines) != 2 {
			m.t.Fatalf("the counters of leaf%d: %q", plane, lines)
		}
		names, values := strings.Fields(lines[0]), strings.Fields(lines[1])
		for i, name := range names {
			if name == "NoPorts" {
				v, err := strconv.Atoi(values[i])
				if err != nil {
					m.t.Fatal(err)
				}
				n += v
			}
		}
	}
	return n
}
