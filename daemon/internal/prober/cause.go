package prober

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/daemon/internal/proof"
)

// proc is the root of procfs.
const proc = "/proc"

// page has all findings with their remedies.
const page = "see /usr/share/doc/fared/operations/proof.md"

// cause returns the most likely cause of a finding that is visible on this host, "" if none is, and the next step.
func (p *Prober) cause(f *proof.Finding, mtus []int) (cause, remedy string) {
	h := host{root: proc}
	if i, ok := p.subPorts[f.Device]; ok && i < len(mtus) {
		h.mtu, h.largest = mtus[i], slices.Max(mtus)
	}
	return h.cause(f, p.portOf(f.Service))
}

// host has the facts of a machine that explain findings.
type host struct {
	root         string // of procfs
	mtu, largest int    // of the sub-port, and of all
}

// setting returns a sysctl below net/ipv4, "" if it cannot be read.
func (h host) setting(name string) string {
	b, err := os.ReadFile(h.root + "/sys/net/ipv4/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// cause returns the cause and the next step.
func (h host) cause(f *proof.Finding, port uint16) (cause, remedy string) {
	switch f.Problem {
	case proof.NotSent:
		switch f.Fault {
		case proof.Refused:
			return "a rule of this host's firewall drops them", fmt.Sprintf("accept UDP packets to port %d, and those of queue pairs, out of %s: 'nft list ruleset'", port, f.Device)
		case proof.TooBig:
			return fmt.Sprintf("the MTU of %s is smaller than that of other sub-ports", f.Device), "'ip link set " + f.Device + " mtu " + fmt.Sprint(h.largest) + "', and at the leaf's port"
		case proof.NoRoute:
			return "this host has no route", "'ip rule' and 'ip route get " + f.Destination + " from " + f.Source + "': another program may have removed a rule or route of the agent; its restart adds them again"
		}
	case proof.WrongSubPort:
		if policy := h.setting("fib_multipath_hash_policy"); policy != "" && policy != "1" {
			return "net.ipv4.fib_multipath_hash_policy is " + policy, "find the program that sets it: 'grep -r fib_multipath /etc/sysctl.d'; the agent restores 1"
		}
		return "a rule, a route or a program of BPF has precedence over the agent's", "'ip rule', 'ip route get " + f.Destination + " from " + f.Source + "', 'bpftool net'"
	case proof.WrongPlane:
		if f.Direction == proof.Theirs {
			return "", "compare 'fared ping " + f.Destination + "' here with its reverse at the peer; " + page
		}
		return "", "compare the cables behind the leaf with the plan: 'fared ping " + f.Destination + "' shows the devices of arrival; " + page
	}
	if f.Big && h.mtu > 0 && h.mtu < h.largest {
		return fmt.Sprintf("the MTU of %s is %d, of others %d", f.Device, h.mtu, h.largest), "'ip link set " + f.Device + " mtu " + fmt.Sprint(h.largest) + "', and at the leaf's port"
	}
	if f.Big {
		return "", "compare the MTUs of the leaf's ports, of other leaves and of the peer: 'fared ping --size' finds the largest packet"
	}
	if f.Device != "" && f.Direction != proof.Theirs {
		if cause := h.neighbor(f.Device); cause != "" {
			return cause, "'ip neigh show dev " + f.Device + "': compare with the leaf's address"
		}
	}
	if f.Direction != proof.Ours && f.Device != "" && h.strict(f.Device) {
		return fmt.Sprintf("rp_filter of %s is strict (1), and has dropped %s packets", f.Device, h.counter("IPReversePathFilter")), "'sysctl -w net.ipv4.conf.all.rp_filter=2'"
	}
	switch f.Direction {
	case proof.Ours:
		if f.Plane == "" {
			return "", fmt.Sprintf("look at the peer: its firewall has to accept UDP port %d, then 'fared doctor' and 'fared health' there", port)
		}
		return "", "the leaf does not forward them, source NAT changes them here, or the peer drops them: its firewall, rp_filter, 'fared doctor' there"
	case proof.Theirs:
		return "", "the peer's leaf does not forward them, or this host drops them: 'nft list ruleset', 'nstat -az | grep -i drop'"
	}
	return "", "the leaf of the plane forwards nothing although its session is up: see its counters, or take it out by 'fared drain plane " + f.Plane + "'"
}

// neighbor describes a neighbor of a device that does not answer, or else one that was set by hand; "" if there is
// none.
func (h host) neighbor(device string) (cause string) {
	const permanent = 4 // ATF_PERM of linux/if_arp.h
	b, err := os.ReadFile(h.root + "/net/arp")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		w := strings.Fields(line)
		if len(w) != 6 || w[5] != device {
			continue
		}
		flags, err := strconv.ParseUint(w[2], 0, 16)
		switch {
		case err == nil && flags == 0:
			return "the neighbor " + w[0] + " on " + device + " does not answer"
		case flags&permanent != 0:
			cause = "the neighbor " + w[0] + " on " + device + " was set by hand to " + w[3]
		}
	}
	return cause
}

// strict reports whether the reverse path filter of a device is strict: the kernel uses the higher of its value and
// that of all.
func (h host) strict(device string) bool {
	return max(h.setting("conf/all/rp_filter"), h.setting("conf/"+device+"/rp_filter")) == "1"
}

// counter returns a counter of TcpExt, "?" if it cannot be read.
func (h host) counter(name string) string {
	b, err := os.ReadFile(h.root + "/net/netstat")
	var names []string
	for line := range strings.Lines(string(b)) {
		w := strings.Fields(line)
		if i := slices.Index(names, name); i > 0 && i < len(w) {
			return w[i]
		}
		if names = nil; err == nil && len(w) > 0 && w[0] == "TcpExt:" {
			names = w
		}
	}
	return "?"
}
