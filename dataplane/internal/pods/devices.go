package pods

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/rtnl"
)

// Device is a device of a namespace. Without SubPort the agent finds the sub-port.
type Device struct {
	Name    string `json:"device"`
	SubPort string `json:"sub_port,omitempty"`
}

// absentError reports devices that the namespace lacks.
type absentError struct{ name, remedy string }

func (e *absentError) Error() string {
	return fmt.Sprintf("the namespace has no device %q: %s", e.name, e.remedy)
}

// conflictError reports two devices with one sub-port.
type conflictError struct{ a, b, subPort string }

func (e *conflictError) Error() string {
	return fmt.Sprintf("devices %s and %s have the same sub-port, %s: name one of them", e.a, e.b, e.subPort)
}

// hardware returns the devices of a namespace, and the number that it gives to another one.
func hardware(space, other netns.Namespace) (all []rtnl.Hardware, id int, err error) {
	err = space.Do(func() error {
		conn, err := rtnl.Dial()
		if err != nil {
			return err
		}
		defer conn.Close()
		if all, err = conn.Hardware(); err == nil {
			id, err = conn.SpaceID(other.FD())
		}
		return err
	})
	return all, id, err
}

// finder finds the sub-port of a device of a namespace.
type finder struct {
	host     []rtnl.Hardware // of the sub-ports, by the order of the forwarding; those that exist
	names    []string        // of the sub-ports of host
	all      map[string]bool // all sub-ports
	present  map[string]bool // names of the host's devices
	hostID   int             // number of the host's namespace
	function func(pci string) string
}

// physicalFunction returns the PCI address of the physical function of a virtual one; "" without one.
func physicalFunction(pci string) string {
	target, err := os.Readlink(filepath.Join("/sys/bus/pci/devices", pci, "physfn"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// virtual are the kinds of devices that send by the device below.
var virtual = []string{"macvlan", "macvtap", "ipvlan", "ipvtap", "vlan"}

// of returns the sub-port of a device; "" without one. named is true if the caller has named the device.
func (f *finder) of(h *rtnl.Hardware, named bool) string {
	if slices.Contains(virtual, h.Kind) && h.Space == f.hostID && h.Space >= 0 {
		for i := range f.host {
			if f.host[i].Index == h.Lower {
				return f.names[i]
			}
		}
	}
	if h.Bus == "pci" {
		if physical := f.function(h.Parent); physical != "" {
			for i := range f.host {
				if f.host[i].Bus == "pci" && f.host[i].Parent == physical {
					return f.names[i]
				}
			}
		}
	}
	for _, name := range h.Names() {
		if f.all[name] && (named || !f.present[name]) { // a pod's eth0 is most often another network
			return name
		}
	}
	return ""
}

// find returns the devices of the namespace by the host's sub-ports. A requested device that the namespace lacks is an
// *absentError, two devices with one sub-port a *conflictError; devices without a sub-port are left out, and returned.
func find(space, host netns.Namespace, forwarding *farev1.Forwarding, requested []Device) (devices map[string]string, without []string, err error) {
	inside, hostID, err := hardware(space, host)
	if err != nil {
		return nil, nil, fmt.Errorf("read the devices of the namespace: %w", err)
	}
	outside, _, err := hardware(host, host)
	if err != nil {
		return nil, nil, fmt.Errorf("read the devices of the host: %w", err)
	}
	f := &finder{all: map[string]bool{}, present: map[string]bool{}, hostID: hostID, function: physicalFunction}
	for i := range outside {
		for _, name := range outside[i].Names() {
			f.present[name] = true
		}
	}
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.SubPorts {
			f.all[sp.Device] = true
			if i := slices.IndexFunc(outside, func(h rtnl.Hardware) bool { return slices.Contains(h.Names(), sp.Device) }); i >= 0 {
				f.host, f.names = append(f.host, outside[i]), append(f.names, sp.Device)
			}
		}
	}
	devices = map[string]string{}
	set := func(subPort, device string) error {
		if before := devices[subPort]; before != "" {
			return &conflictError{before, device, subPort}
		}
		devices[subPort] = device
		return nil
	}
	for _, d := range requested {
		i := slices.IndexFunc(inside, func(h rtnl.Hardware) bool { return slices.Contains(h.Names(), d.Name) })
		if i < 0 {
			return nil, nil, &absentError{d.Name, "move or create it first"}
		}
		subPort := d.SubPort
		if subPort == "" {
			subPort = f.of(&inside[i], true)
		}
		if !f.all[subPort] {
			without = append(without, d.Name)
			continue
		}
		if err := set(subPort, d.Name); err != nil {
			return nil, nil, err
		}
	}
	if len(requested) == 0 {
		for i := range inside {
			if subPort := f.of(&inside[i], false); subPort != "" {
				if err := set(subPort, inside[i].Name); err != nil {
					return nil, nil, err
				}
			}
		}
	}
	return devices, without, nil
}

// sources returns the global addresses of a namespace that all devices reach: those of the loopback device first, then
// those that several of the given devices have. Of a family without such an address it returns those of the devices, in
// their order. Packets to an address that one device alone has would all arrive by one plane.
func sources(space netns.Namespace, devices []string) (out []netip.Prefix, err error) {
	err = space.Do(func() error {
		conn, err := rtnl.Dial()
		if err != nil {
			return err
		}
		defer conn.Close()
		links, err := conn.Links()
		if err != nil {
			return err
		}
		rank := map[int]int{}
		for _, l := range links {
			if l.Loopback {
				rank[l.Index] = 1
			}
			for i, name := range devices {
				if l.Has(name) {
					rank[l.Index] = 2 + i
				}
			}
		}
		var all []rtnl.Address
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			found, err := conn.Addresses(family)
			if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
				return err
			}
			all = append(all, found...)
		}
		all = slices.DeleteFunc(all, func(a rtnl.Address) bool {
			return rank[a.Device] == 0 || a.Addr.IsLoopback() || a.Addr.IsLinkLocalUnicast()
		})
		slices.SortStableFunc(all, func(a, b rtnl.Address) int { return rank[a.Device] - rank[b.Device] })
		out = common(all, func(a rtnl.Address) bool { return rank[a.Device] == 1 })
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the addresses of the namespace: %w", err)
	}
	return out, nil
}

// common returns the host prefixes of addresses, in their order, each once: of each family those that are on the
// loopback device or on several devices, or all if none is.
func common(all []rtnl.Address, loopback func(rtnl.Address) bool) (out []netip.Prefix) {
	at := map[netip.Addr]int{}
	for _, a := range all {
		if at[a.Addr]++; loopback(a) {
			at[a.Addr] = 2
		}
	}
	for _, a := range all {
		shared := slices.ContainsFunc(all, func(b rtnl.Address) bool { return b.Addr.Is4() == a.Addr.Is4() && at[b.Addr] > 1 })
		prefix := netip.PrefixFrom(a.Addr, a.Addr.BitLen())
		if (at[a.Addr] > 1 || !shared) && !slices.Contains(out, prefix) {
			out = append(out, prefix)
		}
	}
	return out
}
