// Package devmatch finds the network device that a sub-port's match selects: by its PCI address, its MAC address or its
// RDMA device, which stay when the device is renamed or created again, or by a pattern of its name. A Match has one of
// the forms
//
//	pci:0000:3b:00.0      the device below this PCI function, as in lspci -D
//	pci:0000:3b:00.0/p1   the port of this name, of a function that has several (phys_port_name in sysfs)
//	mac:02:00:00:00:00:01 the device with this permanent MAC address; without one, with this present MAC address
//	rdma:mlx5_3           the device of this RDMA device, as in rdma link
//	rdma:mlx4_0/2         that of the port of this number, of an RDMA device that has several
//	name:enp*s0f0np0      the device whose present name, no alternative one, fits this pattern of path.Match
//
// Representors of virtual functions and sub-functions (ports such as pf0vf1) are selected by their port or name alone.
// A device on virtio has the PCI address of the function below.
package devmatch

import (
	"fmt"
	"net"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/rtnl"
)

// Sysfs is the usual mount point of sysfs.
const Sysfs = "/sys"

// Match selects one device. The zero value selects none.
type Match struct{ pci, port, mac, rdma, name string }

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
	rdmaName    = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$`) // shorter than IB_DEVICE_NAME_MAX
	rdmaPort    = regexp.MustCompile(`^[1-9][0-9]{0,2}$`)
	namePattern = regexp.MustCompile(`^[^/\s]{1,64}$`)
)

// Parse reads a match, in which letters of numbers have any case. The error is a *FormatError.
func Parse(text string) (Match, error) {
	kind, rest, _ := strings.Cut(text, ":")
	switch kind {
	case "pci":
		return parsePCI(text, rest)
	case "mac":
		return parseMAC(text, rest)
	case "rdma":
		device, port, has := strings.Cut(rest, "/")
		if !rdmaName.MatchString(device) || has && !rdmaPort.MatchString(port) {
			return Match{}, &FormatError{fmt.Sprintf("%q has no RDMA device", text), "write one as 'rdma link' does, such as rdma:mlx5_3 or, with a port, rdma:mlx5_3/1"}
		}
		return Match{rdma: device, port: port}, nil
	case "name":
		if _, err := path.Match(rest, ""); err != nil || !namePattern.MatchString(rest) {
			return Match{}, &FormatError{fmt.Sprintf("%q has no pattern of a name", text), "write one such as name:enp*s0f0np0 or name:eth[4-7]"}
		}
		return Match{name: rest}, nil
	}
	return Match{}, &FormatError{fmt.Sprintf("%q is no PCI address, MAC address, RDMA device or pattern", text), "write pci:0000:3b:00.0, mac:02:00:00:00:00:01, rdma:mlx5_3 or name:enp*s0f0np0; a name belongs in device"}
}

func parsePCI(text, rest string) (m Match, err error) {
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

func parseMAC(text, rest string) (m Match, err error) {
	address, err := net.ParseMAC(rest)
	if err != nil || len(address) != 6 {
		return m, &FormatError{fmt.Sprintf("%q has no MAC address of 6 bytes", text), "write one as 'ip link' does, such as mac:02:00:00:00:00:01"}
	}
	if address[0]&1 != 0 || slices.Equal(address, make([]byte, 6)) {
		return m, &FormatError{fmt.Sprintf("%q has the address of no device", text), "write the link/ether of 'ip link show DEVICE'"}
	}
	return Match{mac: address.String()}, nil
}

// IsZero reports whether the match selects none.
func (m Match) IsZero() bool { return m == Match{} }

// String returns the match in the form that Parse reads.
func (m Match) String() string {
	text := ""
	switch {
	case m.mac != "":
		text = "mac:" + m.mac
	case m.name != "":
		text = "name:" + m.name
	case m.rdma != "":
		text = "rdma:" + m.rdma
	case m.pci != "":
		text = "pci:" + m.pci
	}
	if m.port != "" {
		text += "/" + m.port
	}
	return text
}

// RDMA returns the names of the devices of the match's RDMA device, which come and go without an event of a network
// device; nil for other matches, or if there is none.
func (m Match) RDMA(sysfs string) []string {
	if m.rdma == "" {
		return nil
	}
	port, _ := strconv.Atoi(m.port) // 0, of any port, without one
	return rdmadev.Netdevs(sysfs, m.rdma, port)
}

// ByPCI returns the match of a device's PCI address, and the zero Match if the device has none. It names the port if
// the device has one and shares its function with one of the others.
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

// ByMAC returns the match of a device's MAC address, and the zero Match if the device has none.
func ByMAC(h *rtnl.Hardware) Match {
	for _, address := range []string{h.Permanent, h.Address} {
		if m, err := Parse("mac:" + address); err == nil {
			return m
		}
	}
	return Match{}
}

// ByRDMA returns the match of a device's RDMA port, and the zero Match if the device has none. It names the number of
// the port if the RDMA device has several of all ports.
func ByRDMA(ports []rdmadev.Port, h *rtnl.Hardware) Match {
	p := rdmadev.PortOf(ports, h.Name)
	if p == nil {
		return Match{}
	}
	m := Match{rdma: p.Device}
	if slices.ContainsFunc(ports, func(o rdmadev.Port) bool { return o.Device == p.Device && o.Port != p.Port }) {
		m.port = strconv.Itoa(p.Port)
	}
	return m
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

// Fits reports whether the match selects a device. It may select several.
func (m Match) Fits(sysfs string, h *rtnl.Hardware) bool { return m.fits(sysfs, m.RDMA(sysfs), h) }

// fits is Fits with the result of RDMA.
func (m Match) fits(sysfs string, carried []string, h *rtnl.Hardware) bool {
	switch {
	case m.mac != "":
		return h.Permanent == m.mac || h.Permanent == "" && h.Address == m.mac
	case m.name != "":
		ok, _ := path.Match(m.name, h.Name) // Parse has verified the pattern
		return ok
	case m.rdma != "":
		return slices.Contains(carried, h.Name) && !representor.MatchString(h.Port)
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
	carried := m.RDMA(sysfs)
	for i := range all {
		if m.fits(sysfs, carried, &all[i]) {
			fit = append(fit, i)
		}
	}
	if owners := slices.DeleteFunc(slices.Clone(fit), func(i int) bool { return m.mac == "" || all[i].Permanent == "" }); len(owners) > 0 {
		fit = owners
	}
	switch len(fit) {
	case 0:
		return -1, m.none()
	case 1:
		return fit[0], nil
	}
	return -1, m.several(all, fit)
}

// none is the error of a match that selects no device.
func (m Match) none() error {
	switch {
	case m.mac != "":
		return &NotOneError{"no device has the address " + m.String(), "correct match: 'ip -br link' and 'ethtool -P DEVICE' show the addresses; 'fared init --match mac -o -' writes them"}
	case m.name != "":
		return &NotOneError{"no device has a name as " + m.String(), "correct match: 'ip -br link' shows the names"}
	case m.rdma != "":
		return &NotOneError{"no device is that of " + m.String(), "check the RDMA device's driver, or correct match: 'rdma link' shows the RDMA devices of this network namespace; 'fared init --match rdma -o -' writes them"}
	}
	return &NotOneError{"no device is at " + m.String(), "check the card and its driver (lspci -nnk), or correct match: 'ethtool -i DEVICE' shows the bus-info; 'fared init --match pci -o -' writes it"}
}

// several is the error of a match that selects the devices with the indexes in fit.
func (m Match) several(all []rtnl.Hardware, fit []int) error {
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
	switch {
	case ports && m.pci != "":
		remedy = fmt.Sprintf("add the port: %s/%s", m, all[fit[0]].Port)
	case m.rdma != "" && m.port == "":
		remedy = fmt.Sprintf("add the number of the port: %s/1", m)
	case m.name != "":
		remedy = "use a narrower pattern, and a sub-port for each device"
	}
	return &NotOneError{fmt.Sprintf("%s fits several devices: %s", m, strings.Join(names, ", ")), remedy}
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

// SubPort is the name of a sub-port's device with its match; with the zero Match the name alone selects the device.
type SubPort struct {
	Name  string
	Match Match
}

// Found is the result of Assign for a sub-port, with the results of For.
type Found struct {
	At, Holder int
	Err        error
}

// Assign returns the devices of sub-ports. A device that several select is that of one by name, else of the first one;
// for the others this is an error.
func Assign(sysfs string, subPorts []SubPort, all []rtnl.Hardware) []Found {
	out := make([]Found, len(subPorts))
	owner := map[int]string{} // by index in all
	for i, s := range subPorts {
		if s.Match.IsZero() {
			at := slices.IndexFunc(all, func(h rtnl.Hardware) bool { return slices.Contains(h.Names(), s.Name) })
			out[i] = Found{At: at, Holder: at}
			owner[at] = s.Name
		}
	}
	for i, s := range subPorts {
		if s.Match.IsZero() {
			continue
		}
		f := &out[i]
		f.At, f.Holder, f.Err = s.Match.For(sysfs, s.Name, all)
		if f.Err != nil {
			continue
		}
		if first, ok := owner[f.At]; ok {
			f.Err = &NotOneError{fmt.Sprintf("%s selects %s, which is the device of sub-port %s too", s.Match, all[f.At].Name, first), "correct one of the two: each sub-port has its own device"}
			f.At = -1
		} else {
			owner[f.At] = s.Name
		}
	}
	return out
}
