package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/netns"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
)

// Pauses between attempts after a failure.
const (
	retryFirst = time.Second
	retryMost  = 30 * time.Second
)

// domain is an attached namespace.
type domain struct {
	m     *Manager
	id    string
	space netns.Namespace
	log   *slog.Logger
	stop  chan struct{}
	wake  chan struct{}
	done  chan struct{} // closed when the goroutine has ended

	mu      sync.Mutex // guards the fields of this block
	record  record
	pending contract.Changed
	all     bool // everything is pending
	state   farev1.Attachment
	news    chan struct{} // closed at the next change of state
	leaving bool          // removal has begun, and may be repeated
	// announced is whether the log's last line about the state is that it is in effect.
	announced bool

	// The fields below belong to the goroutine, and after its end to the caller of remove and close.
	driver      *linux.Driver
	guest       Guest
	server      *contract.Server
	restriction *restriction
	table       *table
	scanner     *scanner
	settled     bool
	approximate map[uint32]string // groups of the host with an approximate layout
	refused     string            // of the last sync; "" if the namespace has all objects
	synced      bool              // no object is missing since the last sync
}

func newDomain(m *Manager, r record, space netns.Namespace) *domain {
	return &domain{
		m: m, id: r.ID, space: space, log: m.c.Log.With("pod", r.ID), stop: make(chan struct{}), wake: make(chan struct{}, 1), done: make(chan struct{}),
		record: r, all: true, news: make(chan struct{}), pending: noChange(),
	}
}

func noChange() contract.Changed {
	return contract.Changed{SubPorts: map[string]bool{}, Groups: map[uint32]bool{}, Destinations: map[contract.DestinationKey]bool{}}
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// note adds changes of the host's state.
func (d *domain) note(changed contract.Changed) {
	d.mu.Lock()
	if !d.all {
		d.pending.Add(changed)
	}
	d.mu.Unlock()
	ring(d.wake)
}

// replace sets the record of a repeated Attach.
func (d *domain) replace(r record) {
	d.mu.Lock()
	d.record, d.all = r, true
	d.state.InEffect = false
	d.mu.Unlock()
	ring(d.wake)
}

func (d *domain) recorded() record {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.record
}

// attachment returns the present state, and a channel that is closed when it changes.
func (d *domain) attachment() (*farev1.Attachment, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := proto.CloneOf(&d.state)
	out.Id, out.NetnsPath, out.Addresses, out.SlotsDirectory = d.id, d.record.Path, d.record.Addresses, d.m.slots(d.id)
	return out, d.news
}

// gone reports whether the path does not lead to the namespace any more.
func (d *domain) gone() bool {
	return absent(d.space, d.recorded().Path)
}

// run programs the namespace until stop.
func (d *domain) run() {
	defer close(d.done)
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	heartbeat := time.NewTimer(beat.Until(time.Now(), slotlayout.HeartbeatPeriod))
	defer heartbeat.Stop()
	pause := retryFirst
	for {
		err := d.guarded(d.sync)
		d.publish(err)
		retry.Stop()
		if err != nil {
			d.m.failures.Add(1)
			retry.Reset(pause)
			pause = min(2*pause, retryMost)
		} else {
			pause = retryFirst
		}
		for idle := true; idle; {
			select {
			case <-d.stop:
				return
			case <-d.wake:
				idle = false
			case <-retry.C:
				idle = false
			case <-heartbeat.C:
				heartbeat.Reset(beat.Until(time.Now(), slotlayout.HeartbeatPeriod))
				if beatErr := d.guarded(d.beat); beatErr != nil {
					d.log.Debug("the slot table of a pod cannot be published", "error", beatErr)
				}
				d.publish(err)
				idle = d.settled || d.server == nil || !d.m.c.Settled()
			}
		}
	}
}

// guarded calls f and converts a panic into an error, so that the host's data plane continues.
func (d *domain) guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			d.log.Error("an attachment panicked", "panic", p, "stack", string(debug.Stack()))
			err = errors.New("a fault in the data-plane agent, which continues: report it with the log")
		}
	}()
	return f()
}

// publish shows the state after a sync that ended with err.
func (d *domain) publish(err error) {
	next := &farev1.Attachment{}
	switch {
	case err != nil:
		next.Error = err.Error()
	case d.server != nil:
		integrity := d.server.Integrity()
		if next.Error = d.refused; next.Error == "" {
			next.Error = integrity.Message
		}
		next.InEffect = d.synced && integrity.Intact
	}
	if r := d.restriction; r != nil && d.server != nil {
		for _, plane := range d.m.hostPlanes() {
			for _, sp := range plane.SubPorts {
				if device, ok := r.devices[sp.Device]; ok {
					next.Devices = append(next.Devices, &farev1.AttachDevice{Device: device, SubPort: sp.Device})
				}
			}
		}
		d.server.View(func(s *contract.State) { next.Destinations = uint32(s.Destinations.Len()) })
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.all || !d.pending.Empty() {
		next.InEffect = false
	}
	if proto.Equal(next, &d.state) {
		return
	}
	switch {
	case next.Error != "" && next.Error != d.state.Error:
		d.announced = false
		level := slog.LevelWarn
		if next.Error == errEnds.Error() {
			level = slog.LevelInfo
		}
		d.log.Log(context.Background(), level, "a pod does not follow the weights", "error", next.Error)
	case next.InEffect && !d.announced:
		d.announced = true
		d.log.Info("a pod follows the weights", "devices", len(next.Devices), "destinations", next.Destinations)
	}
	proto.Reset(&d.state)
	proto.Merge(&d.state, next)
	close(d.news)
	d.news = make(chan struct{})
}

// take returns the pending changes, and the record.
func (d *domain) take() (changed contract.Changed, all bool, r record) {
	d.mu.Lock()
	defer d.mu.Unlock()
	changed, all = d.pending, d.all
	d.pending, d.all = noChange(), false
	return changed, all, d.record
}

// again makes changes pending that could not be made.
func (d *domain) again(changed contract.Changed, all bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending.Add(changed)
	d.all = d.all || all
}

// sync brings the namespace in line with the host's state.
func (d *domain) sync() (err error) {
	changed, all, r := d.take()
	if !all && changed.Empty() && d.settled {
		if d.scanner != nil && len(d.scanner.found) > 0 {
			return d.show(noChange(), false)
		}
		return nil
	}
	defer func() {
		if err != nil {
			d.again(changed, all)
		}
	}()
	all = all || changed.Forwarding || d.server == nil
	whole := false // the table is written whole
	if all {
		if whole, err = d.forward(r); err != nil || d.server == nil {
			return err
		}
	}
	failed, inside := d.program(changed, all)
	if !failed.Empty() {
		d.again(failed, false)
	}
	d.synced = failed.Empty() && len(d.approximate) == 0
	if !d.settled && failed.Empty() && d.m.c.Settled() {
		if err := d.driver.Settle(); err != nil {
			return fmt.Errorf("remove the objects of an earlier run: %w", err)
		}
		d.settled = true
	}
	if err := d.show(inside, whole); err != nil {
		return fmt.Errorf("the slot table: %w", err)
	}
	if !failed.Empty() {
		return errors.New(d.refused)
	}
	return nil
}

// errEnds is the state of a pod that ends: the runtime sets the loopback device down before plugins are called.
var errEnds = errors.New("the loopback device of the namespace is down, without which the kernel forwards nothing: a runtime sets it up when a pod starts, and down when it ends")

// forward applies the forwarding of the host, and reports whether the namespace's has changed. Without any sub-port it
// removes all objects.
func (d *domain) forward(r record) (changed bool, err error) {
	host := d.m.hostForwarding()
	if host == nil {
		return false, nil
	}
	if err := d.space.Do(up); err != nil {
		return false, err
	}
	devices, without, err := find(d.space, d.m.space, host, r.Devices)
	if err != nil {
		return false, err
	}
	addresses, err := hostPrefixes(r.Addresses)
	if err == nil && len(addresses) == 0 {
		addresses, err = sources(d.space, slices.Sorted(maps.Values(devices)))
	}
	if err != nil {
		return false, err
	}
	next := restrict(host, devices, addresses)
	if next == nil {
		if err := d.clear(); err != nil {
			return false, err
		}
		return false, lacking(without, len(addresses))
	}
	if d.restriction != nil && !maps.Equal(d.restriction.sources, next.sources) {
		if err := d.clear(); err != nil {
			return false, err
		}
	}
	if d.server == nil {
		if err := d.open(); err != nil {
			return false, err
		}
	}
	if d.restriction != nil && proto.Equal(d.restriction.forwarding, next.forwarding) && d.restriction.equalNames(next) {
		return false, nil
	}
	if err := d.server.SetForwarding(proto.CloneOf(next.forwarding)); err != nil {
		return false, err
	}
	d.restriction = next
	ring(d.scanner.again)
	return true, nil
}

// up returns errEnds if the loopback device of the calling thread's namespace is down.
func up() error {
	lo, err := net.InterfaceByName("lo")
	if err == nil && lo.Flags&net.FlagUp == 0 {
		err = errEnds
	}
	return err
}

// lacking returns why an attachment has no sub-port.
func lacking(without []string, addresses int) error {
	switch {
	case len(without) > 0:
		return fmt.Errorf("devices %v have no sub-port of the host: name the sub-port, or correct 'planes' of the configuration", without)
	case addresses == 0:
		return errors.New("neither the request nor the devices have a global address: add one")
	}
	return errors.New("no device of the namespace has a sub-port of the host: name the devices")
}

// open opens the driver in the namespace.
func (d *domain) open() error {
	config := d.m.c.Linux
	config.Logger, config.Took = d.log, nil
	err := d.space.Do(func() (err error) {
		if d.guest, err = d.m.c.Enter(d.log); err != nil {
			return err
		}
		d.driver, err = linux.Open(config)
		return err
	})
	if err != nil {
		return errors.Join(err, d.shut())
	}
	d.settled, d.approximate = false, map[uint32]string{}
	d.scanner = newScanner(d.space, d.wake, d.log)
	d.server = contract.New(contract.Config{Name: "linux", Version: d.m.c.Version, Forwarder: d.driver, Policy: d.guest})
	return nil
}

// shut releases everything but the namespace. The kernel continues to forward there.
func (d *domain) shut() error {
	var errs []error
	if d.driver != nil {
		errs = append(errs, d.driver.Close())
	}
	if d.guest != nil {
		errs = append(errs, d.guest.Close())
	}
	if d.table != nil {
		errs = append(errs, d.table.writer.Close())
	}
	if d.scanner != nil {
		d.scanner.close()
	}
	d.driver, d.guest, d.server, d.table, d.scanner, d.restriction, d.synced, d.refused = nil, nil, nil, nil, nil, nil, false, ""
	return errors.Join(errs...)
}

// clear removes all objects from the namespace.
func (d *domain) clear() error {
	return errors.Join(d.shut(), flush(d.space, d.m.c.Linux))
}

func flush(space netns.Namespace, config linux.Config) error {
	return space.Do(func() error {
		_, err := linux.Flush(config)
		return err
	})
}

// plan is a list of operations with the objects of the host that they are for.
type plan struct {
	operations []*farev1.Operation
	objects    []contract.Changed
	inside     contract.Changed // the objects in the namespace
}

func (p *plan) add(o *farev1.Operation, of contract.Changed) {
	p.operations, p.objects = append(p.operations, o), append(p.objects, of)
}

// program programs changed objects, or all, and returns those that were refused, and the objects of the namespace that
// may have changed.
func (d *domain) program(changed contract.Changed, all bool) (failed, inside contract.Changed) {
	p := d.plan(changed, all)
	failed, d.refused = noChange(), ""
	for i, result := range d.server.Apply(p.operations) {
		o := p.objects[i]
		for id := range o.Groups {
			delete(d.approximate, id)
		}
		switch {
		case result == nil:
		case result.Code() == codes.OK:
			for id := range o.Groups {
				d.approximate[id] = result.Message()
			}
		default:
			failed.Add(o)
			if d.refused == "" {
				d.refused = result.Message()
			}
		}
	}
	if d.refused == "" {
		for _, text := range d.approximate {
			d.refused = text
		}
	}
	return failed, p.inside
}

// plan returns the operations for changed objects, or all: states and sets before deletions, destinations after the
// vectors that they name and before those that they leave.
func (d *domain) plan(changed contract.Changed, all bool) *plan {
	r, m := d.restriction, d.m.mirror
	p := &plan{inside: noChange()}
	m.mu.RLock()
	defer m.mu.RUnlock()
	if all {
		changed = m.everything()
	}
	served := map[uint32]string{} // source groups of the namespace's vectors
	d.server.View(func(s *contract.State) {
		for id := range changed.Groups {
			if v := s.Groups[id]; v != nil {
				served[id] = v.Source
			}
		}
	})
	var last, lastVectors plan
	for device := range changed.SubPorts {
		if name, ok := r.devices[device]; ok {
			o := &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: name, Up: !m.down[device]}}}
			p.add(o, contract.Changed{SubPorts: map[string]bool{device: true}})
		}
	}
	remove := func(id uint32) {
		o := &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: id}}
		lastVectors.add(o, contract.Changed{Groups: map[uint32]bool{id: true}})
		p.inside.Groups[id] = true
	}
	for id := range changed.Groups {
		var v *farev1.Vector
		if group := m.groups[id]; group != nil {
			v = r.vector(group)
		}
		if v == nil {
			remove(id)
			continue
		}
		of := contract.Changed{Groups: map[uint32]bool{id: true}}
		if before, ok := served[id]; ok && before != v.Source { // it is refused until the destinations have left, and repeated
			p.add(&farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: id}}, of)
		}
		p.add(&farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: v}}, of)
		p.inside.Groups[id] = true
	}
	wanted := map[contract.DestinationKey]bool{}
	for key := range changed.Destinations {
		group := m.destinations[key]
		if group != 0 && m.groups[group] == nil {
			continue // the feed announces its next group later
		}
		o := r.destination(key, group)
		if o == nil {
			continue
		}
		at := d.inside(key)
		p.inside.Destinations[at], wanted[at] = true, group != 0
		of := contract.Changed{Destinations: map[contract.DestinationKey]bool{key: true}}
		if group != 0 {
			p.add(o, of)
		} else {
			last.add(o, of)
		}
	}
	if all {
		d.server.View(func(s *contract.State) {
			for id := range s.Groups {
				if m.groups[id] == nil {
					remove(id)
				}
			}
			for key := range s.Destinations.All() {
				at := contract.DestinationKey{Source: key.Group, Prefix: key.Prefix}
				if !wanted[at] {
					source := ""
					if at.Source.IsValid() {
						source = at.Source.String()
					}
					p.inside.Destinations[at] = true
					last.add(&farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: at.Prefix.String(), Source: source}}}, contract.Changed{Forwarding: true})
				}
			}
		})
	}
	p.operations = slices.Concat(p.operations, last.operations, lastVectors.operations)
	p.objects = slices.Concat(p.objects, last.objects, lastVectors.objects)
	return p
}

// inside returns the key of a destination in the namespace.
func (d *domain) inside(key contract.DestinationKey) contract.DestinationKey {
	name := ""
	if key.Source.IsValid() {
		name = key.Source.String()
	}
	source, _ := netip.ParsePrefix(d.restriction.sources[name]) // not valid without source groups
	return contract.DestinationKey{Source: source, Prefix: key.Prefix}
}

// show publishes the slot table.
func (d *domain) show(changed contract.Changed, whole bool) (err error) {
	if d.table == nil {
		w, err := slotfile.Open(filepath.Join(d.m.slots(d.id), tableName), 0)
		if err != nil {
			return err
		}
		d.table = &table{writer: w, instance: d.m.instance}
	}
	select {
	case d.table.rdma = <-d.scanner.found:
		d.table.scanned = true
	default:
	}
	intact := d.synced && d.server.Integrity().Intact
	hash := d.server.Describe().GetCapabilities().GetFlowHash()
	d.server.View(func(s *contract.State) {
		err = slotfile.Guard(func() error { return d.table.show(s, changed, whole, intact, hash) })
	})
	return err
}

// beat runs once a second.
func (d *domain) beat() error {
	if d.server == nil || d.table == nil {
		return nil
	}
	d.guest.Refresh()
	if err := slotfile.Guard(d.table.writer.Beat); err != nil {
		d.table.begun = false
	}
	return d.show(noChange(), false)
}

// halt ends the goroutine.
func (d *domain) halt() {
	select {
	case <-d.stop:
	default:
		close(d.stop)
	}
	<-d.done
}

// unavailable converts an error into a status, unless it is one.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Error(codes.Unavailable, err.Error())
}
