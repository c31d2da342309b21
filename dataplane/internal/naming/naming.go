// Package naming gives devices the names of their sub-ports: a device that a sub-port's match selects receives the
// sub-port's name as an alternative name (IFLA_ALT_IFNAME, Linux 5.5). Drivers, the control plane and the kernel then
// find it by this name, as if an administrator had added the name.
package naming

import (
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/devmatch"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/rtnl"
)

// Namer follows the devices of a network namespace. Close must follow Open.
type Namer struct {
	log   *slog.Logger
	watch *rtnl.Watch
	quit  chan struct{}
	done  sync.WaitGroup

	mu       sync.Mutex // guards the fields below
	conn     *rtnl.Conn
	sysfs    string             // mount point of sysfs
	wanted   []devmatch.SubPort // all sub-ports, if one has a match
	findings []hostcheck.Finding
	known    map[int]identity // of each device by index, when last read
	carried  [][]string       // of each sub-port, the netdevs of its match's RDMA device, when last read
	failed   bool             // the kernel did not answer, or refused a name: any event tries again
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
	n := &Namer{log: log, watch: watch, conn: conn, sysfs: devmatch.Sysfs, known: map[int]identity{}, quit: make(chan struct{})}
	n.done.Go(n.follow)
	n.done.Go(n.followRDMA)
	return n, nil
}

// Close ends the Namer. Names stay.
func (n *Namer) Close() error {
	close(n.quit)
	err := n.watch.Close()
	n.done.Wait()
	return errors.Join(err, n.conn.Close())
}

// Set replaces the names by those of a Hello, and gives them to the devices that exist. A match that selects no device,
// or several, is a finding and no error: the device may come later. Errors have a gRPC code: a match that cannot be
// read, or in another network namespace, and a kernel that does not answer.
func (n *Namer) Set(forwarding *farev1.Forwarding) error {
	var all []devmatch.SubPort
	matches := false
	for i, plane := range forwarding.GetPlanes() {
		for j, subPort := range plane.GetSubPorts() {
			if subPort.Match == "" {
				if subPort.Netns == "" {
					all = append(all, devmatch.SubPort{Name: subPort.Device})
				}
				continue
			}
			matches = true
			at := fmt.Sprintf("forwarding: planes[%d].sub_ports[%d]", i, j)
			match, err := devmatch.Parse(subPort.Match)
			if err != nil {
				return status.Errorf(codes.InvalidArgument, "%s: match: %v", at, err)
			}
			if subPort.Netns != "" {
				return status.Errorf(codes.InvalidArgument, "%s: match: the device is in network namespace %s, where the agent gives no names: run the agent there, or remove match", at, subPort.Netns)
			}
			all = append(all, devmatch.SubPort{Name: subPort.Device, Match: match})
		}
	}
	if !matches {
		all = nil
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
			n.applyOrWarn()
		}
		n.mu.Unlock()
	}
}

// followRDMA gives the names again whenever an RDMA device has other devices, which the kernel does not announce.
func (n *Namer) followRDMA() {
	for {
		select {
		case <-n.quit:
			return
		case <-time.After(beat.Until(time.Now(), time.Second)):
		}
		n.mu.Lock()
		if len(n.wanted) > 0 && !reflect.DeepEqual(n.carried, n.readRDMA()) {
			n.applyOrWarn()
		}
		n.mu.Unlock()
	}
}

// readRDMA returns what carried is now; nil if no match has an RDMA device. The caller holds mu.
func (n *Namer) readRDMA() (all [][]string) {
	for i, w := range n.wanted {
		if carried := w.Match.RDMA(n.sysfs); carried != nil {
			if all == nil {
				all = make([][]string, len(n.wanted))
			}
			all[i] = carried
		}
	}
	return all
}

// applyOrWarn is apply outside of a call. The caller holds mu.
func (n *Namer) applyOrWarn() {
	if err := n.apply(); err != nil {
		n.log.Warn("cannot give the devices of sub-ports their names", "error", err)
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
	n.carried = n.readRDMA()
	devices, err := n.conn.Hardware()
	if err != nil {
		n.failed = true // what was found holds until the next event
		return err
	}
	n.findings = nil
	batch := n.conn.Begin()
	var changes []change // by the message in batch
	for i, found := range devmatch.Assign(n.sysfs, n.wanted, devices) {
		w := n.wanted[i]
		if w.Match.IsZero() {
			continue
		}
		var not *devmatch.NotOneError
		if errors.As(found.Err, &not) {
			n.find(w, not.Reason, not.Remedy)
		}
		if found.Holder >= 0 && found.Holder != found.At && devices[found.Holder].Name != w.Name {
			batch.DelAltName(devices[found.Holder].Index, w.Name)
			changes = append(changes, change{w, ""})
		}
		if found.Err == nil && found.At != found.Holder {
			batch.AddAltName(devices[found.At].Index, w.Name)
			changes = append(changes, change{w, devices[found.At].Name})
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
			n.find(c.SubPort, fmt.Sprintf("cannot change its device: %v", err), "the agent retries at the next event of a device; give the name by hand: ip link property add dev DEVICE altname "+c.Name)
		case c.device != "":
			n.log.Info("a device has the name of its sub-port", "sub_port", c.Name, "match", c.Match.String(), "device", c.device)
		}
	}
	return nil
}

// change is a message to the kernel: the device of a present name that receives the wanted one, or none for a removal.
type change struct {
	devmatch.SubPort
	device string
}

// find records why no device has a name. The caller holds mu.
func (n *Namer) find(w devmatch.SubPort, reason, remedy string) {
	n.findings = append(n.findings, hostcheck.Finding{Reason: hostcheck.ReasonDevice, Text: "sub-port " + w.Name + ": " + reason, Remedy: remedy})
}
