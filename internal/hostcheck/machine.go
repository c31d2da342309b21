package hostcheck

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// Use is what a configuration expects of a machine.
type Use struct {
	// Query is without SubPorts and Steering, which Machine finds by the next two fields.
	Query
	// Devices are the names, or alternative names, of the sub-ports' devices in the network namespace.
	Devices []string
	// SteeringAlias is the alias of the device by which flows leave, if there is one.
	SteeringAlias string
	// Local is the configured source addresses of sessions, by device.
	Local map[string][]netip.Addr
	// Addresses are the configured loopbacks.
	Addresses []netip.Prefix
}

// Machine examines this machine before or while fared runs: all of [Inspector.Inspect], the devices and addresses that
// a configuration names, and network managers that would remove the agent's objects. It returns the findings, and the
// reason why a part could not be examined.
func Machine(u *Use) (out []Finding, err error) {
	links, addresses, err := read()
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	q := u.Query
	for _, l := range links {
		names[l.Index] = l.Name
		if l.Alias == u.SteeringAlias && l.Alias != "" {
			q.Steering = Link{Name: l.Name, Index: l.Index}
		}
	}
	for _, device := range u.Devices {
		i := slices.IndexFunc(links, func(l rtnl.Link) bool { return l.Has(device) })
		if i < 0 {
			out = append(out, Finding{ReasonDevice, "there is no device " + device, "correct device in the configuration; 'ip -br link' lists the devices"})
			continue
		}
		l := links[i]
		q.SubPorts = append(q.SubPorts, Link{l.Name, l.Index, l.MTU, names[l.Master]})
		if !l.Up {
			out = append(out, Finding{ReasonDevice, l.Name + " is down", "ip link set " + l.Name + " up"})
		}
		for _, local := range u.Local[device] {
			if !slices.ContainsFunc(addresses, func(a rtnl.Address) bool { return a.Addr == local && a.Device == l.Index }) {
				out = append(out, Finding{ReasonLocal, fmt.Sprintf("%s, the local address of a session, is not on %s", local, l.Name), "ip addr add it there, or correct local"})
			}
		}
	}
	out = append(out, JudgeLinks(q.SubPorts)...)
	var absent []string
	for _, p := range u.Addresses {
		if !slices.ContainsFunc(addresses, func(a rtnl.Address) bool { return a.Addr == p.Addr() }) {
			absent = append(absent, p.String())
		}
	}
	out = append(out, JudgeLoopbacks(absent)...)
	var in Inspector
	out = append(out, in.Inspect(&q)...)
	out = append(out, networkd("/")...)
	return out, in.Err()
}

// read returns the devices and addresses of the network namespace.
func read() (links []rtnl.Link, addresses []rtnl.Address, err error) {
	conn, err := rtnl.Dial()
	if err != nil {
		return nil, nil, err
	}
	defer conn.Close()
	if links, err = conn.Links(); err != nil {
		return nil, nil, err
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := conn.Addresses(family)
		if err != nil {
			return nil, nil, err
		}
		addresses = append(addresses, all...)
	}
	return links, addresses, nil
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

// networkd returns a finding if systemd-networkd runs in this network namespace and its configuration does not keep
// foreign rules.
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
	if keepsRules(root) {
		return nil
	}
	return []Finding{{ReasonNetworkd, "systemd-networkd runs, and removes the agent's rules each time it configures a link",
		"install the drop-in of the package, /usr/lib/systemd/networkd.conf.d (/usr/share/doc/fared/operations/install.md), and restart systemd-networkd"}}
}

// keepsRules reports whether the configuration of networkd has ManageForeignRoutingPolicyRules=no. The last value
// counts, of the main file and then of the drop-ins in the order of their names; a file in an earlier folder replaces
// those of the same name in later ones (networkd.conf(5), systemd.syntax(7)).
func keepsRules(root string) bool {
	folders := []string{"etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd"}
	var main string
	dropins := map[string]string{} // files by name
	for _, folder := range slices.Backward(folders) {
		folder = filepath.Join(root, folder)
		file := filepath.Join(folder, "networkd.conf")
		if _, err := os.Lstat(file); err == nil {
			main = file
		}
		files, _ := filepath.Glob(filepath.Join(folder, "networkd.conf.d", "*.conf")) // the pattern is valid
		for _, file := range files {
			dropins[filepath.Base(file)] = file
		}
	}
	files := []string{main}
	for _, name := range slices.Sorted(maps.Keys(dropins)) {
		files = append(files, dropins[name])
	}
	keeps := false
	for _, file := range files {
		text, _ := os.ReadFile(file) // an absent main file, and a link to /dev/null, have no values
		keeps = keepsRulesIn(string(text), keeps)
	}
	return keeps
}

// keepsRulesIn returns the setting after a file, for one before it.
func keepsRulesIn(text string, keeps bool) bool {
	section := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			section = line
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || section != "[Network]" || strings.TrimSpace(key) != "ManageForeignRoutingPolicyRules" {
			continue
		}
		switch strings.ToLower(strings.TrimSpace(value)) {
		case "no", "n", "false", "f", "0", "off":
			keeps = true
		case "yes", "y", "true", "t", "1", "on": // networkd ignores other values, and the empty one
			keeps = false
		}
	}
	return keeps
}
