package linux

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/wecmp"
)

// TestIPv6Disabled checks that without IPv6 IPv4 is forwarded with a computed hash, IPv6 destinations are refused with
// the name of the setting, and one log line reports it.
func TestIPv6Disabled(t *testing.T) {
	for _, where := range []string{
		"net.ipv6.conf.all.disable_ipv6", // before the start
		"net.ipv6.conf.p0.disable_ipv6",  // on the device of the hash check
		"EAFNOSUPPORT", "EOPNOTSUPP",     // as on a kernel started with ipv6.disable=1
	} {
		t.Run(where, func(t *testing.T) {
			h := newHost(t, 2)
			var log logged
			h.config.Logger = slog.New(slog.NewTextHandler(&log, nil))
			h.config.AuditInterval = time.Hour
			if strings.HasPrefix(where, "net.") {
				h.Sysctl(where + "=1")
			}
			d := h.open()
			if errno := map[string]unix.Errno{"EAFNOSUPPORT": unix.EAFNOSUPPORT, "EOPNOTSUPP": unix.EOPNOTSUPP}[where]; errno != 0 {
				d.kernel.conn.Refuse(func(what string) unix.Errno {
					if strings.Contains(what, "nexthop") && strings.Contains(what, "fe80::") {
						return errno
					}
					return 0
				})
			}
			c := &client{t: t, server: newServer(d)}
			hash := c.hello(h.forwarding).Capabilities.FlowHash
			if hash.GetAlgorithm() != computed {
				t.Errorf("flow hash %v, want one that is computed", hash)
			}
			s := program(t, c.server)
			s.do(h.group(1, 1, 1), destination(target4(0), 1))
			h.wants(target4(0), map[string]int{"p0": 512, "p1": 512})
			// The kernel agrees with the hash.
			links, err := h.conn.Links()
			if err != nil {
				t.Fatal(err)
			}
			source, to := mustPrefix("10.255.0.1/32").Addr(), mustPrefix(target4(0)).Addr()
			for i, ports := range lastingPorts(hash, 2, wecmp.ProtocolUDP, source, to) {
				device := uint32(links[slices.IndexFunc(links, func(l rtnl.Link) bool { return l.Name == fmt.Sprintf("p%d", i) })].Index)
				for _, port := range ports[:8] {
					paths, err := h.conn.Paths([]rtnl.Query{{Source: source, Destination: to, IPProto: unix.IPPROTO_UDP, Sport: port, Dport: wecmp.PortRoCE}})
					if err != nil || paths[0].Device != device {
						t.Errorf("source port %d: %+v, %v; want device %d", port, paths, err, device)
					}
				}
			}
			lines := log.lines("level=")
			bad := slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return strings.Contains(l, "level=INFO") || len(l) > 500 })
			if len(lines) != 1 || len(bad) != 1 || !strings.Contains(lines[0], "IPv6") {
				t.Errorf("logged %d lines, want a short one: %v", len(lines), lines)
			}
			if where != "net.ipv6.conf.all.disable_ipv6" {
				return
			}
			refused := s.try(destination(target6(0), 1))
			if len(refused) != 1 || codes.Code(refused[0].Code) != codes.Unimplemented || !strings.Contains(refused[0].Message, where) {
				t.Errorf("an IPv6 destination: %v, want a refusal that names %s", refused, where)
			}
			d.audit()
			if got := d.Stats(); got.Errors != 0 || got.Differences != 0 || got.HashMismatches != 0 {
				t.Errorf("%+v", got)
			}
		})
	}
}
