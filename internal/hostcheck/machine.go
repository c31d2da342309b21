package hostcheck

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Use is what a configuration expects of a machine.
type Use struct {
	Query
	// Local is the configured source addresses of sessions, by device.
	Local map[string][]netip.Addr
	// Addresses are the configured loopbacks.
	Addresses []netip.Prefix
}

// steeringDevice is the default name of driver bpf's device.
const steeringDevice = "fared0"

// Machine examines this machine before or while fared runs: all of [Inspector.Inspect], the devices and addresses that a configuration names, and network
// managers that would remove the agent's objects. It returns the findings, and the reason why a part could not be examined.
func Machine(u *Use) (out []Finding, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the links: %w", err)
	}
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses: %w", err)
	}
	on := map[netip.Addr]int{} // index of the device
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			on[ip.Unmap()] = a.LinkIndex
		}
	}
	var found []Link
	for _, device := range u.SubPorts {
		i := slices.IndexFunc(links, func(l netlink.Link) bool {
			return l.Attrs().Name == device || slices.Contains(l.Attrs().AltNames, device)
		})
		if i < 0 {
			out = append(out, Finding{ReasonDevice, "there is no device " + device, "correct device in the configuration; 'ip -br link' lists the devices"})
			continue
		}
		a := links[i].Attrs()
		master := ""
		if k := slices.IndexFunc(links, func(l netlink.Link) bool { return a.MasterIndex != 0 && l.Attrs().Index == a.MasterIndex }); k >= 0 {
			master = links[k].Attrs().Name
		}
		found = append(found, Link{device, uint32(a.MTU), master})
		if a.RawFlags&1 == 0 { // IFF_UP
			out = append(out, Finding{ReasonDevice, device + " is down", "ip link set " + device + " up"})
		}
		for _, local := range u.Local[device] {
			if index, ok := on[local]; !ok || index != a.Index {
				out = append(out, Finding{ReasonLocal, fmt.Sprintf("%s, the local address of a session, is not on %s", local, device), "ip addr add it there, or correct local"})
			}
		}
	}
	out = append(out, JudgeLinks(found)...)
	var absent []string
	for _, p := range u.Addresses {
		if _, ok := on[p.Addr()]; !ok {
			absent = append(absent, p.String())
		}
	}
	out = append(out, JudgeLoopbacks(absent)...)
	q := u.Query
	if slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == steeringDevice }) {
		q.Steering = steeringDevice
	}
	var in Inspector
	out = append(out, in.Inspect(&q)...)
	out = append(out, networkd("/")...)
	return out, in.Err()
}

// Notes returns states of this machine that drop no packet, and that an operator wants to know.
func Notes() (out []Finding) {
	var fs unix.Statfs_t
	if err := unix.Statfs("/sys/fs/bpf", &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
		out = append(out, Finding{ReasonPrivate, "no BPF file system is mounted at /sys/fs/bpf: the steering of driver bpf ends with the agent", "mount -t bpf bpf /sys/fs/bpf"})
	}
	var tx unix.Timex
	if state, err := unix.Adjtimex(&tx); err == nil && state == unix.TIME_ERROR {
		out = append(out, Finding{ReasonClock, "the clock is not synchronized: time stamps of logs differ from those of other servers, and certificates may not be valid yet", "run chrony or systemd-timesyncd"})
	}
	return out
}

// networkd returns a finding if systemd-networkd runs in this network namespace and its configuration does not keep foreign rules.
func networkd(root string) []Finding {
	processes, _ := filepath.Glob(filepath.Join(root, "proc/[0-9]*/comm")) // the pattern is valid
	if !slices.ContainsFunc(processes, func(comm string) bool {
		name, err := os.ReadFile(comm)
		if err != nil || string(name) != "systemd-network\n" { // 15 bytes of systemd-networkd
			return false
		}
		own, err1 := os.Readlink(filepath.Join(root, "proc/self/ns/net"))
		its, err2 := os.Readlink(filepath.Join(filepath.Dir(comm), "ns/net"))
		return err1 == nil && err2 == nil && own == its // one in a container concerns its own links
	}) {
		return nil
	}
	for _, folder := range []string{"etc/systemd", "run/systemd", "usr/lib/systemd", "usr/local/lib/systemd", "lib/systemd"} {
		files, _ := filepath.Glob(filepath.Join(root, folder, "networkd.conf.d", "*.conf")) // the pattern is valid
		for _, file := range append(files, filepath.Join(root, folder, "networkd.conf")) {
			if text, err := os.ReadFile(file); err == nil && keepsRules(string(text)) {
				return nil
			}
		}
	}
	return []Finding{{ReasonNetworkd, "systemd-networkd runs, and removes the agent's rules each time it configures a link",
		"install the drop-in of the package, /usr/lib/systemd/networkd.conf.d (/usr/share/doc/fared/operations/install.md), and restart systemd-networkd"}}
}

// keepsRules reports whether a configuration of networkd has ManageForeignRoutingPolicyRules=no.
func keepsRules(text string) bool {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if strings.TrimSpace(key) == "ManageForeignRoutingPolicyRules" {
			return slices.Contains([]string{"no", "false", "0", "off"}, strings.ToLower(strings.TrimSpace(value)))
		}
	}
	return false
}
