package topo

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// maxDevice is the maximum length of a device name, in bytes: IFNAMSIZ of Linux without the final NUL.
const maxDevice = 15

// Default patterns of Spec.Devices, for servers whose GPUs share the ports and for GPUs that own theirs.
const (
	sharedDevices = "{plane}.{sub}"
	ownDevices    = "g{gpu}{plane}.{sub}"
)

// placeholders are the words in braces of Spec.Devices.
var placeholders = []string{"{p}", "{plane}", "{sub}", "{gpu}", "{n}"}

// placeholder matches a word in braces.
var placeholder = regexp.MustCompile(`\{[^{}]*\}`)

// literalDevice matches a device name that needs no quotes in YAML, in a shell, in an FRR command and in an endpoint of
// containerlab. It starts with a letter, so that no tool mistakes the name for an option or an index.
var literalDevice = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._-]*$`)

// takenDevices are names that exist in every network namespace, or that stand for settings of all devices below
// /proc/sys/net.
var takenDevices = []string{"lo", "all", "default"}

// subPortDevice returns the device name of a server's sub-port: Spec.Devices with its placeholders replaced. owner is
// the GPU that owns the sub-port, 0 where GPUs share ports; n counts the server's sub-ports from 0, by plane, GPU and
// sub-port.
func (s *Spec) subPortDevice(plane, owner, sub, n int) string {
	return strings.NewReplacer("{p}", strconv.Itoa(plane), "{plane}", planeName(plane), "{sub}", strconv.Itoa(sub),
		"{gpu}", strconv.Itoa(owner), "{n}", strconv.Itoa(n)).Replace(s.Devices)
}

// planeName returns the name of a plane.
func planeName(plane int) string { return "p" + strconv.Itoa(plane) }

// eachSubPort calls do for each sub-port of a server, in the order of Fabric.Cables, until do returns false.
func (s *Spec) eachSubPort(list []override, server int, do func(plane, owner, sub, n int) bool) {
	n := 0
	for plane := range s.Planes {
		for owner := range s.owners() {
			subs, _ := s.port(list, server, owner, plane)
			for sub := range subs {
				if !do(plane, owner, sub, n) {
					return
				}
				n++
			}
		}
	}
}

// validateDevices reports a pattern that results in a device name that Linux, a configuration or a script of a lab
// cannot use, or that two sub-ports of a server would share.
func (s *Spec) validateDevices(bad func(key, remedy, format string, args ...any)) {
	refuse := func(remedy, format string, args ...any) { bad("devices", remedy, format, args...) }
	for _, word := range placeholder.FindAllString(s.Devices, -1) {
		if !slices.Contains(placeholders, word) {
			refuse("use "+strings.Join(placeholders, ", "), "%s is not a placeholder", quote(word))
			return
		}
		if word == "{gpu}" && s.owners() == 1 {
			refuse("leave it out, or use gpu_ports: own", "{gpu} in %s, and GPUs share the server's ports", quote(s.Devices))
			return
		}
	}
	list, _ := parseOverrides(string(s.Overrides))
	plain := false // one server without overrides has been checked; all others like it are equal
	for server := range s.Servers {
		named := slices.ContainsFunc(list, func(o override) bool { return o.server == server })
		if !named && plain {
			continue
		}
		plain = plain || !named
		sound := true
		first := map[string]string{}
		s.eachSubPort(list, server, func(plane, owner, sub, n int) bool {
			name := s.subPortDevice(plane, owner, sub, n)
			where := fmt.Sprintf("sub-port %d of %s in plane %s", sub, groupName(s, server, owner), planeName(plane))
			remedy, wrong := s.wrongDevice(name, list, server, plane, owner)
			if other := first[name]; wrong == "" && other != "" {
				remedy, wrong = "distinguish sub-ports by {n}, or by {plane}, {sub} and, where GPUs own their ports, {gpu}", "is "+other+" too"
			}
			if wrong != "" {
				refuse(remedy, "%s, %s, %s", quote(name), where, wrong)
				sound = false
			}
			first[name] = where
			return sound
		})
		if !sound {
			return // the next servers would have the same mistake
		}
	}
}

// wrongDevice returns the reason why a device of a server cannot have a name, and the remedy, or "" if it can.
func (s *Spec) wrongDevice(name string, list []override, server, plane, owner int) (remedy, wrong string) {
	switch {
	case len(name) > maxDevice:
		return "use a shorter pattern, such as eth{n}", fmt.Sprintf("has %d characters, more than the %d of a Linux device", len(name), maxDevice)
	case !literalDevice.MatchString(name):
		return "begin with a letter, and use letters, digits, '.', '_' and '-', such as eth{n}", "is not a device name"
	case slices.Contains(takenDevices, name):
		return "use another name, such as eth{n}", "is reserved by Linux"
	}
	// In scripts, planes (p2), GPUs (g3) and ports of GPUs (g3p2) may take the place of a device: such a name must mean
	// the same cables.
	gpu, rest := -1, name
	if digits, ok := strings.CutPrefix(name, "g"); ok && s.owners() > 1 {
		end := len(digits) - len(strings.TrimLeft(digits, "0123456789"))
		if i, err := strconv.Atoi(digits[:end]); err == nil && gpuName(i) == name[:1+end] && i < s.owners() {
			gpu, rest = i, digits[end:]
		}
	}
	p := -1
	if rest != "" {
		if i, err := strconv.Atoi(strings.TrimPrefix(rest, "p")); err != nil || planeName(i) != rest || i >= s.Planes {
			return "", ""
		} else {
			p = i
		}
	}
	all := 0
	s.eachSubPort(list, server, func(plane, owner, _, _ int) bool {
		if (p < 0 || plane == p) && (gpu < 0 || owner == gpu) {
			all++
		}
		return true
	})
	if all == 1 && (p < 0 || p == plane) && (gpu < 0 || gpu == owner) {
		return "", ""
	}
	return "use another name, such as eth{n}", "is the name of a plane, of a GPU, or of a GPU's port, which has other sub-ports"
}
