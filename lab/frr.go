package lab

import (
	"context"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// frrDir is where FRR's daemons are, in its own packages and in Debian's.
const frrDir = "/usr/lib/frr"

// startFRR starts zebra and bgpd on a leaf, without watchfrr and with files of the leaf's own.
func (b *netns) startFRR(ctx context.Context, node string, plane int) error {
	sockets := filepath.Join(b.dir, node, "frr")
	if err := os.MkdirAll(sockets, 0o755); err != nil {
		return err
	}
	owner, err := user.Lookup("frr")
	if err != nil {
		return err
	}
	uid, _ := strconv.Atoi(owner.Uid)
	gid, _ := strconv.Atoi(owner.Gid)
	if err := os.Chown(sockets, uid, gid); err != nil {
		return err
	}
	for _, daemon := range []struct{ name, config, ready string }{
		// FRR 8 loses a member of a nexthop object's group after a flap on recent kernels, while vtysh still shows it: let zebra
		// write plain multipath routes.
		{"zebra", "hostname " + node + "\nno zebra nexthop kernel enable\n", "zserv"},
		{"bgpd", b.frrConfig(plane), "bgpd.vty"},
	} {
		config, err := b.writeFile(node, daemon.name+".conf", daemon.config)
		if err != nil {
			return err
		}
		ready := filepath.Join(sockets, daemon.ready)
		_ = os.Remove(ready) // of a daemon that was killed
		err = b.spawn(node, daemon.name, filepath.Join(frrDir, daemon.name), "-u", "frr", "-g", "frr", "-f", config,
			"-i", filepath.Join(sockets, daemon.name+".pid"), "-z", filepath.Join(sockets, "zserv"), "--vty_socket", sockets, "-A", "127.0.0.1", "-P", "0", "--log", "stdout")
		if err != nil {
			return err
		}
		if err := appears(ctx, ready); err != nil {
			return fmt.Errorf("%s: %s does not start: %w", node, daemon.name, err)
		}
	}
	return nil
}

// appears waits for a file.
func appears(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if err := sleep(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("no %s: %w", path, err)
		}
	}
}

// frrForwards waits until the kernels of all leaves have a route to every server that they should: bgpd announces a route
// without waiting for zebra. (It would with "bgp suppress-fib-pending", which delays withdrawals too, by most of a second.) What
// is not there after the limit is left to the packets to find.
func (b *netns) frrForwards(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for plane := range b.Planes {
		for !b.leafForwards(ctx, plane) {
			if sleep(ctx, 10*time.Millisecond) != nil {
				return
			}
		}
	}
}

func (b *netns) leafForwards(ctx context.Context, plane int) bool {
	var routes []kernelRoute
	if err := askKernel(ctx, b.namespace(b.leafName(plane)), "route show\n", &routes); err != nil {
		return false
	}
	there := map[string]bool{}
	for _, r := range routes {
		there[r.Dst] = true
	}
	for s := range b.Servers {
		for g := range b.GPUs {
			if b.announced(plane, s) > 0 && !there[b.loopback(s, g).Addr().String()] {
				return false
			}
		}
	}
	return true
}

// frrConfig is a leaf's bgpd.conf: examples/frr-leaf.conf for the lab's addresses and with its timers.
func (p *plan) frrConfig(plane int) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("frr defaults datacenter\nhostname %s\nbgp route-map delay-timer 0", p.leafName(plane))
	line("router bgp %d\n bgp router-id %s", p.leafAS(plane), p.leafID(plane))
	line(" no bgp default ipv4-unicast\n bgp bestpath as-path multipath-relax\n coalesce-time 0\n timers bgp 3 9")
	line(" neighbor SERVERS peer-group\n neighbor SERVERS advertisement-interval 0\n neighbor SERVERS timers connect 1")
	for s := range p.Servers {
		for sub := range p.SubPorts {
			peer := p.serverEnd(plane, s, sub)
			line(" neighbor %s remote-as %d\n neighbor %s peer-group SERVERS", peer, p.serverAS(s), peer)
		}
	}
	line(" address-family ipv4 unicast\n  maximum-paths 64\n  neighbor SERVERS activate")
	line("  neighbor SERVERS route-map LOOPBACKS in\n  neighbor SERVERS route-map TO-SERVERS out\n exit-address-family\nexit")
	line("ip prefix-list LOOPBACKS seq 5 permit 10.255.0.0/16 ge 32")
	line("route-map LOOPBACKS permit 10\n match ip address prefix-list LOOPBACKS\nexit")
	// What each server's sub-ports announce is added up, and passed on as the plane's bandwidth toward that server.
	line("route-map TO-SERVERS permit 10\n match ip address prefix-list LOOPBACKS\n set extcommunity bandwidth cumulative\nexit")
	return b.String()
}
