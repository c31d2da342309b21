package interop

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

const (
	planes  = 2
	servers = 2
	lanes   = 2 // sub-ports of a server in a plane

	slots = 16 // slots of a pair of loopbacks

	laneSpeed = 4_000_000_000 // bit/s
)

// serverAS are the servers' AS numbers. The second one needs four bytes, so its communities carry AS_TRANS.
var serverAS = [servers]uint32{65101, 4200000102}

// options are the options of a fabric.
type options struct {
	daemons    [planes]daemon
	unnumbered bool
	bfd        time.Duration   // interval on all sessions, together with a long hold time; 0: no BFD
	auth       [planes]bfdAuth // authentication of BFD; the servers have that of plane 0 as bfd.auth, others as bfd_auth of sessions
	restart    time.Duration   // the servers' bgp.restart_time
	deadline   time.Duration   // the servers' start.deadline; 0: 3 s
	advertise  string          // the servers' path_bandwidth.advertise; "": the default
	oneAS      bool            // all servers have the first one's AS
	allowOwnAS int             // the servers' bgp.allow_own_as
	cables     int             // sub-ports of a server in a plane; 0: lanes
	speed      string          // speed of the servers' sub-ports; "": 4G
	anyAS      [planes]bool    // the servers' sessions to the plane have no peer_as
	metrics    bool            // the servers serve metrics at 127.0.0.1:9469
	// pathBandwidth is the servers' path_bandwidth, keys and values in one line; "" means that advertise and missing
	// apply.
	pathBandwidth string
	missing       string      // the servers' path_bandwidth.missing; "": the default
	leaves        int         // per plane: 1, or 2 with a server at each
	each          func(*leaf) // adapts a leaf before it starts
	driver        string      // driver of the servers' data planes: fared dataplane's --driver; "": in memory
	inside        bool        // the data planes run in the processes of the daemons
}

// fabric is the leaves and servers of one test.
type fabric struct {
	t       *testing.T
	opt     options
	leaves  [planes][]*leaf
	servers [servers]*server
}

// server is a GPU server with one GPU.
type server struct {
	index     int
	ns        *netnstest.Namespace
	as        uint32
	loopbacks []netip.Prefix
	fared     *fared
	dir       string // folder of the agent in the daemon's process, "" before the first start

	generations map[string]int // of the sessions that kept has seen
}

// leaf is a switch of a plane.
type leaf struct {
	name     string
	plane    int
	ns       *netnstest.Namespace
	as       uint32
	routerID netip.Addr
	peers    []*peer
	dir      string // folder for the daemon's files
	running  []*netnstest.Process

	// bfd is the BFD interval on all sessions, which then have a long hold time; 0 means no BFD.
	bfd time.Duration
	// speed, for a fared leaf, is that of its sub-ports; "": 4G.
	speed string
	// auth, for BIRD, authenticates BFD packets.
	auth bfdAuth
	// cumulative, for FRR, sets extcommunity bandwidth cumulative toward servers.
	cumulative bool
	// uint32, for FRR, sets disable-link-bw-encoding-ieee toward servers.
	uint32 bool
	// extended, for FRR from 10.1 on, sets extended-link-bandwidth toward servers.
	extended bool
	// advertise, for BIRD, replaces the bandwidth toward servers, bit/s; 0 means none.
	advertise uint64
	// shutdown, for FRR and BIRD, adds GRACEFUL_SHUTDOWN (RFC 8326) toward servers.
	shutdown bool
	// keeps, for FRR, sets graceful-restart and preserve-fw-state: the leaf forwards while its bgpd restarts.
	keeps bool
	// replaces, for FRR, starts zebra with --v6-rr-semantics: it replaces an IPv6 route in one step, and not by its
	// removal and addition.
	replaces bool
	// policy holds, for FRR, words after "neighbor X" toward servers, such as as-override; for fared only as-override.
	policy string
	// confederation, for FRR, is the AS number that servers see; 0 means none.
	confederation uint32
	// strip removes bandwidth from routes toward servers.
	strip bool
}

// outsideAS returns the AS number of the leaf toward servers.
func (l *leaf) outsideAS() uint32 {
	if l.confederation != 0 {
		return l.confederation
	}
	return l.as
}

// peer is a neighbor of a leaf over one link.
type peer struct {
	device     string // device of the leaf
	farDevice  string
	far        *netnstest.Namespace
	server     *server // nil: a leaf
	lane       int
	as         uint32
	unnumbered bool
	local      [2]netip.Addr // IPv4, IPv6; of numbered links
	remote     [2]netip.Addr
}

// sessions returns the number of sessions over the link.
func (p *peer) sessions() int {
	if p.unnumbered {
		return 1
	}
	return 2
}

// laneDevice returns the name of a server's sub-port.
func laneDevice(plane, lane int) string { return fmt.Sprintf("p%dl%d", plane, lane) }

// newFabric builds and starts everything. fared is started last and need not have converged when newFabric returns.
func newFabric(t *testing.T, opt options) *fabric {
	t.Helper()
	if opt.leaves == 0 {
		opt.leaves = 1
	}
	if opt.deadline == 0 {
		opt.deadline = 3 * time.Second
	}
	tools := []string{"ping", "go"}
	for _, d := range opt.daemons {
		tools = append(tools, d.tools()...)
	}
	netnstest.Require(t, tools...)
	f := &fabric{t: t, opt: opt}
	for i := range servers {
		s := &server{index: i, ns: newNamespace(t, false), as: serverAS[i], loopbacks: []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("10.255.0.%d/32", i+1)), netip.MustParsePrefix(fmt.Sprintf("fd00:255::%d/128", i+1)),
		}}
		if opt.oneAS {
			s.as = serverAS[0]
		}
		for _, p := range s.loopbacks {
			s.ns.Addr("lo", p.String())
		}
		f.servers[i] = s
	}
	for p := range planes {
		for i := range opt.leaves {
			l := &leaf{
				name: fmt.Sprintf("leaf%d-%d", p, i), plane: p, ns: newNamespace(t, true), as: uint32(65000 + 10*p + i + 1),
				routerID: netip.AddrFrom4([4]byte{10, 254, byte(p), byte(i + 1)}), dir: testbed.ShortDir(t),
			}
			l.ns.Addr("lo", l.routerID.String()+"/32", fmt.Sprintf("fd00:254:%d::%d/128", p, i+1))
			f.leaves[p] = append(f.leaves[p], l)
		}
		for s := range servers {
			for k := range cmp.Or(opt.cables, lanes) {
				f.wire(p, s, k)
			}
		}
		if opt.leaves == 2 {
			f.wireLeaves(p)
		}
	}
	for p := range planes {
		for _, l := range f.leaves[p] {
			l.bfd, l.auth, l.speed = opt.bfd, opt.auth[p], opt.speed
			if opt.each != nil {
				opt.each(l)
			}
			opt.daemons[p].start(t, l)
		}
	}
	for _, s := range f.servers {
		s.fared = startFared(t, f, s)
	}
	t.Cleanup(f.describe)
	return f
}

// leafOf returns the leaf of a plane to which the server is wired.
func (f *fabric) leafOf(plane, server int) *leaf {
	return f.leaves[plane][min(server, len(f.leaves[plane])-1)]
}

func (f *fabric) wire(plane, server, lane int) {
	l, s := f.leafOf(plane, server), f.servers[server]
	p := &peer{device: fmt.Sprintf("srv%d-%d", server, lane), farDevice: laneDevice(plane, lane), far: s.ns,
		server: s, lane: lane, as: s.as, unnumbered: f.opt.unnumbered}
	v4 := netip.AddrFrom4([4]byte{10, byte(plane), byte(server), byte(2 * lane)})
	v6 := netip.MustParseAddr(fmt.Sprintf("2001:db8:%x:%x::1", plane, server*16+lane))
	p.local, p.remote = [2]netip.Addr{v4, v6}, [2]netip.Addr{v4.Next(), v6.Next()}
	f.join(l, p)
}

func (f *fabric) wireLeaves(plane int) {
	a, b := f.leaves[plane][0], f.leaves[plane][1]
	v4 := netip.AddrFrom4([4]byte{10, byte(plane), 255, 0})
	v6 := netip.MustParseAddr(fmt.Sprintf("2001:db8:%x:ff::1", plane))
	p := &peer{device: "fabric0", farDevice: "fabric1", far: b.ns, as: b.as,
		local: [2]netip.Addr{v4, v6}, remote: [2]netip.Addr{v4.Next(), v6.Next()}}
	f.join(a, p)
	b.peers = append(b.peers, &peer{device: "fabric1", farDevice: "fabric0", far: a.ns, as: a.as, local: p.remote, remote: p.local})
}

// join creates the link and gives both ends their addresses.
func (f *fabric) join(l *leaf, p *peer) {
	f.t.Helper()
	near, far := "", ""
	if !p.unnumbered {
		near, far = fmt.Sprintf("%v/31 %v/64", p.local[0], p.local[1]), fmt.Sprintf("%v/31 %v/64", p.remote[0], p.remote[1])
	}
	netnstest.Cable(f.t, l.ns, p.device, near, p.far, p.farDevice, far)
	l.peers = append(l.peers, p)
}

// newNamespace creates a namespace whose addresses are usable at once and survive a device that goes down. A server
// does not forward, a leaf does.
func newNamespace(t *testing.T, forwards bool) *netnstest.Namespace {
	t.Helper()
	n := netnstest.New(t)
	forward := "0"
	if forwards {
		forward = "1"
	}
	n.Sysctl("net.ipv4.ip_forward="+forward, "net.ipv6.conf.all.forwarding="+forward, "net.ipv6.conf.default.forwarding="+forward,
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0", "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
		"net.ipv6.conf.all.keep_addr_on_down=1", "net.ipv6.conf.default.keep_addr_on_down=1")
	return n
}

func writeFile(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// lane takes a server's sub-port down or up, at the leaf's end like a cable. It returns when the server has noticed.
func (f *fabric) lane(plane, server, lane int, up bool) {
	f.t.Helper()
	f.cables(plane, server, []int{lane}, up)
}

// port takes all sub-ports of a server in a plane down or up.
func (f *fabric) port(plane, server int, up bool) {
	f.t.Helper()
	var all []int
	for k := range cmp.Or(f.opt.cables, lanes) {
		all = append(all, k)
	}
	f.cables(plane, server, all, up)
}

func (f *fabric) cables(plane, server int, which []int, up bool) {
	f.t.Helper()
	state := map[bool]string{true: "up", false: "down"}[up]
	l, s := f.leafOf(plane, server), f.servers[server]
	for _, p := range l.peers {
		if p.server == s && slices.Contains(which, p.lane) {
			l.ns.IP("link", "set", p.device, state)
		}
	}
	for _, k := range which {
		netnstest.Eventually(f.t, within, func() error {
			carrier, err := s.fared.carrier(laneDevice(plane, k))
			if err == nil && carrier != up {
				err = fmt.Errorf("server %d: %s has carrier %v, want %v", server, laneDevice(plane, k), carrier, up)
			}
			return err
		})
	}
}

// run starts a program of the leaf and waits until it has created its socket.
func (l *leaf) run(t *testing.T, socket, name string, args ...string) {
	t.Helper()
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	p := l.ns.Start(t, name, args...)
	l.running = append(l.running, p)
	testbed.Until(t, socket, p)
}

// crash kills the leaf's programs.
func (l *leaf) crash() {
	for _, p := range l.running {
		p.Kill()
	}
	l.running = nil
}

// echoes counts the pings that have reached the server, of both families.
func (s *server) echoes(t *testing.T) int {
	t.Helper()
	count := 0
	s.ns.Must(func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			if w := strings.Fields(line); len(w) == 2 && w[0] == "Icmp6InEchos" {
				n, err := strconv.Atoi(w[1])
				if err != nil {
					return err
				}
				count += n
			}
		}
		if b, err = os.ReadFile("/proc/thread-self/net/snmp"); err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(b)) {
			w := strings.Fields(line)
			if len(w) == 0 || w[0] != "Icmp:" {
				continue
			}
			if names == nil {
				names = w
				continue
			}
			for i, name := range names {
				if name == "InEchos" {
					n, err := strconv.Atoi(w[i])
					if err != nil {
						return err
					}
					count += n
				}
			}
		}
		return nil
	})
	return count
}
