// Package naming gives devices the names of their sub-ports: a device that a sub-port's match selects receives the
// sub-port's name as an alternative name (IFLA_ALT_IFNAME, Linux 5.5). Drivers, the control plane and the kernel then
// find it by this name, as if an administrator had added the name.
package naming

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/rtnl"
)

// Namer follows the devices of a network namespace. Close must follow Open.
type Namer struct {
	log   *slog.Logger
	watch *rtnl.Watch
	done  sync.WaitGroup

	mu       sync.Mutex // guards the fields below
	conn     *rtnl.Conn
	wanted   []wanted
	findings []hostcheck.Finding
	known    map[int]identity // of each device by index, when last read
	failed   bool             // the kernel did not answer, or refused a name: any event tries again
}

// wanted is a name with the device that shall have it.
type wanted struct {
	name  string
	match devmatch.Match
}

// Open opens a Namer in the network namespace of the calling thread. It gives no name before Set.
func Open(log *slog.Logger) (*Namer, error) {
	watch, err := rtnl.WatchLinks(0)
	if err != nil {
		return nil, err
	}
	conn, err := rtnl.Dial()
	if err != nil {
		return nil, errors.Join(err, watch.Close())
	}
	n := &Namer{log: log, watch: watch, conn: conn, known: map[int]identity{}}
	n.done.Go(n.follow)
	return n, nil
}

// Close ends the Namer. Names stay.
func (n *Namer) Close() error {
	err := n.watch.Close()
	n.done.Wait()
	return errors.Join(err, n.conn.Close())
}

// Set replaces the names by those of a Hello, and gives them to the devices that exist. A match that selects no device,
// or several, is a finding and no error: the device may come later. Errors have a gRPC code: a match that cannot be
// read, or in another network namespace, and a kernel that does not answer.
func (n *Namer) Set(forwarding *farev1.Forwarding) error {
	var all []wanted
	for i, plane := range forwarding.GetPlanes() {
		for j, subPort := range plane.GetSubPorts() {
			if subPort.Match == "" {
				continue
			}
			at := fmt.Sprintf("forwarding: planes[%d].sub_ports[%d]", i, j)
			match, err := devmatch.Parse(subPort.Match)
			if err != nil {
				return status.Errorf(codes.InvalidArgument, "%s: match: %v", at, err)
			}
			if subPort.Netns != "" {
				return status.Errorf(codes.InvalidArgument, "%s: match: the device is in network namespace %s, where the agent gives no names: run the agent there, or remove match", at, subPort.Netns)
			}
			all = append(all, wanted{subPort.Device, match})
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wanted = all
	if err := n.apply(); err != nil {
		return status.Errorf(codes.Unavailable, "%v", err)
	}
	return nil
}

// Findings returns the names that no device has, with the reasons.
func (n *Namer) Findings() []hostcheck.Finding {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.findings)
}

// follow gives the names again whenever a device appears, is renamed, loses a name, or gets another address.
func (n *Namer) follow() {
	for n.watch.Wait() == nil {
		events, err := n.watch.Poll()
		n.mu.Lock()
		if len(n.wanted) > 0 && (err != nil || slices.ContainsFunc(events, n.concerns)) {
			if err := n.apply(); err != nil {
				n.log.Warn("cannot give the devices of sub-ports their names", "error", err)
			}
		}
		n.mu.Unlock()
	}
}

// concerns reports whether an event can change the devices of names: one of a carrier cannot. The caller holds mu.
func (n *Namer) concerns(e rtnl.LinkEvent) bool {
	last, had := n.known[e.Index]
	return n.failed || e.Gone && had || !e.Gone && last != identity{e.Name, e.AltNames, e.Address}
}

// identity is the part of a device that matches and names depend on, and that can change: names as in rtnl.Link, and
// the present address, by which devices without a permanent one match.
type identity struct{ name, altNames, address string }

// apply gives the wanted names to the devices that the kernel has now. The caller holds mu.
func (n *Namer) apply() error {
	n.failed = false
	if len(n.wanted) == 0 {
		n.findings = nil
		return nil
	}
	devices, err := n.conn.Hardware()
	if err != nil {
		n.failed = true // what was found holds until the next event
		return err
	}
	n.findings = nil
	batch := n.conn.Begin()
	var changes []change // by the message in batch
	for _, w := range n.wanted {
		at, holder, err := w.match.For(devmatch.Sysfs, w.name, devices)
		var not *devmatch.NotOneError
		if errors.As(err, &not) {
			n.find(w, not.Reason, not.Remedy)
		}
		if holder >= 0 && holder != at && devices[holder].Name != w.name {
			batch.DelAltName(devices[holder].Index, w.name)
			changes = append(changes, change{w, ""})
		}
		if err == nil && at != holder {
			batch.AddAltName(devices[at].Index, w.name)
			changes = append(changes, change{w, devices[at].Name})
		}
	}
	clear(n.known)
	for i := range devices {
		n.known[devices[i].Index] = identity{devices[i].Name, devices[i].AltNames, devices[i].Address}
	}
	for i, err := range n.conn.Do(batch) {
		switch c := changes[i]; {
		case err != nil: // for example, the device is gone, whose event follows
			n.failed = true
			n.find(c.wanted, fmt.Sprintf("cannot change its device: %v", err), "the agent retries at the next event of a device; give the name by hand: ip link property add dev DEVICE altname "+c.name)
		case c.device != "":
			n.log.Info("a device has the name of its sub-port", "sub_port", c.name, "match", c.match.String(), "device", c.device)
		}
	}
	return nil
}

// change is a message to the kernel: the device of a present name that receives the wanted one, or none for a removal.
type change struct {
	wanted
	device string
}

// find records why no device has a name. The caller holds mu.
func (n *Namer) find(w wanted, reason, remedy string) {
	n.findings = append(n.findings, hostcheck.Finding{Reason: hostcheck.ReasonDevice, Text: "sub-port " + w.name + ": " + reason, Remedy: remedy})
}
