package interop

import (
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// dropped returns the faults of dropped routes in `fared status`, each "PLANE REASON" once, sorted.
func (d *fared) dropped() (out []string, err error) {
	var answer struct {
		Faults []struct{ Kind, Plane, Reason, Remedy string }
	}
	err = d.status(&answer)
	for _, f := range answer.Faults {
		if f.Kind == "routes-dropped" && f.Remedy != "" {
			out = append(out, f.Plane+" "+f.Reason)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), err
}

// dropsAll waits until a server shows dropped routes for a reason on each plane, and judges that it is unhealthy with
// this remedy.
func (d *fared) dropsAll(t *testing.T, reason, remedy string) {
	t.Helper()
	netnstest.Eventually(t, within, func() error {
		got, err := d.dropped()
		if want := []string{"p0 " + reason, "p1 " + reason}; err != nil || !slices.Equal(got, want) {
			return fmt.Errorf("faults %q, want %q (%v)", got, want, err)
		}
		text, err := exec.Command(d.binary, "health", "--socket", d.socket).CombinedOutput()
		if err == nil || !strings.Contains(string(text), "UNHEALTHY") || !strings.Contains(string(text), "no destination is known") || !strings.Contains(string(text), remedy) {
			return fmt.Errorf("fared health (%v):\n%s", err, text)
		}
		return nil
	})
}

// TestServersOfOneAS has servers of one AS behind leaves that keep their AS in the paths: no route is accepted, which
// is a fault with a remedy.
func TestServersOfOneAS(t *testing.T) {
	for name, d := range map[string]daemon{"FRR": frr{}, "BIRD": bird{}} {
		t.Run(name, func(t *testing.T) {
			if name != "BIRD" {
				gate.Slow(t, gate.Interop, "another leaf")
			}
			f := newFabric(t, options{daemons: both(d), oneAS: true})
			f.servers[0].fared.dropsAll(t, "route_as_loop", "as-override")
		})
	}
}

// TestServersInOneSubnet has servers in one subnet of each leaf, which sends third-party next hops: routes are dropped,
// which is a fault, and with subnet_next_hops accepted. Then packets reach the other server, and the leaf has forwarded
// them.
func TestServersInOneSubnet(t *testing.T) {
	for name, d := range map[string]daemon{"FRR": frr{}, "BIRD": bird{}} {
		t.Run(name, func(t *testing.T) {
			f := subnetFabric(t, d)
			f.servers[0].fared.dropsAll(t, "route_next_hop", "subnet_next_hops: true")
			for _, s := range f.servers {
				s.fared.Stop()
				s.startInSubnet(t, f, "subnet_next_hops: true")
			}
			f.weigh("with subnet_next_hops", "1:1")
			netnstest.Eventually(t, within, func() error { // both ways, before the first packet
				for _, s := range f.servers {
					for _, dst := range f.servers[1-s.index].loopbacks {
						d, err := s.fared.toward(dst)
						if err != nil || !d.Planes[0].InEffect || !d.Planes[1].InEffect {
							return fmt.Errorf("server %d toward %s: %+v, %v", s.index, dst, d, err)
						}
					}
				}
				return nil
			})
			for _, to := range f.servers[1].loopbacks {
				from := f.servers[0].loopbacks[slices.Index(f.servers[1].loopbacks, to)]
				out, err := f.servers[0].ns.Output("ping", "-c20", "-i0.01", "-W5", "-I", from.Addr().String(), to.Addr().String())
				if err != nil || !strings.Contains(string(out), " 0% packet loss") || to.Addr().Is4() && strings.Count(string(out), " ttl=63 ") != 20 {
					t.Errorf("%s: %v\n%s", to, err, out)
				}
			}
		})
	}
}

// subnetFabric starts two leaves, each with a bridge and one subnet for both servers, and servers with data planes of
// driver linux.
func subnetFabric(t *testing.T, d daemon) *fabric {
	t.Helper()
	netnstest.Require(t, append([]string{"ping", "go"}, d.tools()...)...)
	f := &fabric{t: t, opt: options{daemons: both(d), driver: "linux", deadline: 3 * time.Second}}
	for i := range servers {
		s := &server{index: i, ns: newNamespace(t, false), as: serverAS[i], loopbacks: []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("10.255.0.%d/32", i+1)), netip.MustParsePrefix(fmt.Sprintf("fd00:255::%d/128", i+1)),
		}}
		s.ns.Addr("lo", s.loopbacks[0].String(), s.loopbacks[1].String())
		f.servers[i] = s
	}
	for p := range planes {
		l := &leaf{name: fmt.Sprintf("leaf%d", p), plane: p, ns: newNamespace(t, true), as: uint32(65001 + 10*p), routerID: netip.AddrFrom4([4]byte{10, 254, byte(p), 1}), dir: testbed.ShortDir(t)}
		near := [2]netip.Addr{netip.AddrFrom4([4]byte{10, byte(p), 0, 1}), netip.MustParseAddr(fmt.Sprintf("2001:db8:%x::1", p))}
		l.ns.IP("link", "add", "subnet", "type", "bridge")
		for _, device := range []string{"all", "subnet"} { // a redirected flow would pass the leaf
			l.ns.Sysctl("net.ipv4.conf." + device + ".send_redirects=0")
		}
		l.ns.Addr("subnet", netip.PrefixFrom(near[0], 24).String(), netip.PrefixFrom(near[1], 64).String())
		for i, s := range f.servers {
			x := &peer{device: fmt.Sprintf("srv%d", i), farDevice: laneDevice(p, 0), far: s.ns, server: s, as: s.as, local: near,
				remote: [2]netip.Addr{netip.AddrFrom4([4]byte{10, byte(p), 0, byte(11 + i)}), netip.MustParseAddr(fmt.Sprintf("2001:db8:%x::%x", p, 0x11+i))}}
			netnstest.Veth(t, l.ns, x.device, x.far, x.farDevice)
			l.ns.IP("link", "set", x.device, "master", "subnet", "up")
			x.far.Addr(x.farDevice, netip.PrefixFrom(x.remote[0], 24).String(), netip.PrefixFrom(x.remote[1], 64).String())
			l.peers = append(l.peers, x)
		}
		f.leaves[p] = []*leaf{l}
		d.start(t, l)
	}
	for _, s := range f.servers {
		dir := testbed.ShortDir(t)
		s.dir = startDataplane(t, f, s, dir)
		s.startInSubnet(t, f, "subnet_next_hops: false")
	}
	return f
}

// startInSubnet starts the server's daemon with a key of each session. Its data plane goes on.
func (s *server) startInSubnet(t *testing.T, f *fabric, key string) {
	t.Helper()
	dir := testbed.ShortDir(t)
	s.fared = &fared{binary: binary.Fared(t), socket: filepath.Join(dir, "fared.sock")}
	text := faredConfig(f, s, fmt.Sprintf("address: %q", "unix:"+s.dir), s.fared.socket)
	s.fared.config = writeFile(t, dir, "fared.yaml", strings.ReplaceAll(text, "peer_as: ", key+", peer_as: "))
	s.fared.again(t, s)
}
