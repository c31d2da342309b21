package bpf

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// Names of the pins of the links to the kernel's functions that set and clear a carrier, next to the maps that the
// programs write.
const (
	carrierOffPin = "carrier-off"
	carrierOnPin  = "carrier-on"
)

// hook attaches the programs that keep places without a carrier out of the steering from the moment at which the kernel
// has cleared the carrier, and that report each change to carriers. Without them, the agent does so when it receives
// the event. They outlive the process like the steering program. A kernel that refuses them (no type information in
// /sys/kernel/btf/vmlinux, no tracing) is not an error: unhooked has the reason.
func (p *pinned) hook(spec *ebpf.CollectionSpec) (err error) {
	var programs struct {
		Off *ebpf.Program `ebpf:"fared_carrier_off"`
		On  *ebpf.Program `ebpf:"fared_carrier_on"`
	}
	err = spec.LoadAndAssign(&programs, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		steerMapFaredDark: p.objects.FaredDark, steerMapFaredDevices: p.objects.FaredDevices, steerMapFaredCarriers: p.objects.FaredCarriers,
	}})
	if err == nil {
		defer func() { err = errors.Join(err, programs.Off.Close(), programs.On.Close()) }()
		p.hooks = map[string]link.Link{}
		for name, program := range map[string]*ebpf.Program{carrierOffPin: programs.Off, carrierOnPin: programs.On} {
			var l link.Link
			if l, err = link.AttachTracing(link.TracingOptions{Program: program}); err != nil {
				break
			}
			p.hooks[name] = l
			if err = l.Pin(filepath.Join(p.dir, name)); err != nil {
				break
			}
		}
	}
	if err == nil {
		if p.carriers, err = ringbuf.NewReader(p.objects.FaredCarriers); err != nil {
			return fmt.Errorf("bpf: watch carriers in the kernel: %w", err)
		}
		return nil
	}
	for _, l := range p.hooks {
		_ = l.Unpin() // it may have no pin
		err = errors.Join(err, l.Close())
	}
	p.hooks = nil
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("bpf: watch carriers in the kernel: %w", err)
	}
	p.unhooked = err.Error()
	return p.announce(spec)
}

// announce loads the program that marks the places of a failed link when the kernel sends the event to the agent
// (kernel.listen). It ends with the process.
func (p *pinned) announce(spec *ebpf.CollectionSpec) error {
	var programs struct {
		Announced *ebpf.Program `ebpf:"fared_announced"`
	}
	err := spec.LoadAndAssign(&programs, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		steerMapFaredDark: p.objects.FaredDark, steerMapFaredDevices: p.objects.FaredDevices, steerMapFaredSettings: p.objects.FaredSettings,
	}})
	if err != nil {
		return fmt.Errorf("bpf: watch announced carriers in the kernel: %w", err)
	}
	p.announced = programs.Announced
	return nil
}

// notice requests the carriers after each change that the programs of hook report, until their reader is closed.
func (s *Steering) notice() {
	carriers, watch := s.have.pinned.carriers, s.kernel.watch
	var change ringbuf.Record
	for {
		err := carriers.ReadInto(&change)
		if errors.Is(err, ringbuf.ErrClosed) {
			return
		}
		if err != nil {
			watch.Cover(false)
			s.cfg.Log.Error("steering: cannot read changes of carriers; they are polled", "err", err)
			return
		}
		if change.Remaining == 0 {
			s.changes.Add(1)
			watch.Start()
		}
	}
}

// light removes the marks of dark places whose device has its carrier, which a deleted device or a missing program
// leaves behind. live are the places that are usable otherwise, by the number of the source group. The marks may be
// newer than the known links, so the kernel is queried. A program that changes the same word at this instant can undo
// this or be undone; the next check repairs it.
func (k *kernel) light(live *[maxSources]steerLive) error {
	var marked []int // counted over all source groups
	indexes := map[int]bool{}
	for number := range live {
		wanted := live[number].V4 | live[number].V6
		if wanted == 0 {
			continue
		}
		dark, err := k.dark(number)
		if err != nil {
			return err
		}
		for place := range maxPlaces {
			if at := number*maxPlaces + place; dark&wanted>>place&1 != 0 {
				marked = append(marked, at)
				indexes[int(k.have.places.have[at].Ifindex)] = true
			}
		}
	}
	if err := k.keepUsable(indexes); err != nil {
		return err
	}
	for _, at := range marked {
		if !indexes[int(k.have.places.have[at].Ifindex)] {
			continue
		}
		number := at / maxPlaces
		dark, err := k.dark(number)
		if err != nil {
			return err
		}
		if err := k.have.pinned.objects.FaredDark.Put(uint32(number), dark&^(1<<(at%maxPlaces))); err != nil {
			return fmt.Errorf("bpf: write the dark places: %w", err)
		}
	}
	return nil
}

// keepUsable removes the devices without a carrier, or that are gone, by the kernel's answer.
func (k *kernel) keepUsable(indexes map[int]bool) error {
	for index := range indexes {
		links, err := k.have.routes.conn.LinksByIndex([]int{index})
		if err != nil {
			return fmt.Errorf("bpf: %w", err)
		}
		if len(links) == 0 || !links[0].Usable() {
			delete(indexes, index)
		}
	}
	return nil
}

// dark returns the dark places of a source group.
func (k *kernel) dark(number int) (places uint64, err error) {
	if err := k.have.pinned.objects.FaredDark.Lookup(uint32(number), &places); err != nil {
		return 0, fmt.Errorf("bpf: read the dark places: %w", err)
	}
	return places, nil
}
