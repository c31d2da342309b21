package tcpslots

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/client/slots"
)

// maxPairs is the greatest number of pairs, as that of the steering program.
const maxPairs = 1 << 18

// ErrPrivileges means that the process may not load the programs, or may not attach them to the cgroup.
var ErrPrivileges = errors.New("the process lacks the privileges")

// ErrKernel means that the kernel lacks a feature.
var ErrKernel = errors.New("the kernel lacks a feature")

// Placer places the connections of a cgroup's processes. Its methods must not be called at the same time.
type Placer struct {
	objects connectObjects
	links   []link.Link
	table   *slots.Table
	mark    slots.Mark // of the table at the last Sync

	// The content of the maps.
	first   [2]netip.Addr
	vectors map[uint32][]slots.Slot
	pairs   map[key]*connectPorts
}

type key struct{ source, destination netip.Addr }

// Attach attaches the programs to a cgroup of version 2, filled from the table. They stay attached until Close or the
// end of the process. Programs of other owners stay attached, too. The error is ErrPrivileges, ErrKernel or another
// one.
func Attach(cgroup string, table *slots.Table) (_ *Placer, err error) {
	spec, err := loadConnect()
	if err != nil {
		return nil, err
	}
	spec.Maps[connectMapFaredPairs].MaxEntries = maxPairs
	spec.Maps[connectMapFaredDeals].MaxEntries = maxPairs
	p := &Placer{table: table, vectors: map[uint32][]slots.Slot{}, pairs: map[key]*connectPorts{}}
	if err := spec.LoadAndAssign(&p.objects, nil); err != nil {
		return nil, explain("load the BPF programs", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	if err := p.Sync(); err != nil && !errors.Is(err, slots.ErrBusy) {
		return nil, err
	}
	// Programs that are started at the same time shall not all begin with the same sub-port.
	if err := p.objects.FaredStart.Put(uint32(0), uint32(os.Getpid())); err != nil {
		return nil, err
	}
	for attach, program := range map[ebpf.AttachType]*ebpf.Program{
		ebpf.AttachCGroupInet4Connect: p.objects.FaredConnect4, ebpf.AttachCGroupInet6Connect: p.objects.FaredConnect6,
	} {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: attach, Program: program})
		if err != nil {
			return nil, explain("attach the BPF programs to "+cgroup, err)
		}
		p.links = append(p.links, l)
	}
	return p, nil
}

func explain(step string, err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES) && os.Geteuid() != 0:
		return fmt.Errorf("%s: %w", step, ErrPrivileges)
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("%s: %w: %w", step, ErrKernel, err)
	}
	return fmt.Errorf("%s: %w", step, err)
}

// Close detaches the programs. Open connections stay where they are.
func (p *Placer) Close() error {
	var errs []error
	for _, l := range p.links {
		errs = append(errs, l.Close())
	}
	p.links = nil
	return errors.Join(append(errs, p.objects.Close())...)
}

// Sync writes the differences between the slot table and the maps. A pair that is being changed keeps its previous
// state, and the error is slots.ErrBusy.
func (p *Placer) Sync() error {
	p.mark = p.table.Mark()
	if err := p.syncFirst(); err != nil {
		return err
	}
	vectors, pairs := map[uint32]bool{}, map[key]bool{}
	var busy error
	for pair, err := range p.table.Pairs() {
		if errors.Is(err, slots.ErrBusy) {
			busy = err
			continue
		}
		if err != nil {
			return err
		}
		if !fits(&pair) {
			return fmt.Errorf("the pair %s to %s has more than %d slots, or a plane above %d", pair.Source, pair.Destination, maxSlots, maxPlanes)
		}
		if pair.Vector == 0 {
			continue
		}
		if !vectors[pair.Vector] {
			vectors[pair.Vector] = true
			if err := p.syncVector(pair.Vector, pair.Slots); err != nil {
				return err
			}
		}
		k := key{pair.Source, pair.Destination}
		pairs[k] = true
		if err := p.syncPair(k, portsOf(&pair)); err != nil {
			return err
		}
	}
	if busy != nil {
		return busy
	}
	return p.prune(vectors, pairs)
}

// syncFirst updates the loopbacks of unbound sockets: as the kernel's routes, the first of the family.
func (p *Placer) syncFirst() error {
	var first [2]netip.Addr
	for _, a := range p.table.Sources() {
		if i := family(a); !first[i].IsValid() {
			first[i] = a
		}
	}
	for i, a := range first {
		if a == p.first[i] {
			continue
		}
		if err := p.objects.FaredFirst.Put(uint32(i), addressOf(a)); err != nil {
			return fmt.Errorf("write the loopback %s: %w", a, err)
		}
		p.first[i] = a
	}
	return nil
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func addressOf(a netip.Addr) (out connectAddress) {
	if a.IsValid() {
		b := a.As16()
		for i := range out.Word {
			out.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
		}
	}
	return out
}

func (p *Placer) syncVector(number uint32, list []slots.Slot) error {
	if slices.EqualFunc(p.vectors[number], list, sameDeal) && p.vectors[number] != nil {
		return nil
	}
	if err := p.objects.FaredDeals.Put(number, dealOf(list)); err != nil {
		return fmt.Errorf("write the weights of vector %d: %w", number, err)
	}
	p.vectors[number] = slices.Clone(list)
	return nil
}

// sameDeal reports whether two slots are dealt alike. Ports belong to pairs.
func sameDeal(a, b slots.Slot) bool {
	return a.Plane == b.Plane && a.SubPort == b.SubPort && a.Share == b.Share
}

func (p *Placer) syncPair(k key, ports *connectPorts) error {
	if have := p.pairs[k]; have != nil && *have == *ports {
		return nil
	}
	if err := p.objects.FaredPairs.Put(pairOf(k), ports); err != nil {
		return fmt.Errorf("write the ports of the pair %s to %s: %w", k.source, k.destination, err)
	}
	p.pairs[k] = ports
	return nil
}

func pairOf(k key) connectPair {
	return connectPair{Source: addressOf(k.source), Destination: addressOf(k.destination)}
}

// prune removes the pairs and vectors that the table no longer has.
func (p *Placer) prune(vectors map[uint32]bool, pairs map[key]bool) error {
	for _, k := range slices.Collect(maps.Keys(p.pairs)) {
		if pairs[k] {
			continue
		}
		if err := p.objects.FaredPairs.Delete(pairOf(k)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove the pair %s to %s: %w", k.source, k.destination, err)
		}
		delete(p.pairs, k)
	}
	for _, v := range slices.Collect(maps.Keys(p.vectors)) {
		if vectors[v] {
			continue
		}
		if err := p.objects.FaredDeals.Delete(v); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove vector %d: %w", v, err)
		}
		delete(p.vectors, v)
	}
	return nil
}

// retry is the time after which Follow reads a pair again that was being changed.
const retry = 100 * time.Millisecond

// checkPeriod is the period in which Follow looks whether the table is stale.
const checkPeriod = time.Second

// Follow keeps the maps current until ctx ends. report receives the errors of Sync, after which some pairs keep their
// previous state until the next change of the table; those of Table.Check, once; and nil when the table is maintained
// again.
func (p *Placer) Follow(ctx context.Context, report func(error)) {
	var last, stale error
	for {
		slice := checkPeriod
		if errors.Is(last, slots.ErrBusy) {
			slice = retry
		}
		wait, cancel := context.WithTimeout(ctx, slice)
		_, timeout := p.table.Wait(wait, p.mark) // the only error is the end of wait
		cancel()
		if ctx.Err() != nil {
			return
		}
		if now := p.table.Check(); fmt.Sprint(now) != fmt.Sprint(stale) {
			stale = now
			report(now)
		}
		if timeout != nil && !errors.Is(last, slots.ErrBusy) {
			continue
		}
		if last = p.Sync(); last != nil && !errors.Is(last, slots.ErrBusy) {
			report(last)
		}
	}
}

// Counts are numbers of connections since Attach.
type Counts struct {
	// Planes has the placed connections, by the plane's index in Table.Planes.
	Planes [maxPlanes]uint64
	// Bound counts sockets whose source port or device the program had chosen, Unknown those whose destination has no
	// slots with a share, Taken those for which no port was free, Address those whose loopback is not an address of the
	// network namespace, Refused those that the kernel refused to bind for another reason.
	Bound, Unknown, Taken, Address, Refused uint64
}

// Counts returns the counters.
func (p *Placer) Counts() (c Counts, err error) {
	var n []uint64
	for i := range p.objects.FaredCounts.MaxEntries() {
		if err := p.objects.FaredCounts.Lookup(i, &n); err != nil {
			return c, fmt.Errorf("read the counters: %w", err)
		}
		sum := uint64(0)
		for _, k := range n {
			sum += k
		}
		if i < maxPlanes {
			c.Planes[i] = sum
		} else {
			*[]*uint64{&c.Bound, &c.Unknown, &c.Taken, &c.Address, &c.Refused}[i-maxPlanes] = sum
		}
	}
	return c, nil
}
