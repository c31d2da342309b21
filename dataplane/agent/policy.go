package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
)

// policyInterval is the time after which the policy reads the machine's addresses and routes again: that takes 0.1 s
// next to 131,072 routes of the agent, too long for a Hello, before which operations wait.
const policyInterval = time.Minute

// policy implements contract.Policy: the destinations and devices that a control plane may program.
//
// Some addresses are never permitted: a route to them would take effect for this machine's programs and not for GPUs.
// The machine's addresses, gateways, and the networks of devices that are no sub-ports are refused, unless an allowed
// prefix is as long as the refused one.
type policy struct {
	prefixes []netip.Prefix // empty permits all
	devices  []string       // patterns of path.Match; empty permits all

	mu   sync.Mutex // guards conn and read
	conn *rtnl.Conn // nil does without the machine's addresses
	read time.Time

	machine atomic.Pointer[machine]
	hops    atomic.Pointer[hops]
}

// machine is the part of the kernel's state that routes must not hide.
type machine struct {
	addresses, gateways map[netip.Addr]bool
	networks            []network
}

// network is a prefix that the machine reaches directly.
type network struct {
	prefix netip.Prefix
	device rtnl.Link
}

// hops are the sub-ports and next hops of the last Hello.
type hops struct {
	devices  map[string]bool
	nextHops map[netip.Addr]bool
}

// newPolicy opens a socket to the kernel in the network namespace of the calling thread, unless the driver forwards
// nothing.
func newPolicy(c *Config) (*policy, error) {
	p := &policy{prefixes: c.AllowPrefixes, devices: c.AllowDevices}
	p.machine.Store(&machine{})
	p.hops.Store(&hops{})
	if c.Driver == Memory {
		return p, nil
	}
	var err error
	if p.conn, err = rtnl.Dial(); err != nil {
		return nil, err
	}
	if err := p.refresh(0); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *policy) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return nil
	}
	err := p.conn.Close()
	p.conn = nil
	return err
}

// refresh reads the machine's addresses and routes if the last reading is older than age.
func (p *policy) refresh(age time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil || time.Since(p.read) < age {
		return nil
	}
	m, err := readMachine(p.conn)
	if err != nil {
		return fmt.Errorf("read the machine's addresses and gateways: %w", err)
	}
	p.read = time.Now()
	p.machine.Store(m)
	return nil
}

// programs are the protocols of routes that are read: those of the kernel, administrators, address configuration and
// routing daemons. The kernel filters by them, so that the agent's routes, of which there may be 131,072, are not read.
var programs = []uint8{unix.RTPROT_KERNEL, unix.RTPROT_BOOT, unix.RTPROT_STATIC, unix.RTPROT_RA, unix.RTPROT_DHCP, unix.RTPROT_ZEBRA, unix.RTPROT_BIRD, unix.RTPROT_BGP, unix.RTPROT_OSPF}

func readMachine(conn *rtnl.Conn) (*machine, error) {
	m := &machine{addresses: map[netip.Addr]bool{}, gateways: map[netip.Addr]bool{}}
	links, err := conn.Links()
	if err != nil {
		return nil, err
	}
	byIndex := make(map[int]rtnl.Link, len(links))
	for _, d := range links {
		byIndex[d.Index] = d
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		addresses, err := conn.Addresses(family)
		if err != nil {
			return nil, err
		}
		for _, a := range addresses {
			m.addresses[a.Addr] = true
		}
		for _, protocol := range programs {
			hops, err := conn.Hops(family, protocol)
			if err != nil {
				return nil, err
			}
			for _, h := range hops {
				if h.Gateway.IsValid() {
					m.gateways[h.Gateway] = true
				} else if h.Table == unix.RT_TABLE_MAIN && h.Device != 0 && h.Prefix.Bits() > 0 && h.Type == unix.RTN_UNICAST {
					m.networks = append(m.networks, network{h.Prefix.Masked(), byIndex[h.Device]})
				}
			}
		}
	}
	return m, nil
}

// Forwarding implements contract.Policy.
func (p *policy) Forwarding(forwarding *farev1.Forwarding) error {
	h := &hops{devices: map[string]bool{}, nextHops: map[netip.Addr]bool{}}
	for i, plane := range forwarding.GetPlanes() {
		for j, subPort := range plane.GetSubPorts() {
			if err := p.device(subPort.Device, subPort.Match); err != nil {
				return status.Errorf(codes.PermissionDenied, "forwarding: planes[%d].sub_ports[%d]: %s", i, j, err)
			}
			h.devices[subPort.Device] = true
			for _, text := range []string{subPort.NextHopV4, subPort.NextHopV6} {
				if hop, err := netip.ParseAddr(text); err == nil {
					h.nextHops[hop] = true
				}
			}
		}
	}
	p.hops.Store(h)
	return nil
}

// device returns an error unless a device may be a sub-port: where match selects it, that is compared in place of the
// name, which the agent gives to whichever device fits. A match that is a pattern itself must be one of the permitted
// texts, because a pattern that fits it, such as name:eth?, may permit fewer devices than it.
func (p *policy) device(name, match string) error {
	if name == "lo" {
		return errors.New("device lo is the loopback device, which is no sub-port: correct the control plane's sub-ports")
	}
	name = cmp.Or(match, name)
	flat := strings.NewReplacer("/", "|") // a * of path.Match ends at the slash between a function and its port
	wide := strings.HasPrefix(match, "name:") && strings.ContainsAny(match, `*?[\`)
	permits := func(pattern string) bool {
		ok, _ := path.Match(flat.Replace(pattern), flat.Replace(name))
		return pattern == name || ok && (!wide || pattern == "*" || pattern == "name:*")
	}
	if len(p.devices) > 0 && !slices.ContainsFunc(p.devices, permits) {
		return fmt.Errorf("device %q is none of the agent's --allow-device %s: add --allow-device %s to the agent, or correct the control plane's sub-ports",
			name, strings.Join(p.devices, ", "), name)
	}
	return nil
}

// never are the networks to which no destination may belong, with their reason. The contract itself refuses multicast
// addresses.
var never = []struct {
	prefix netip.Prefix
	why    string
}{
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address of every machine"},
	{netip.MustParsePrefix("::1/128"), "the loopback address of every machine"},
	{netip.MustParsePrefix("169.254.0.0/16"), "a link-local address"},
	{netip.MustParsePrefix("fe80::/10"), "a link-local address"},
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of this network (RFC 1122, Section 3.2.1.3)"},
	{netip.MustParsePrefix("::/128"), "the unspecified address"},
	{netip.MustParsePrefix("255.255.255.255/32"), "the broadcast address"},
}

// Destination implements contract.Policy.
func (p *policy) Destination(prefix netip.Prefix) error {
	addr := prefix.Addr()
	for _, n := range never {
		if n.prefix.Contains(addr) {
			return status.Errorf(codes.PermissionDenied, "destination %s is %s, which no control plane may route: correct its accept", prefix, n.why)
		}
	}
	allowed := -1 // length of the longest allowed prefix that contains the destination
	for _, a := range p.prefixes {
		if a.Contains(addr) {
			allowed = max(allowed, a.Bits())
		}
	}
	if allowed < 0 && len(p.prefixes) > 0 {
		return status.Errorf(codes.PermissionDenied, "destination %s is outside of the agent's --allow-prefix %v: add --allow-prefix %s to the agent, or correct the control plane's accept",
			prefix, p.prefixes, prefix)
	}
	if why, of := p.hides(addr); of.Bits() > allowed {
		return status.Errorf(codes.PermissionDenied, "destination %s is %s: use another address, or permit it by --allow-prefix %s of the agent, with all other prefixes",
			prefix, why, of)
	}
	return nil
}

// hides returns what a route to an address would hide, as the longest prefix, which is invalid if it would hide
// nothing.
func (p *policy) hides(addr netip.Addr) (why string, of netip.Prefix) {
	m, h := p.machine.Load(), p.hops.Load()
	host := netip.PrefixFrom(addr, addr.BitLen())
	switch {
	case m.addresses[addr]:
		return "an address of this machine", host
	case m.gateways[addr] || h.nextHops[addr]:
		return "a gateway of this machine", host
	}
	for _, n := range m.networks {
		if !slices.ContainsFunc(n.device.Names(), func(name string) bool { return h.devices[name] }) && n.prefix.Contains(addr) && n.prefix.Bits() > of.Bits() {
			why, of = fmt.Sprintf("in %s, the network of device %s, which is no sub-port", n.prefix, n.device.Name), n.prefix
		}
	}
	return why, of
}
