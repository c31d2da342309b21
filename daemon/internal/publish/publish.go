// Package publish keeps the slot table up to date: it follows the views of the status, like a watcher, and writes their
// changes by internal/slotfile. The daemon's loop does no work for it other than building views.
package publish

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/slotfile"
	"github.com/fared/fared/internal/slotlayout"
)

// retryDelay is the time after which a failed publication is repeated.
const retryDelay = time.Second

// scanPeriod is the period of scans for RDMA devices, GIDs among them, which appear when addresses are added.
const scanPeriod = 10 * time.Second

// Config configures a publisher.
type Config struct {
	Reader *status.Reader
	// Path is the path of the table, Mode its permission bits.
	Path string
	Mode os.FileMode
	// Former is another path at which programs look for the table. It becomes a symbolic link to Path with the first
	// publication; empty means none.
	Former string
	// Services have source ports in the table, at least one; see slotfile.Shape.Services.
	Services []status.FlowService
	// Sysfs is the root of sysfs, from which the RDMA devices of sub-ports are read; empty means rdmadev.Sysfs.
	Sysfs string
	Log   *slog.Logger
}

// Publisher publishes the slots of all pairs. Use New.
type Publisher struct {
	c Config
	w *slotfile.Writer
	// planes and subPorts have the indexes of the names in the table.
	planes, subPorts map[string]int

	// ports are the RDMA ports of the last scan.
	ports []rdmadev.Port

	// shown is the view that the table shows; nil means that the table has to be written whole.
	shown    *status.View
	maxSlots int
	// owners has the source group of each vector that pairs use, groups that of each loopback.
	owners map[uint32]int
	groups map[netip.Addr]int
	next   time.Time // of the next attempt
	wrong  []string  // devices of the slots that are marked
	marked chan struct{}

	mu     sync.Mutex // guards everything below
	health status.SlotTable
	found  []string // devices of the slots to mark
}

// Health returns the counter of failed publications, and the present failure. It may be called from any goroutine.
func (p *Publisher) Health() status.SlotTable {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.health
}

// note records the end of an attempt; nil is a success. It returns the failure before, "" if there was none.
func (p *Publisher) note(err error) (before string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before = p.health.Failure
	if p.health.Failure = ""; err != nil {
		p.health.Failures++
		p.health.Failure = err.Error()
	}
	return before
}

// New takes possession of the path. The error has a remedy.
func New(c Config) (*Publisher, error) {
	w, err := slotfile.Open(c.Path, c.Mode)
	if err != nil {
		return nil, fmt.Errorf("slots.file: %w; slots.file: none disables the slot table", err)
	}
	return &Publisher{c: c, w: w, marked: make(chan struct{}, 1)}, nil
}

// Close ends the publication without a Run.
func (p *Publisher) Close() error { return p.w.Close() }

// Run publishes until ctx ends. The table stays at its path, marked as one without an owner.
func (p *Publisher) Run(ctx context.Context) error {
	defer p.w.Close()
	select {
	case <-p.c.Reader.Started():
	case <-ctx.Done():
		return nil
	}
	heartbeat := time.NewTimer(beat.Until(time.Now(), slotlayout.HeartbeatPeriod))
	defer heartbeat.Stop()
	// A scan reads thousands of files, so it has a separate goroutine.
	scans := make(chan []rdmadev.Port)
	ctx, cancel := context.WithCancel(ctx)
	scanned := make(chan struct{})
	go func() {
		defer close(scanned)
		p.scan(ctx, scans)
	}()
	defer func() {
		cancel()
		<-scanned
	}()
	select {
	case p.ports = <-scans:
	case <-ctx.Done():
		return nil
	}
	for {
		changed := p.c.Reader.Next()
		view, err := p.c.Reader.View(ctx)
		if err != nil {
			<-ctx.Done() // the loop has ended first
			return nil
		}
		p.attempt(func() error { return p.show(view) })
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-heartbeat.C:
			p.attempt(p.w.Beat)
			heartbeat.Reset(beat.Until(time.Now(), slotlayout.HeartbeatPeriod))
		case p.ports = <-scans:
			p.attempt(p.refreshRDMA)
		case <-p.marked:
			p.attempt(p.mark)
		}
	}
}

// scan sends the RDMA ports of this machine, at first and whenever they have changed, until ctx ends.
func (p *Publisher) scan(ctx context.Context, out chan<- []rdmadev.Port) {
	root := cmp.Or(p.c.Sysfs, rdmadev.Sysfs)
	tick := time.NewTicker(scanPeriod)
	defer tick.Stop()
	var last []rdmadev.Port
	for first := true; ; first = false {
		ports, err := rdmadev.Scan(root)
		if err != nil {
			p.c.Log.Debug("RDMA devices cannot be listed", "error", err)
		}
		if first || !reflect.DeepEqual(ports, last) {
			select {
			case out <- ports:
				last = ports
			case <-ctx.Done():
				return
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// refreshRDMA publishes changed RDMA devices.
func (p *Publisher) refreshRDMA() error {
	if p.shown == nil || !p.setRDMA(p.shown.Layout()) {
		return nil
	}
	return p.w.Publish()
}

// setRDMA writes the RDMA device of every sub-port to the table, and reports whether one has changed.
func (p *Publisher) setRDMA(layout *status.Layout) (changed bool) {
	var sources []netip.Addr
	for g := range layout.Groups {
		for _, source := range layout.Groups[g].Sources {
			sources = append(sources, source.Addr())
		}
	}
	for i, sp := range layout.SubPorts {
		device := sp.Device
		var port *rdmadev.Port
		if sp.Netns == "" {
			port = rdmadev.PortOf(p.ports, device, sources...)
		}
		if port == nil && len(p.ports) > 0 && sp.Netns == "" { // it may be an alternative name
			if ifi, err := link.Interface(device); err == nil {
				device = ifi.Name
				port = rdmadev.PortOf(p.ports, device, sources...)
			}
		}
		changed = p.w.SetRDMA(i, slotfile.RDMAOf(port, device, sources)) || changed
	}
	return changed
}

// attempt calls fn. After an error it abandons the table, which the next attempt writes whole.
func (p *Publisher) attempt(fn func() error) {
	if time.Now().Before(p.next) {
		return
	}
	err := slotfile.Guard(fn)
	if err == nil {
		if p.shown != nil && p.note(nil) != "" {
			p.c.Log.Info("the slot table is published again", "file", p.c.Path)
		}
		return
	}
	if p.note(err) != err.Error() {
		p.c.Log.Warn("the slot table cannot be published", "file", p.c.Path, "error", err, "retry", retryDelay)
	}
	p.shown = nil
	if !errors.Is(err, slotfile.ErrGone) {
		p.next = time.Now().Add(retryDelay)
	}
	if err := slotfile.Guard(p.w.Abandon); err != nil {
		p.c.Log.Debug("the slot table was not marked as abandoned", "file", p.c.Path, "error", err)
	}
}

// show publishes a view.
func (p *Publisher) show(view *status.View) error {
	if p.shown != nil && !sameShape(p.shown.Layout(), view.Layout()) {
		p.shown = nil
	}
	var removed []status.Key
	if p.shown != nil {
		if view.Revision() == p.shown.Revision() {
			return nil
		}
		var known bool
		if removed, known = view.RemovedSince(p.shown); !known || p.slots(view) > p.maxSlots {
			p.shown = nil
		}
	}
	if p.shown == nil {
		if err := p.begin(view); err != nil {
			return err
		}
		removed = nil
	}
	if err := p.w.Apply(p.change(view, removed)); err != nil {
		return err
	}
	if err := p.w.Publish(); err != nil {
		return err
	}
	p.shown = view
	p.linkFormer()
	return nil
}

// linkFormer links the former path to the table, which exists now. The link is relative, so that it leads to the table
// in a container that has mounted the directory above both. Without the link programs that know the new path have the
// table.
func (p *Publisher) linkFormer() {
	former := p.c.Former
	if p.c.Former = ""; former == "" {
		return
	}
	target, err := filepath.Rel(filepath.Dir(former), p.c.Path)
	if err == nil {
		if have, _ := os.Readlink(former); have == target {
			return
		}
		next := former + ".new" // also the name of a file that an earlier version has left incomplete
		if err = os.Remove(next); err == nil || errors.Is(err, fs.ErrNotExist) {
			if err = os.Symlink(target, next); err == nil {
				err = slotfile.Supersede(former, func() error { return os.Rename(next, former) })
			}
		}
	}
	if err != nil {
		p.c.Log.Warn("programs that look for the slot table at its former path do not find it", "file", p.c.Path, "former", former, "error", err)
	}
}

// sameShape reports whether two layouts have the same planes, sub-ports and source groups, and the same services
// without separate source ports.
func sameShape(a, b *status.Layout) bool {
	return a == b || slices.Equal(a.Planes, b.Planes) && slices.Equal(a.SubPorts, b.SubPorts) && slices.Equal(steered(a), steered(b)) &&
		slices.EqualFunc(a.Groups, b.Groups, func(a, b status.LayoutGroup) bool { return slices.Equal(a.Sources, b.Sources) })
}

// steered returns the services that have the source ports of the table's first service.
func steered(l *status.Layout) (out []slotfile.Range) {
	if l.SamePorts {
		for _, r := range l.Services {
			out = append(out, slotfile.Range(r))
		}
	}
	return out
}

// slots returns the greatest number of slots among the vectors that have changed.
func (p *Publisher) slots(view *status.View) int {
	n := 0
	for _, v := range view.VectorsSince(p.shown) {
		if v != nil {
			n = max(n, len(v.Slots))
		}
	}
	return n
}

// begin starts an empty table for a view.
func (p *Publisher) begin(view *status.View) error {
	p.owners, p.groups, p.maxSlots = map[uint32]int{}, map[netip.Addr]int{}, max(p.slots(view), 1)
	s := slotfile.Shape{
		Instance: p.c.Reader.Instance(), Planes: view.Layout().Planes, MaxSlots: p.maxSlots, Vectors: view.Vectors(), Steered: steered(view.Layout()),
	}
	p.planes, p.subPorts = map[string]int{}, map[string]int{}
	for i, name := range view.Layout().Planes {
		p.planes[name] = i
	}
	for i, sp := range view.Layout().SubPorts {
		p.subPorts[sp.Device] = i
		s.SubPorts = append(s.SubPorts, slotfile.SubPort{Device: sp.Device, Plane: sp.Plane})
	}
	for _, service := range p.c.Services {
		s.Services = append(s.Services, slotfile.Service(service))
	}
	for i := range view.Layout().Groups {
		for _, source := range view.Layout().Groups[i].Sources {
			s.Sources = append(s.Sources, slotfile.Source{Address: source.Addr(), Group: i})
			p.groups[source.Addr()] = i
		}
	}
	for key := range view.DestinationsSince(nil, nil) {
		s.Pairs += len(view.Layout().Groups[key.Source].PairSources(key.Addr()))
	}
	if err := p.w.Begin(s); err != nil {
		return err
	}
	p.setRDMA(view.Layout())
	return nil
}

// change returns the difference between the table and a view.
func (p *Publisher) change(view *status.View, removed []status.Key) slotfile.Change {
	layout := view.Layout()
	c := slotfile.Change{Revision: view.Revision(), KeepPorts: p.shown != nil && p.shown.Layout() == layout && !layout.AskedPorts}
	for _, key := range removed {
		for _, source := range layout.Groups[key.Source].PairSources(key.Addr()) {
			c.Remove = append(c.Remove, slotfile.Key(source.Addr(), key.Addr()))
		}
	}
	// The ports of a slot depend on its place, so that all pairs of a vector with other places change.
	var moved map[uint32]bool
	if p.shown != nil {
		for id, v := range view.VectorsSince(p.shown) {
			if old := p.shown.Find(id); v != nil && old != nil && !samePlaces(old, v) {
				if moved == nil {
					moved = map[uint32]bool{}
				}
				moved[id] = true
			}
		}
	}
	c.Vectors = p.vectors(view, p.shown)
	c.Pairs = p.pairs(view, moved)
	c.Vector = func(pair *slotfile.Pair) *slotfile.Vector {
		group := p.groups[slotlayout.Addr(pair.Source)]
		p.owners[pair.Vector] = group
		return p.vector(layout, group, view.Find(pair.Vector))
	}
	c.Ports = func(pair *slotfile.Pair, service int, buf []uint16) ([]uint16, uint32) {
		if layout.Ports == nil {
			return buf, slotlayout.PlacementUniform
		}
		var to status.FlowService
		if service < len(p.c.Services) {
			to = p.c.Services[service]
		}
		src, dst := slotlayout.Addr(pair.Source), slotlayout.Addr(pair.Destination)
		ports, placement := layout.Ports(to, src, dst, view.Find(pair.Vector), buf)
		return ports, uint32(max(slices.Index(slotlayout.Placements[:], placement), 0))
	}
	return c
}

// vectors yields the vectors that pairs use and that have changed since a view, all of them if it is nil.
func (p *Publisher) vectors(view, since *status.View) iter.Seq2[uint32, *slotfile.Vector] {
	return func(yield func(uint32, *slotfile.Vector) bool) {
		for id, v := range view.VectorsSince(since) {
			owner, ok := p.owners[id]
			if !ok {
				continue
			}
			var out *slotfile.Vector
			if v != nil {
				out = p.vector(view.Layout(), owner, v)
			} else {
				delete(p.owners, id)
			}
			if !yield(id, out) {
				return
			}
		}
	}
}

// SetWrong marks the slots of these sub-ports, by device: probes by them are lost or go another way. It may be called
// from any goroutine.
func (p *Publisher) SetWrong(devices []string) {
	p.mu.Lock()
	p.found = devices
	p.mu.Unlock()
	select {
	case p.marked <- struct{}{}:
	default:
	}
}

// mark publishes the slots' marks.
func (p *Publisher) mark() error {
	p.mu.Lock()
	found := p.found
	p.mu.Unlock()
	if slices.Equal(found, p.wrong) {
		return nil
	}
	if p.wrong = found; p.shown == nil {
		return nil
	}
	err := p.w.Apply(slotfile.Change{Revision: p.shown.Revision(), Vectors: p.vectors(p.shown, nil), Pairs: func(func(*slotfile.Pair) bool) {}})
	if err != nil {
		return err
	}
	return p.w.Publish()
}

// samePlaces reports whether the slots of two vectors have equal planes and sub-ports.
func samePlaces(a, b *status.Vector) bool {
	return slices.EqualFunc(a.Slots, b.Slots, func(a, b status.Slot) bool { return a.Plane == b.Plane && a.SubPort == b.SubPort })
}

// pairs yields the pairs of the destinations that have changed, and of those whose vector is among the moved ones. A
// pair is valid until the next one.
func (p *Publisher) pairs(view *status.View, moved map[uint32]bool) iter.Seq[*slotfile.Pair] {
	layout := view.Layout()
	return func(yield func(*slotfile.Pair) bool) {
		var out slotfile.Pair // one for all: it escapes
		for key, d := range view.DestinationsSince(p.shown, moved) {
			out = slotfile.Pair{InEffect: d.InEffect, Drain: d.Drain}
			if view.Find(d.Vector) != nil {
				out.Vector = d.Vector
			}
			for _, source := range layout.Groups[key.Source].PairSources(key.Addr()) {
				out.PairKey = slotfile.Key(source.Addr(), key.Addr())
				if !yield(&out) {
					return
				}
			}
		}
	}
}

// vector converts a vector of a source group.
func (p *Publisher) vector(layout *status.Layout, group int, v *status.Vector) *slotfile.Vector {
	g := &layout.Groups[group]
	out := &slotfile.Vector{Slots: make([]slotlayout.Slot, len(v.Slots))}
	if v.Reachable {
		out.Flags |= slotlayout.VectorReachable
	}
	if !slices.ContainsFunc(v.Planes, func(p status.VectorPlane) bool { return !p.InEffect }) {
		out.Flags |= slotlayout.VectorInEffect
	}
	for i, s := range v.Slots {
		plane := &g.Planes[s.Plane]
		slot := slotlayout.Slot{Share: s.Share, Plane: uint8(p.planes[plane.Name]), SubPort: slotlayout.NoSubPort}
		if s.SubPort >= 0 {
			device := plane.SubPorts[s.SubPort]
			slot.SubPort = uint16(p.subPorts[device])
			if slices.Contains(p.wrong, device) {
				slot.Flags |= slotlayout.SlotWrong
			}
		}
		if s.Share == 0 {
			slot.Flags |= slotlayout.SlotParked
		}
		if s.Drain {
			slot.Flags |= slotlayout.SlotDrain
		}
		if v.Planes[s.Plane].InEffect {
			slot.Flags |= slotlayout.SlotInEffect
		}
		out.Slots[i] = slot
	}
	return out
}
