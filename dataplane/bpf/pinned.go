package bpf

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Version of the meaning of the maps, apart from their shape.
const layoutVersion = 1

const (
	bpffs      = "/sys/fs/bpf"
	linkPin    = "link"
	mapsPrefix = "maps-"
)

// pinned is what outlives the process, below Config.PinDir: link, and maps-<layout> with a file for each map.
type pinned struct {
	dir     string // of the maps
	objects steerObjects
	link    link.Link
	// adopted: the maps were there, and the attached program uses them.
	adopted bool
	// switched: the attached program uses our maps. Not before Settle when an agent of another layout left its own.
	switched bool
}

// openPinned loads the program for the anchor, whose interface index is given, adopting what is there.
func openPinned(cfg Config, anchor int) (_ *pinned, err error) {
	if err := mountPins(cfg.PinDir); err != nil {
		return nil, err
	}
	spec, err := loadSteer()
	if err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	for name, size := range map[string]int{
		steerMapFaredGroups: cfg.MaxGroups, steerMapFaredDests: cfg.MaxDestinations, steerMapFaredPins: cfg.MaxPairs,
		steerMapFaredTables: cfg.MaxPairs, steerMapFaredSlots: cfg.MaxSlotCounters,
	} {
		spec.Maps[name].MaxEntries = uint32(size)
	}
	p := &pinned{dir: filepath.Join(cfg.PinDir, mapsPrefix+fingerprint(spec))}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	var replacements map[string]*ebpf.Map
	if p.link, err = oldLink(cfg.PinDir, anchor); err != nil {
		return nil, err
	}
	if p.link != nil {
		replacements = p.find(spec)
	}
	p.adopted = replacements != nil
	if !p.adopted {
		if err := os.RemoveAll(p.dir); err != nil {
			return nil, fmt.Errorf("bpf: %w", err)
		}
	}
	err = spec.LoadAndAssign(&p.objects, &ebpf.CollectionOptions{MapReplacements: replacements})
	for _, m := range replacements {
		err = errors.Join(err, m.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: load the steering program: %w", err)
	}
	if !p.adopted {
		if err := os.MkdirAll(p.dir, 0o700); err != nil {
			return nil, fmt.Errorf("bpf: %w", err)
		}
		for name, m := range p.maps() {
			if err := m.Pin(filepath.Join(p.dir, name)); err != nil {
				return nil, fmt.Errorf("bpf: pin map %s: %w", name, err)
			}
		}
	}
	switch {
	case p.link == nil:
		return p, p.attach(cfg.PinDir, anchor)
	case p.adopted:
		return p, p.switchOver()
	}
	return p, nil
}

// fingerprint names a layout: the maps' shapes and what they mean.
func fingerprint(spec *ebpf.CollectionSpec) string {
	h := fnv.New64a()
	fmt.Fprintln(h, layoutVersion)
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		m := spec.Maps[name]
		fmt.Fprintln(h, name, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags)
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

// mountPins makes the directory for pins, in a BPF file system.
func mountPins(dir string) error {
	isBPF := func(dir string) bool {
		var st unix.Statfs_t
		return unix.Statfs(dir, &st) == nil && st.Type == unix.BPF_FS_MAGIC
	}
	parent := dir
	for {
		if _, err := os.Stat(parent); err == nil || parent == filepath.Dir(parent) {
			break
		}
		parent = filepath.Dir(parent)
	}
	if !isBPF(parent) {
		if dir != bpffs && !strings.HasPrefix(dir, bpffs+"/") {
			return fmt.Errorf("bpf: %s is in no BPF file system; mount one with `mount -t bpf bpf DIRECTORY`, or use a directory below %s", dir, bpffs)
		}
		if err := unix.Mount("bpf", bpffs, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
			return fmt.Errorf("bpf: mount the BPF file system on %s: %w", bpffs, err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	return nil
}

// oldLink opens the pinned link when it still sits on the anchor; nil: there is none. One of a device that is gone is removed.
func oldLink(dir string, anchor int) (link.Link, error) {
	path := filepath.Join(dir, linkPin)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("bpf: open the pinned link %s: %w", path, err)
	}
	info, err := l.Info()
	if err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == anchor {
		return l, nil
	}
	return nil, errors.Join(l.Unpin(), l.Close())
}

// find opens the pinned maps, nil unless all are there, fit, and are those of the attached program.
func (p *pinned) find(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	info, err := p.link.Info()
	if err != nil {
		return nil
	}
	program, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil
	}
	defer program.Close()
	details, err := program.Info()
	if err != nil {
		return nil
	}
	used, _ := details.MapIDs()
	found := map[string]*ebpf.Map{}
	for name, want := range spec.Maps {
		m, err := ebpf.LoadPinnedMap(filepath.Join(p.dir, name), nil)
		if err == nil {
			found[name] = m
			if err = want.Compatible(m); err == nil && !slices.Contains(used, mapID(m)) {
				err = errors.New("not the attached program's")
			}
		}
		if err != nil {
			for _, m := range found {
				_ = m.Close()
			}
			return nil
		}
	}
	return found
}

// mapID is the kernel's number of a map, 0 when it does not say.
func mapID(m *ebpf.Map) ebpf.MapID {
	info, err := m.Info()
	if err != nil {
		return 0
	}
	id, _ := info.ID()
	return id
}

func (p *pinned) maps() map[string]*ebpf.Map {
	o := &p.objects
	return map[string]*ebpf.Map{
		steerMapFaredDests: o.FaredDests, steerMapFaredDrops: o.FaredDrops, steerMapFaredGroups: o.FaredGroups,
		steerMapFaredLive: o.FaredLive, steerMapFaredPins: o.FaredPins, steerMapFaredPlaces: o.FaredPlaces,
		steerMapFaredPlanes: o.FaredPlanes, steerMapFaredPorts: o.FaredPorts, steerMapFaredSent: o.FaredSent,
		steerMapFaredSettings: o.FaredSettings, steerMapFaredSlots: o.FaredSlots, steerMapFaredTables: o.FaredTables,
		steerMapFaredTurns: o.FaredTurns,
	}
}

// attach puts the program on the anchor. The caller is in its network namespace.
func (p *pinned) attach(dir string, anchor int) error {
	l, err := link.AttachTCX(link.TCXOptions{Interface: anchor, Program: p.objects.FaredSteer, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		return fmt.Errorf("bpf: attach the steering program: %w", err)
	}
	if err := l.Pin(filepath.Join(dir, linkPin)); err != nil {
		return errors.Join(fmt.Errorf("bpf: pin the link: %w", err), l.Close())
	}
	p.link, p.switched = l, true
	return p.sweep(dir)
}

// switchOver lets the attached link run our program on our maps, between two packets.
func (p *pinned) switchOver() error {
	if err := p.link.Update(p.objects.FaredSteer); err != nil {
		return fmt.Errorf("bpf: replace the steering program: %w", err)
	}
	p.switched = true
	return p.sweep(filepath.Dir(p.dir))
}

// sweep removes the maps of other layouts.
func (p *pinned) sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	for _, e := range entries {
		if path := filepath.Join(dir, e.Name()); strings.HasPrefix(e.Name(), mapsPrefix) && path != p.dir {
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("bpf: %w", err)
			}
		}
	}
	return nil
}

// close lets go of everything; what is pinned stays.
func (p *pinned) close() (err error) {
	if p.link != nil {
		err = p.link.Close()
	}
	for _, m := range p.maps() {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	if p.objects.FaredSteer != nil {
		err = errors.Join(err, p.objects.FaredSteer.Close())
	}
	return err
}

// unpin detaches the program and removes what is pinned below dir, and dir when it is then empty.
func unpin(dir string) error {
	path := filepath.Join(dir, linkPin)
	l, err := link.LoadPinnedLink(path, nil)
	switch {
	case err == nil:
		detached := l.Detach()
		if errors.Is(detached, unix.ENOLINK) {
			detached = nil // its device is gone
		}
		err = errors.Join(detached, l.Unpin(), l.Close())
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	if err != nil {
		return fmt.Errorf("bpf: remove the link %s: %w", path, err)
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	left := len(entries)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), mapsPrefix) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("bpf: %w", err)
			}
			left--
		}
	}
	if left == 0 {
		if err := os.Remove(dir); err != nil {
			return fmt.Errorf("bpf: %w", err)
		}
	}
	return nil
}
