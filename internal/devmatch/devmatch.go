// Package devmatch finds the network device that a sub-port's match selects: by its PCI address or by its MAC address,
// which stay when the device is renamed or created again. A Match has one of the forms
//
//	pci:0000:3b:00.0      the device below this PCI function, as in lspci -D
//	pci:0000:3b:00.0/p1   the port of this name, of a function that has several (phys_port_name in sysfs)
//	mac:02:00:00:00:00:01 the device with this permanent MAC address; without one, with this present MAC address
//
// Representors of virtual functions and sub-functions (ports such as pf0vf1) are selected by their port alone. A device
// on virtio has the PCI address of the function below.
package devmatch

import (
	"fmt"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/fared/fared/internal/rtnl"
)

// Sysfs is the usual mount point of sysfs.
const Sysfs = "/sys"

// Match selects one device. The zero value selects none.
type Match struct{ pci, port, mac string }

// FormatError is the error of a text that is no match.
type FormatError struct{ Reason, Remedy string }

func (e *FormatError) Error() string { return e.Reason }

var (
	function = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]$`)
	local    = regexp.MustCompile(`^[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]$`) // without its domain
	// representor is the port of a virtual function or a sub-function in the switch of its NIC (devlink_port.c in
	// Linux).
	representor = regexp.MustCompile(`^(c\d+)?pf\d+`)
	portName    = regexp.MustCompile(`^[^/\s]{1,15}$`)
)

// Parse reads a match, in which letters of numbers have any case. The error is a *FormatError.
func Parse(text string) (m Match, err error) {
	if rest, ok := strings.CutPrefix(text, "pci:"); ok {
		address, port, has := strings.Cut(rest, "/")
		address = strings.ToLower(address)
		switch {
		case local.MatchString(address):
			return m, &FormatError{fmt.Sprintf("%q has no PCI domain", text), "write pci:0000:" + rest + "; 'lspci -D' shows the domain"}
		case !function.MatchString(address):
			return m, &FormatError{fmt.Sprintf("%q has no PCI address", text), "write one as 'lspci -D' and 'ethtool -i DEVICE' (bus-info) do, such as pci:0000:3b:00.0"}
		case has && !portName.MatchString(port):
			return m, &FormatError{fmt.Sprintf("%q has no name of a port after the slash", text), "write that of /sys/class/net/DEVICE/phys_port_name, such as pci:" + address + "/p0, or no slash"}
		}
		return Match{pci: address, port: port}, nil
	}
	if rest, ok := strings.CutPrefix(text, "mac:"); ok {
		address, err := net.ParseMAC(rest)
		if err != nil || len(address) != 6 {
			return m, &FormatError{fmt.Sprintf("%q has no MAC address of 6 bytes", text), "write one as 'ip link' does, such as mac:02:00:00:00:00:01"}
		}
		if address[0]&1 != 0 || slices.Equal(address, make([]byte, 6)) {
			return m, &FormatError{fmt.Sprintf("%q has the address of no device", text), "write the link/ether of 'ip link show DEVICE'"}
		}
		return Match{mac: address.String()}, nil
	}
	return m, &FormatError{fmt.Sprintf("%q is neither a PCI nor a MAC address", text), "write pci:0000:3b:00.0 or mac:02:00:00:00:00:01; a name belongs in device"}
}

// IsZero reports whether the match selects none.
func (m Match) IsZero() bool { return m == Match{} }

// String returns the match in the form that Parse reads.
func (m Match) String() string {
	switch {
	case m.mac != "":
		return "mac:" + m.mac
	case m.port != "":
		return "pci:" + m.pci + "/" + m.port
	case m.pci != "":
		return "pci:" + m.pci
	}
	return ""
}

// ByPCI and ByMAC return the match of a device, and the zero Match if the device has no such address. ByPCI names the
// port if the device has one and shares its function with one of the others.
func ByPCI(sysfs string, h *rtnl.Hardware, others []rtnl.Hardware) Match {
	m := Match{pci: PCI(sysfs, h.Bus, h.Parent)}
	if m.pci == "" {
		return m
	}
	if shared := slices.ContainsFunc(others, func(o rtnl.Hardware) bool { return o.Index != h.Index && m.Fits(sysfs, &o) }); shared {
		m.port = h.Port
	}
	return m
}

// ByMAC is described at ByPCI.
func ByMAC(h *rtnl.Hardware) Match {
	for _, address := range []string{h.Permanent, h.Address} {
		if m, err := Parse("mac:" + address); err == nil {
			return m
		}
	}
	return Match{}
}

// PCI returns the address of the PCI function of a parent device, or "".
func PCI(sysfs, bus, parent string) string {
	if bus == "virtio" {
		dir, err := filepath.EvalSymlinks(filepath.Join(sysfs, "bus/virtio/devices", filepath.Base(parent)))
		if err != nil {
			return ""
		}
		bus, parent = "pci", filepath.Base(filepath.Dir(dir))
	}
	if bus != "pci" || !function.MatchString(parent) {
		return ""
	}
	return parent
}

// Fits reports whether a device has the addresses of the match. Several devices may.
func (m Match) Fits(sysfs string, h *rtnl.Hardware) bool {
	switch {
	case m.mac != "":
		return h.Permanent == m.mac || h.Permanent == "" && h.Address == m.mac
	case m.pci == "" || m.pci != PCI(sysfs, h.Bus, h.Parent):
		return false
	case m.port != "":
		return h.Port == m.port
	}
	return !representor.MatchString(h.Port)
}

// NotOneError is the error of a match that selects no device, or several.
type NotOneError struct{ Reason, Remedy string }

func (e *NotOneError) Error() string { return e.Reason }

// Find returns the index of the device in all that the match selects. The error is a *NotOneError. Of several devices
// that fit, one whose permanent address is that of the match precedes those that have only adopted it, such as bridges.
func (m Match) Find(sysfs string, all []rtnl.Hardware) (int, error) {
	var fit []int
	for i := range all {
		if m.Fits(sysfs, &all[i]) {
			fit = append(fit, i)
		}
	}
	if owners := slices.DeleteFunc(slices.Clone(fit), func(i int) bool { return m.mac == "" || all[i].Permanent == "" }); len(owners) > 0 {
		fit = owners
	}
	switch {
	case len(fit) == 0 && m.mac != "":
		return -1, &NotOneError{"no device has the address " + m.String(), "correct match: 'ip -br link' and 'ethtool -P DEVICE' show the addresses; 'fared init --match mac -o -' writes them"}
	case len(fit) == 0:
		return -1, &NotOneError{"no device is at " + m.String(), "check the card and its driver (lspci -nnk), or correct match: 'ethtool -i DEVICE' shows the bus-info; 'fared init --match pci -o -' writes it"}
	case len(fit) == 1:
		return fit[0], nil
	}
	var names []string
	ports := true
	for _, i := range fit {
		name := all[i].Name
		if all[i].Port != "" {
			name += " (port " + all[i].Port + ")"
		}
		ports = ports && all[i].Port != ""
		names = append(names, name)
	}
	remedy := "use a match that only one device has: pci: in place of mac:, or the reverse"
	if ports && m.pci != "" {
		remedy = fmt.Sprintf("add the port: %s/%s", m, all[fit[0]].Port)
	}
	return -1, &NotOneError{fmt.Sprintf("%s fits several devices: %s", m, strings.Join(names, ", ")), remedy}
}

// For returns the index of the device in all that a sub-port's name stands for, and that of the device that has the
// name now, -1 if none has. A device that has the name and fits stays the sub-port's, whichever devices fit since. The
// error is a *NotOneError: that of Find, or the name is another device's own.
func (m Match) For(sysfs, name string, all []rtnl.Hardware) (at, holder int, err error) {
	holder = slices.IndexFunc(all, func(h rtnl.Hardware) bool { return slices.Contains(h.Names(), name) })
	if holder >= 0 && m.Fits(sysfs, &all[holder]) {
		return holder, holder, nil
	}
	if at, err = m.Find(sysfs, all); err != nil {
		return -1, holder, err
	}
	if holder >= 0 && all[holder].Name == name {
		return -1, holder, &NotOneError{fmt.Sprintf("%s is the name of another device than %s, which is %s", name, m, all[at].Name),
			"use a device in the configuration that is no device's own name, such as p0s0"}
	}
	return at, holder, nil
}
