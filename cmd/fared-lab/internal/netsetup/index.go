package netsetup

import (
	"errors"
	"fmt"
	"path"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/internal/netns"
)

// matching returns the devices of this network namespace's sub-ports that match one of the shell patterns (path.Match),
// in the order of the configuration. A pattern without a match is an error.
func matching(c *config.Config, patterns []string) ([]string, error) {
	var devices []string
	for p := range c.Planes {
		for k := range c.Planes[p].SubPorts {
			if sp := &c.Planes[p].SubPorts[k]; sp.Netns == "" && !slices.Contains(devices, sp.Device) {
				devices = append(devices, sp.Device)
			}
		}
	}
	var errs []error
	chosen := map[string]bool{}
	for _, pattern := range patterns {
		found := false
		for _, device := range devices {
			ok, err := path.Match(pattern, device)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", pattern, err)
			}
			if ok {
				chosen[device], found = true, true
			}
		}
		if !found {
			errs = append(errs, fmt.Errorf("%q matches no sub-port's device", pattern))
		}
	}
	return slices.DeleteFunc(devices, func(device string) bool { return !chosen[device] }), errors.Join(errs...)
}

// matchIndexes gives each device in the calling thread's network namespace the interface index of its far end. Devices
// are ends of veth pairs whose far ends are in other namespaces. Then ifindex equals iflink, as for a physical NIC, and
// the kernel does not treat the loss of the carrier as urgent (linkwatch_urgent_event in net/core/link_watch.c).
//
// The kernel accepts an index only when a device enters a network namespace (IFLA_NEW_IFINDEX, Linux 5.13), so the
// devices pass through a temporary one. All of them leave before the first one returns, because a device may need the
// index that another one gives up. A device keeps its names, alias, MAC address, MTU and offloads. It loses addresses,
// routes and queueing disciplines, and is down afterwards. Devices that already have the index, and devices that do not
// exist, are skipped.
func matchIndexes(devices []string) error {
	var errs []error
	var wrong []netlink.Link
	for _, device := range devices {
		link, err := netlink.LinkByName(device)
		switch {
		case err != nil: // the step that sets the device up reports it
		case link.Type() != "veth":
			errs = append(errs, fmt.Errorf("%s is of the type %s: only an end of a veth pair can take the interface index of its far end", device, link.Type()))
		case !matched(link):
			wrong = append(wrong, link)
		}
	}
	if len(wrong) == 0 {
		return errors.Join(errs...)
	}
	home, err := netns.Current()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer home.Close()
	away, err := netns.New()
	if err != nil {
		return errors.Join(append(errs, fmt.Errorf("make a temporary network namespace: %w", err))...)
	}
	defer away.Close()
	var left []netlink.Link
	for _, link := range wrong {
		if err := move(link, away, 0); err != nil {
			errs = append(errs, fmt.Errorf("%s cannot leave for a temporary network namespace: %w", link.Attrs().Name, err))
			continue
		}
		left = append(left, link)
	}
	errs = append(errs, away.Do(func() error {
		var errs []error
		for _, link := range left {
			errs = append(errs, bringBack(link, home))
		}
		return errors.Join(errs...)
	}))
	for _, link := range left {
		errs = append(errs, verifyIndex(link.Attrs().Name))
	}
	return errors.Join(errs...)
}

// matched reports whether a device has the interface index of its far end. The kernel may omit the far end's index if
// the two are equal.
func matched(link netlink.Link) bool {
	a := link.Attrs()
	return a.ParentIndex == 0 || a.ParentIndex == a.Index
}

// bringBack moves a device from the calling thread's network namespace to home, with the index of its far end. If the
// kernel refuses this index, the device returns with one that the kernel chooses: a device that stays in the temporary
// namespace is removed with it, and so is the cable.
func bringBack(link netlink.Link, home netns.Namespace) error {
	name := link.Attrs().Name
	here, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s in a temporary network namespace: %w", name, err)
	}
	if move(here, home, here.Attrs().ParentIndex) == nil {
		return nil
	}
	if err := move(here, home, 0); err != nil {
		return fmt.Errorf("%s cannot return from a temporary network namespace: %w", name, err)
	}
	return nil // with another index, which verifyIndex reports
}

// verifyIndex returns an error if a device does not have the interface index of its far end.
func verifyIndex(device string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("%s: %w", device, err)
	}
	if matched(link) {
		return nil
	}
	a := link.Attrs()
	why := "this kernel does not let an index be chosen (IFLA_NEW_IFINDEX, Linux 5.13)"
	if other, err := netlink.LinkByIndex(a.ParentIndex); err == nil {
		why = fmt.Sprintf("%s has %d here", other.Attrs().Name, a.ParentIndex)
	}
	return fmt.Errorf("%s has the interface index %d and its far end has %d, because %s: the kernel announces a lost carrier at once, earlier than that of a physical NIC",
		device, a.Index, a.ParentIndex, why)
}

// move moves a device of the calling thread's network namespace to another one. index is the interface index there; 0
// lets the kernel choose, which keeps the index if it is free.
func move(link netlink.Link, to netns.Namespace, index int) error {
	request := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(link.Attrs().Index)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(to.FD()))))
	if index != 0 {
		request.AddData(nl.NewRtAttr(unix.IFLA_NEW_IFINDEX, nl.Uint32Attr(uint32(index))))
	}
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
