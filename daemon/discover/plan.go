package discover

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// Options are the choices of the operator. The zero value leaves all to the machine.
type Options struct {
	// AS is the AS number of the server; 0 derives a private one from the first loopback.
	AS uint32
	// Loopbacks replace those of the machine; empty means those.
	Loopbacks []netip.Prefix
	// Planes is the number of planes, which divides the number of sub-ports; 0 derives the planes from LLDP, addresses
	// or names.
	Planes int
	// Leaf is the software of the leaves: LeafFRR, LeafBIRD or LeafFared; empty guesses FRR.
	Leaf string
	// Peers are addresses of leaves, for devices whose subnets do not determine them.
	Peers []Peer
	// Devices are the only devices to consider; empty means all.
	Devices []string
	// Match is how the file names the devices: MatchName or empty, MatchPCI or MatchMAC.
	Match string
}

// Peer is the address of the leaf at a device.
type Peer struct {
	Device  string     `yaml:"device"`
	Address netip.Addr `yaml:"address"`
}

// names reports whether the operator names a device.
func (o *Options) names(device string) bool {
	return slices.Contains(o.Devices, device) || len(o.peers(device)) > 0
}

// peers returns the addresses that the operator names for the leaf at a device.
func (o *Options) peers(device string) (all []netip.Addr) {
	for _, p := range o.Peers {
		if p.Device == device {
			all = append(all, p.Address)
		}
	}
	return all
}

// The software of leaves, as far as the configuration of a server depends on it.
const (
	LeafFRR   = "frr"   // sums bandwidth in 32 bits of bytes a second; SONiC has it too
	LeafBIRD  = "bird"  // passes on the bandwidth of its best route, like GoBGP
	LeafFared = "fared" // sums bandwidth
)

// The values of Options.Match.
const (
	MatchName = "name" // by their present names
	MatchPCI  = "pci"  // by the addresses of their PCI functions
	MatchMAC  = "mac"  // by their permanent MAC addresses
	MatchRDMA = "rdma" // by their RDMA devices
)

// selects returns the match of a device in the file, empty if its name stands for it, and whether the device has the
// hardware for it.
func (o *Options) selects(d *Netdev) (match string, ok bool) {
	switch o.Match {
	case MatchPCI:
		return d.PCI, d.PCI != ""
	case MatchMAC:
		return d.MAC, d.MAC != ""
	case MatchRDMA:
		return d.ByRDMA, d.ByRDMA != ""
	}
	return "", true
}

// considers reports whether a device may become a sub-port.
func (o *Options) considers(device string) bool {
	return len(o.Devices) == 0 || slices.Contains(o.Devices, device)
}

// Plan is a configuration with its origins.
type Plan struct {
	// Text is the file. It is not parsed yet: an option such as a reserved AS number can make it invalid.
	Text []byte
	// Planes, SubPorts and Sessions are numbers of the file.
	Planes, SubPorts, Sessions int
	// Guesses are the values that the machine does not determine, in the order of the file.
	Guesses []string
	// LeftOut are the devices that look like sub-ports and are none, with the reasons.
	LeftOut []string
	// Absent are the loopbacks that the machine does not have on lo yet.
	Absent []netip.Prefix
}

// UnusableError is the error of a machine without loopbacks or without sub-ports.
type UnusableError struct {
	Reason, Remedy string
	// LeftOut is as in Plan.
	LeftOut []string
}

func (e *UnusableError) Error() string { return e.Reason }

// OptionError is the error of an option that does not fit the machine.
type OptionError struct{ Reason, Remedy string }

func (e *OptionError) Error() string { return e.Reason }

// subPort is a chosen device with the lines of its sessions.
type subPort struct {
	*Netdev
	device   string         // key device of the file
	match    string         // key match of the file; empty: none
	links    []ends         // numbered ends; empty: unnumbered
	sessions []string       // flow mappings of the file
	speed    fare.Bandwidth // guessed, because the device reports none; 0: it reports one
}

// New chooses the sub-ports and planes, and writes the configuration. Equal arguments give equal plans. Errors:
// *UnusableError, *OptionError.
func New(m *Machine, o Options) (*Plan, error) {
	p := &Plan{}
	loopbacks, err := p.loopbacks(m, o)
	if err != nil {
		return nil, err
	}
	ports, err := p.subPorts(m, o, loopbacks)
	if err != nil {
		return nil, err
	}
	planes, err := group(ports, o.Planes)
	if err != nil {
		return nil, err
	}
	p.Planes, p.SubPorts = len(planes.members), len(ports)
	if err := planes.name(m, &o); err != nil {
		return nil, err
	}
	p.write(m, o, loopbacks, planes)
	return p, nil
}

// loopbacks returns the loopbacks to advertise, at most those that one server may have.
func (p *Plan) loopbacks(m *Machine, o Options) (out []netip.Prefix, err error) {
	all := o.Loopbacks
	if len(all) == 0 {
		all = m.Loopbacks
		for _, v := range m.Virtual {
			p.LeftOut = append(p.LeftOut, fmt.Sprintf("loopback %s: %s, like a virtual address of kube-vip; name it with --loopback if it is a GPU's", v.Prefix.Addr(), v.Mark))
		}
	}
	if len(all) == 0 {
		return nil, &UnusableError{
			Reason:  "lo has no address of a GPU outside 127.0.0.0/8 and ::1, so that no loopback can be advertised",
			Remedy:  "add one address for each GPU, such as 'ip address add 10.255.0.1/32 dev lo', or name them with --loopback; " + generate,
			LeftOut: p.LeftOut,
		}
	}
	count := map[bool]int{}
	if len(o.Loopbacks) == 0 {
		all = usualFirst(all)
	}
	for _, l := range all {
		if count[l.Addr().Is4()]++; count[l.Addr().Is4()] > config.MaxLoopbacksPerFamily && len(o.Loopbacks) == 0 {
			p.LeftOut = append(p.LeftOut, fmt.Sprintf("loopback %s: a server has at most %d of a family", l.Addr(), config.MaxLoopbacksPerFamily))
			continue
		}
		out = append(out, l)
		if !slices.Contains(m.Loopbacks, l) && !slices.ContainsFunc(m.Virtual, func(v Virtual) bool { return v.Prefix == l }) {
			p.Absent = append(p.Absent, l)
		}
	}
	return out, nil
}

// subPorts returns the devices that lead to a leaf, in the natural order of their names.
func (p *Plan) subPorts(m *Machine, o Options, loopbacks []netip.Prefix) (ports []*subPort, err error) {
	if err := o.fits(m); err != nil {
		return nil, err
	}
	var order []string // of reasons
	reasons := map[string][]string{}
	leaveOut := func(d *Netdev, why string) {
		if len(reasons[why]) == 0 {
			order = append(order, why)
		}
		reasons[why] = append(reasons[why], d.Name)
	}
	devices := slices.Clone(m.Netdevs)
	slices.SortFunc(devices, func(a, b Netdev) int { return naturalCompare(a.Name, b.Name) })
	for i := range devices {
		d := &devices[i]
		if !o.considers(d.Name) {
			continue
		}
		why, quiet := d.unfit(&o)
		if why == "" {
			s := &subPort{Netdev: d}
			if why = s.connect(m, &o, loopbacks); why == "" {
				ports = append(ports, s)
				continue
			}
		}
		if quiet && len(o.Devices) == 0 {
			continue
		}
		leaveOut(d, why)
	}
	if len(o.Devices) == 0 && slices.ContainsFunc(ports, (*subPort).certain) {
		ports = slices.DeleteFunc(ports, func(s *subPort) bool {
			guessed := slices.ContainsFunc(s.links, func(l ends) bool { return l.guess != "" })
			if guessed {
				leaveOut(s.Netdev, "its subnet has more than two hosts, in contrast to that of other sub-ports: use --peer DEVICE=ADDRESS if it leads to a leaf")
			}
			return guessed
		})
	}
	for _, s := range ports {
		p.Sessions += len(s.sessions)
	}
	for _, why := range order {
		p.LeftOut = append(p.LeftOut, strings.Join(reasons[why], ", ")+": "+why)
	}
	if len(ports) == 0 {
		return nil, &UnusableError{
			Reason:  "no device leads to a leaf",
			Remedy:  "give each sub-port a /31 address, or let the leaf send router advertisements on it; name devices with --device; " + generate,
			LeftOut: p.LeftOut,
		}
	}
	estimate(ports)
	return ports, nil
}

// generate is the remedy of a machine without addresses.
const generate = "for a whole fabric 'fared topo generate --for networkd' (or netplan, ifupdown) writes the addresses of every server"

// fits checks that the devices of the options exist, and that each peer is in a subnet of its device.
func (o *Options) fits(m *Machine) error {
	for _, name := range o.Devices {
		if !slices.ContainsFunc(m.Netdevs, func(d Netdev) bool { return d.Name == name }) {
			return &OptionError{fmt.Sprintf("--device %q: there is no such device", name), "'ip link' lists the devices"}
		}
	}
	for _, p := range o.Peers {
		i := slices.IndexFunc(m.Netdevs, func(d Netdev) bool { return d.Name == p.Device })
		if i < 0 {
			return &OptionError{fmt.Sprintf("--peer %s=%s: there is no such device", p.Device, p.Address), "'ip link' lists the devices"}
		}
		if !slices.ContainsFunc(m.Netdevs[i].links(o), func(l ends) bool { return l.peer == p.Address }) {
			return &OptionError{fmt.Sprintf("--peer %s=%s: the device has no address in a subnet with it, or several peers of the family are given", p.Device, p.Address),
				"'ip address show dev " + p.Device + "' lists its addresses; name one peer of a family"}
		}
	}
	return nil
}

// connect writes the sessions of a sub-port, or returns why it has none.
func (s *subPort) connect(m *Machine, o *Options, loopbacks []netip.Prefix) (why string) {
	var families []string // of the loopbacks
	for _, family := range []string{"ipv4", "ipv6"} {
		if slices.ContainsFunc(loopbacks, func(l netip.Prefix) bool { return l.Addr().Is4() == (family == "ipv4") }) {
			families = append(families, family)
		}
	}
	links := s.Netdev.links(o)
	switch {
	case len(links) == 1 && links[0].peer.Is6() && families[0] == "ipv4": // IPv4 routes with IPv6 next hops (RFC 8950)
		s.numbered(links[0], ", families: ["+strings.Join(families, ", ")+"]")
	case len(links) > 0:
		for _, l := range links {
			if slices.Contains(families, map[bool]string{true: "ipv4", false: "ipv6"}[l.peer.Is4()]) {
				s.numbered(l, "")
			}
		}
		if len(s.sessions) == 0 {
			return "its addresses are of another family than the loopbacks"
		}
	case s.Router:
		s.sessions = append(s.sessions, "{unnumbered: true}")
	case !s.Carrier:
		return "it has no address with a peer, and no carrier"
	case m.Unheard != "":
		return "it has no address with a peer, and " + m.Unheard
	default:
		return "it has no address with a peer, and no router advertises itself on it"
	}
	return ""
}

// certain reports whether the sub-port's address, or a router, alone shows the leaf.
func (s *subPort) certain() bool {
	return !slices.ContainsFunc(s.links, func(l ends) bool { return l.shared })
}

func (s *subPort) numbered(l ends, more string) {
	s.links = append(s.links, l)
	if l.shared { // the leaf readvertises routes of other servers in the subnet with their next hops (RFC 4271, Section 5.1.3)
		more += ", subnet_next_hops: true"
	}
	s.sessions = append(s.sessions, fmt.Sprintf("{peer: %s, local: %s%s}", yamlText(l.peer.String()), yamlText(l.local.String()), more))
}

// unknownSpeed is the speed of a sub-port if no device reports one.
const unknownSpeed = fare.Bandwidth(400_000_000_000)

// estimate sets the speed of sub-ports that report none to that of the slowest other one.
func estimate(ports []*subPort) {
	guess := fare.Bandwidth(0)
	for _, s := range ports {
		if s.Speed != 0 && (guess == 0 || s.Speed < guess) {
			guess = s.Speed
		}
	}
	guess = cmp.Or(guess, unknownSpeed)
	for _, s := range ports {
		if s.Speed == 0 {
			s.speed = guess
		}
	}
}

// naturalCompare compares names with numbers by value, so that eth2 precedes eth10.
func naturalCompare(a, b string) int {
	for a != "" && b != "" {
		x, restA := leadingDigits(a)
		y, restB := leadingDigits(b)
		if x == "" || y == "" {
			if a[0] != b[0] {
				return cmp.Compare(a[0], b[0])
			}
			a, b = a[1:], b[1:]
			continue
		}
		valueX, valueY := strings.TrimLeft(x, "0"), strings.TrimLeft(y, "0")
		if c := cmp.Or(cmp.Compare(len(valueX), len(valueY)), cmp.Compare(valueX, valueY), cmp.Compare(len(x), len(y))); c != 0 {
			return c
		}
		a, b = restA, restB
	}
	return cmp.Compare(len(a), len(b))
}

func leadingDigits(s string) (digits, rest string) {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return s[:n], s[n:]
}
