package neighbor

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestAbandon checks that entries in resolution are deleted for both families, and that resolved or static entries and
// those of other devices stay.
func TestAbandon(t *testing.T) {
	netnstest.Require(t)
	here, there := netnstest.New(t), netnstest.New(t)
	for i := range 2 {
		device := fmt.Sprint("p", i)
		netnstest.Cable(t, here, device, fmt.Sprintf("10.0.%d.1/24 fd00:%d::1/64", i, i), there, device, "")
		for _, family := range []string{"ipv4", "ipv6"} { // otherwise the kernel gives up after three seconds
			here.Sysctl(fmt.Sprintf("net.%s.neigh.%s.retrans_time_ms=600000", family, device))
		}
		here.IP("neigh", "add", fmt.Sprintf("10.0.%d.77", i), "lladdr", "02:00:00:00:00:77", "nud", "permanent", "dev", device)
		here.IP("neigh", "add", fmt.Sprintf("fd00:%d::77", i), "lladdr", "02:00:00:00:00:77", "nud", "reachable", "dev", device)
	}
	var h *netlink.Handle
	var device int
	here.Must(func() (err error) {
		if h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return err
		}
		link, err := h.LinkByName("p0")
		if err == nil {
			device = link.Attrs().Index
		}
		return err
	})
	defer h.Close()
	states := func(device string) string {
		return here.IP("-4", "neigh", "show", "dev", device) + here.IP("-6", "neigh", "show", "dev", device)
	}
	for i := range 2 {
		for _, to := range []string{fmt.Sprintf("10.0.%d.9:9", i), fmt.Sprintf("[fd00:%d::9]:9", i)} { // no such host
			var c net.Conn
			here.Must(func() (err error) { c, err = net.Dial("udp", to); return err })
			defer c.Close()
			if _, err := c.Write([]byte("wait")); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range 2 {
		netnstest.Eventually(t, time.Minute, func() error {
			if text := states(fmt.Sprint("p", i)); strings.Count(text, "INCOMPLETE") != 2 {
				return fmt.Errorf("no neighbor is queried:\n%s", text)
			}
			return nil
		})
	}
	if err := Abandon(h, device); err != nil {
		t.Fatal(err)
	}
	if text := states("p0"); strings.Contains(text, "INCOMPLETE") || !strings.Contains(text, "10.0.0.77 lladdr 02:00:00:00:00:77 PERMANENT") || !strings.Contains(text, "fd00:0::77") && !strings.Contains(text, "fd00::77") {
		t.Errorf("on the device:\n%s", text)
	}
	if said := states("p1"); strings.Count(said, "INCOMPLETE") != 2 {
		t.Errorf("on the other:\n%s", said)
	}
	for _, none := range []int{device, 1 << 30} {
		if err := Abandon(h, none); err != nil {
			t.Errorf("%d: %v", none, err)
		}
	}
}
