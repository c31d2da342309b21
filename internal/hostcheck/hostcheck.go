// Package hostcheck finds states of a host with which packets of fared are dropped although routes, weights and
// sessions are right. It changes nothing.
//
// [Inspector] examines the kernel's settings and rules: reverse path filters and firewalls. [JudgeLinks] and
// [JudgeLoopbacks] judge devices and addresses that the caller knows. [Machine] does all of that for a configuration,
// and adds the devices, addresses and network managers that it depends on; [Notes] adds states that drop no packet.
// docs/operations/host.md lists the reasons.
package hostcheck

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/firewall"
)

// bfdPort is the UDP port of single-hop BFD (RFC 5881, Section 4).
const bfdPort = 3784

// The reasons of findings, words for machines.
const (
	ReasonReversePath    = "rp-filter"
	ReasonFirewallInput  = "firewall-input"
	ReasonFirewallBFD    = "firewall-bfd"
	ReasonFirewallOutput = "firewall-output"
	ReasonMTU            = "mtu"
	ReasonEnslaved       = "enslaved"
	ReasonLoopback       = "loopback"
	ReasonDevice         = "device"
	ReasonLocal          = "local"
	ReasonNetworkd       = "networkd"
	ReasonPrivate        = "private-bpffs"
	ReasonClock          = "clock"
	ReasonDriver         = "driver"
)

// Finding is a setting, rule or part of the host with which packets are dropped or take other ways, with its effect and
// remedy.
type Finding struct{ Reason, Text, Remedy string }

// String returns the text and the remedy.
func (f Finding) String() string { return f.Text + "; " + f.Remedy }

// Query is the use that fared makes of the host.
type Query struct {
	// SubPorts are the devices of the sub-ports that exist in the network namespace.
	SubPorts []Link
	// Steering is the device by which flows leave in netfilter's eyes; without a name they leave by the sub-ports
	// themselves.
	Steering Link
	// NextHops and Loopbacks tell whether next hops, and local loopbacks, of IPv4 and IPv6 exist.
	NextHops, Loopbacks [2]bool
	// UDPPorts and TCPPorts are the destination ports of the flows that are steered.
	UDPPorts, TCPPorts []uint16
}

// Inspector examines one host. Its zero value is ready.
type Inspector struct {
	rules      *firewall.Ruleset
	generation uint32
	err        error // of the last look at the firewall
	// judged are the findings about the firewall for the query.
	judged []Finding
	query  *Query
}

// Inspect returns the findings for a use, in a fixed order. The caller runs inside the network namespace; without
// CAP_NET_ADMIN the firewall is not examined, and Err has the reason.
func (in *Inspector) Inspect(q *Query) []Finding {
	out := strictFilters(q)
	before := in.generation
	if in.err = in.look(); in.rules == nil || in.rules.Empty() {
		in.query = nil
		return out
	}
	if in.query == nil || in.generation != before || !reflect.DeepEqual(in.query, q) {
		in.judged, in.query = in.firewall(q), q
	}
	return append(out, in.judged...)
}

// Err returns the reason why the last Inspect did not examine the firewall, nil if it did. A kernel without nftables
// has none to examine.
func (in *Inspector) Err() error { return in.err }

// look reads the rules again if they have changed.
func (in *Inspector) look() error {
	generation, err := firewall.Generation()
	if errors.Is(err, errors.ErrUnsupported) {
		in.rules = nil
		return nil
	}
	if err != nil || in.rules != nil && generation == in.generation {
		return err
	}
	rules, err := firewall.Read()
	if err != nil {
		return err
	}
	in.rules, in.generation = rules, generation
	return nil
}

// firewall judges the first packet of each kind of flow: BFD and data that arrive by a sub-port, and data that leave.
func (in *Inspector) firewall(q *Query) (out []Finding) {
	var soft []Link // sub-ports whose data packets pass the kernel: those of an RDMA device do not
	for _, device := range q.SubPorts {
		if !offloaded(device.Name) {
			soft = append(soft, device)
		}
	}
	leave := soft
	if q.Steering.Name != "" && len(soft) > 0 {
		leave = []Link{q.Steering}
	}
	bfd := in.judge(q.SubPorts, true, q.NextHops, service{unix.IPPROTO_UDP, bfdPort})
	out = bfd.finding(out, ReasonFirewallBFD, "BFD", "arrive by", "BFD stays down", "iifname")
	services := q.services()
	arriving, leaving := in.judge(soft, true, q.Loopbacks, services...), in.judge(leave, false, q.Loopbacks, services...)
	out = arriving.finding(out, ReasonFirewallInput, "data", "arrive by", "programs of this server receive nothing", "iifname")
	return leaving.finding(out, ReasonFirewallOutput, "data", "leave by", "programs of this server get EPERM", "oifname")
}

// service is a kind of flow: a protocol of IP and its destination port.
type service struct {
	protocol uint8
	port     uint16
}

func (s service) String() string {
	if s.protocol == unix.IPPROTO_TCP {
		return fmt.Sprintf("TCP %d", s.port)
	}
	return fmt.Sprintf("UDP %d", s.port)
}

// services returns the kinds of data flows.
func (q *Query) services() (out []service) {
	for _, port := range q.UDPPorts {
		out = append(out, service{unix.IPPROTO_UDP, port})
	}
	for _, port := range q.TCPPorts {
		out = append(out, service{unix.IPPROTO_TCP, port})
	}
	return out
}

// dropped are the devices at which a firewall drops all of some services.
type dropped struct {
	services []service
	devices  []string
	place    string // of the first
}

// judge returns the devices at which the packets of all services are dropped, inward or outward, in one of the families
// that are used. A host may use one of the services alone, so one that passes is enough.
func (in *Inspector) judge(devices []Link, inward bool, families [2]bool, services ...service) *dropped {
	d := &dropped{services: services}
	for _, device := range devices {
		for v6, used := range families {
			if !used || device.Index == 0 || slices.Contains(d.devices, device.Name) {
				continue
			}
			if place, all := in.dropsAll(device, inward, v6 == 1, services); all {
				d.devices, d.place = append(d.devices, device.Name), cmp.Or(d.place, place)
			}
		}
	}
	return d
}

// dropsAll reports whether the packets of all services are dropped at a device, with the place for the first service.
// It is false without services.
func (in *Inspector) dropsAll(device Link, inward, v6 bool, services []service) (first string, all bool) {
	for _, s := range services {
		p := firewall.Packet{Index: device.Index, IPv6: v6, Protocol: s.protocol, Port: s.port}
		if inward {
			p.In = device.Name
		} else {
			p.Out = device.Name
		}
		place, drops := in.rules.Judge(p)
		if !drops {
			return "", false
		}
		first = cmp.Or(first, place)
	}
	return first, len(services) > 0
}

// finding appends the finding of dropped packets, if there are any.
func (d *dropped) finding(out []Finding, reason, what, move, effect, key string) []Finding {
	if d.devices == nil {
		return out
	}
	var ports, rules []string
	for _, s := range d.services {
		ports = append(ports, s.String())
		rules = append(rules, fmt.Sprintf("%s { %s } %s accept", key, strings.Join(d.devices, ", "), strings.ToLower(strings.Replace(s.String(), " ", " dport ", 1))))
	}
	return append(out, Finding{reason,
		fmt.Sprintf("the firewall drops packets of %s (%s) that %s %s: %s; %s", what, strings.Join(ports, ", "), move, strings.Join(d.devices, ", "), d.place, effect),
		"accept them before: " + strings.Join(rules, "; ") + " (/usr/share/doc/fared/operations/host.md has rules for nft and firewalld)"})
}

// offloaded reports whether a device has an RDMA device, whose data packets do not pass the kernel, or whether that is
// unknown because sysfs does not show the device.
func offloaded(device string) bool {
	if link, err := netlink.LinkByName(device); err == nil && slices.Contains([]string{"veth", "dummy", "tuntap", "macvlan", "ipvlan"}, link.Type()) {
		return false
	}
	folder := filepath.Join("/sys/class/net", device)
	if _, err := os.Stat(folder); err != nil {
		return true
	}
	_, err := os.Stat(filepath.Join(folder, "device/infiniband"))
	return err == nil
}

// strictFilters names the sub-ports with a strict reverse path filter (RFC 3704, Section 2.2). The kernel uses the
// higher of a device's value and that of all. Only packets of IPv4 pass that filter.
func strictFilters(q *Query) []Finding {
	if !q.NextHops[0] && !q.Loopbacks[0] {
		return nil
	}
	const conf, strict = "net/ipv4/conf/", 1
	all, err := ReadSysctl(conf + "all/rp_filter")
	if err != nil || all > strict {
		return nil
	}
	var devices []string
	for _, device := range q.SubPorts {
		if at, err := ReadSysctl(conf + device.Name + "/rp_filter"); err == nil && max(at, all) == strict {
			devices = append(devices, device.Name)
		}
	}
	if devices == nil {
		return nil
	}
	return []Finding{{ReasonReversePath,
		fmt.Sprintf("net.ipv4.conf.*.rp_filter is 1 (strict) on %s: while the weight of a plane is 0, packets that arrive by it are dropped", strings.Join(devices, ", ")),
		"set it to 2 there, or net.ipv4.conf.all.rp_filter to 2"}}
}

// ReadSysctl reads the number of a sysctl, which is named by its path below /proc/sys. It is called every second for
// several sysctls, so it spares the six further system calls of os.ReadFile.
func ReadSysctl(name string) (uint64, error) {
	path := filepath.Join("/proc/sys", name)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var buf [64]byte // longer than a number
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, &fs.PathError{Op: "read", Path: path, Err: err}
	}
	value, err := strconv.ParseUint(strings.TrimSpace(string(buf[:n])), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("/proc/sys/%s: %w", name, err)
	}
	return value, nil
}

// procSys are the folders with sysctls, in the order in which WriteSysctl tries them. Container runtimes mount
// /proc/sys read-only and permit no mount below /proc, so a container without CAP_SYS_ADMIN gets the host's
// /proc/sys/net at the second. Both have the sysctls of the calling thread's network namespace (net/sysctl_net.c).
var procSys = []string{"/proc/sys", "/host/proc/sys"}

// WriteSysctl writes the number of a sysctl, which is named by its path below /proc/sys. The error is that of the first
// folder.
func WriteSysctl(name string, value uint64) error {
	var first error
	for _, dir := range procSys {
		err := os.WriteFile(filepath.Join(dir, name), strconv.AppendUint(nil, value, 10), 0)
		if err == nil {
			return nil
		}
		if first == nil {
			first = err
		}
		if !errors.Is(err, unix.EROFS) && !errors.Is(err, unix.EACCES) {
			break
		}
	}
	return first
}
