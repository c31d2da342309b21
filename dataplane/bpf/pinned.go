package bpf

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// layoutVersion is the version of the meaning of the maps, apart from their shape.
const layoutVersion = 3

const (
	bpffs      = "/sys/fs/bpf"
	linkPin    = "link"
	programPin = "program"
	mapsPrefix = "maps-"
	// nextPin is the end of the names of the pins of a second instance, see lead.
	nextPin = "-next"
)

// pinned is the state that outlives the process, below Config.PinDir: the link, and a directory maps-<layout>-<number>
// with the program that the link runs and a file for each of its maps. Each process creates its own directory, complete
// before the link is switched to its program, and removes the others afterwards: the directory of the running program
// is always complete.
type pinned struct {
	dir     string   // of this process, below Config.PinDir
	lock    *os.File // of Config.PinDir, against SweepPins
	objects objects
	id      ebpf.ProgramID // of the program of this process
	link    link.Link
	// adopted is true if the maps are those of the program that was attached.
	adopted bool
	// switched is true if the attached program uses the maps in dir. After an agent of another layout it becomes true
	// in Settle.
	switched bool
	hooks    map[string]link.Link // by the name of the pin in dir; nil without programs at carriers
	unhooked string               // why
	carriers *ringbuf.Reader      // changes that the programs at carriers report; nil without them
	// announced is the program that reads the kernel's announcements instead; nil with programs at carriers.
	announced *ebpf.Program
	// elders are maps of other layouts, while a program that uses them may be attached.
	elders []elder
}

// objects are the steering program and all maps.
type objects struct {
	FaredSteer *ebpf.Program `ebpf:"fared_steer"`
	steerMaps
}

// openPinned loads the program for the anchor with the given interface index, and adopts existing state. An error
// leaves it unchanged.
func openPinned(cfg Config, anchor int) (_ *pinned, err error) {
	if err := mountPins(cfg.PinDir); err != nil {
		return nil, err
	}
	spec, err := steeringSpec(cfg)
	if err != nil {
		return nil, err
	}
	p := &pinned{}
	defer func() {
		if err != nil {
			if p.dir != "" && !p.switched {
				err = errors.Join(err, os.RemoveAll(p.dir))
			}
			err = errors.Join(err, p.close())
		}
	}()
	var replacements map[string]*ebpf.Map
	if err := p.hold(cfg.PinDir); err != nil {
		return nil, err
	}
	if p.link, err = oldLink(cfg.PinDir, anchor); err != nil {
		return nil, err
	}
	if p.link != nil {
		if replacements, err = p.find(cfg.PinDir, spec); err != nil {
			return nil, err
		}
	}
	p.adopted = replacements != nil
	err = spec.LoadAndAssign(&p.objects, &ebpf.CollectionOptions{MapReplacements: replacements})
	err = errors.Join(err, closeAll(replacements))
	if err != nil {
		return nil, fmt.Errorf("bpf: load the steering program: %w", err)
	}
	info, err := p.objects.FaredSteer.Info()
	if err != nil {
		return nil, fmt.Errorf("bpf: the steering program: %w", err)
	}
	p.id, _ = info.ID()
	if err := p.pin(cfg.PinDir, fingerprint(spec)); err != nil {
		return nil, err
	}
	if err := p.hook(spec); err != nil {
		return nil, err
	}
	switch {
	case p.link == nil:
		return p, p.attach(cfg.PinDir, anchor)
	case p.adopted:
		return p, p.switchOver()
	}
	p.elders, err = findElders(cfg.PinDir, p.dir)
	return p, err
}

// steeringSpec returns the program and its maps, in the configured sizes.
func steeringSpec(cfg Config) (*ebpf.CollectionSpec, error) {
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
	ring := spec.Maps[steerMapFaredCarriers]
	ring.MaxEntries = max(ring.MaxEntries, uint32(os.Getpagesize()))
	return spec, nil
}

// pin creates the directory with the program and maps of this process. BPF file systems cannot rename directories, so
// an incomplete directory is visible under its final name; it is ignored, because its program is not the attached one.
func (p *pinned) pin(dir, layout string) (err error) {
	if p.dir, err = os.MkdirTemp(dir, mapsPrefix+layout+"-"); err != nil {
		return fmt.Errorf("bpf: %w", err)
	}
	for name, m := range p.maps() {
		if err := m.Pin(filepath.Join(p.dir, name)); err != nil {
			return fmt.Errorf("bpf: pin map %s: %w", name, err)
		}
	}
	if err := p.objects.FaredSteer.Pin(filepath.Join(p.dir, programPin)); err != nil {
		return fmt.Errorf("bpf: pin the steering program: %w", err)
	}
	return nil
}

// pin is an object that can be pinned.
type pin interface {
	Pin(path string) error
	Unpin() error
}

// repin recreates missing pins, and returns their number.
func (p *pinned) repin(dir string) (n int, err error) {
	all := map[string]pin{filepath.Join(p.dir, programPin): p.objects.FaredSteer, filepath.Join(dir, linkPin): p.link}
	for name, m := range p.maps() {
		all[filepath.Join(p.dir, name)] = m
	}
	for name, l := range p.hooks {
		all[filepath.Join(p.dir, name)] = l
	}
	for path, object := range all {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if n++; n == 1 {
			if err := p.hold(dir); err != nil {
				return n, err
			}
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return n, fmt.Errorf("bpf: %w", err)
		}
		if err := errors.Join(object.Unpin(), object.Pin(path)); err != nil {
			return n, fmt.Errorf("bpf: pin %s: %w", path, err)
		}
	}
	return n, nil
}

// lasting yields the names and the maps of spec that are pinned and adopted, in order.
func lasting(spec *ebpf.CollectionSpec) iter.Seq2[string, *ebpf.MapSpec] {
	return func(yield func(string, *ebpf.MapSpec) bool) {
		for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
			if name != steerMapFaredCarriers && !yield(name, spec.Maps[name]) {
				return
			}
		}
	}
}

// fingerprint identifies a layout: the shapes of the maps and the version of their meaning.
func fingerprint(spec *ebpf.CollectionSpec) string {
	h := fnv.New64a()
	fmt.Fprintln(h, layoutVersion)
	for name, m := range lasting(spec) {
		fmt.Fprintln(h, name, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags)
	}
	return fmt.Sprintf("%016x", h.Sum64())
}

// hold creates the directory for pins, and locks it until close: another agent that starts while the anchor is missing
// must not remove the pins.
func (p *pinned) hold(dir string) error {
	for {
		if p.lock != nil {
			_ = p.lock.Close() // of a directory that another program removed
		}
		err := os.MkdirAll(dir, 0o700)
		if err == nil {
			p.lock, err = os.Open(dir)
		}
		if err == nil {
			err = flock(p.lock, unix.LOCK_SH) // SweepPins keeps its lock for a moment
		}
		if err == nil && same(p.lock, dir) {
			return nil
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("bpf: %w", err)
		}
	}
}

// flock locks a directory (flock(2)).
func flock(dir *os.File, how int) error {
	for {
		if err := unix.Flock(int(dir.Fd()), how); err != unix.EINTR {
			return err
		}
	}
}

// same reports whether a path still leads to an open directory.
func same(open *os.File, path string) bool {
	here, err := open.Stat()
	there, gone := os.Stat(path)
	return err == nil && gone == nil && os.SameFile(here, there)
}

// mountPins ensures that the directory for pins will be in a BPF file system.
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
	return nil
}

// oldLink opens the pinned link if it is attached to the anchor, or returns nil. It removes a link of another or
// deleted device.
func oldLink(dir string, anchor int) (link.Link, error) {
	path := filepath.Join(dir, linkPin)
	if err := os.Rename(path+nextPin, path); err != nil && !errors.Is(err, fs.ErrNotExist) { // the previous process ended in lead
		return nil, fmt.Errorf("bpf: %w", err)
	}
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

// find opens the maps of the attached program, or returns nil if they have another layout or the directory is missing.
// Any other failure to open a pin is an error, because the attached program is then unknown.
func (p *pinned) find(dir string, spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	info, err := p.link.Info()
	if err != nil {
		return nil, fmt.Errorf("bpf: the pinned link: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if !strings.HasPrefix(e.Name(), mapsPrefix+fingerprint(spec)+"-") {
			continue
		}
		for _, name := range []string{programPin, programPin + nextPin} {
			if id, err := pinnedProgram(filepath.Join(path, name)); err != nil {
				return nil, err
			} else if id == info.Program && id != 0 {
				return openMaps(path, spec)
			}
		}
	}
	return nil, nil
}

// pinnedProgram returns the kernel's id of a pinned program, or 0 if there is no pin.
func pinnedProgram(path string) (ebpf.ProgramID, error) {
	program, err := ebpf.LoadPinnedProgram(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("bpf: open the program %s: %w", path, err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return 0, fmt.Errorf("bpf: the program %s: %w", path, err)
	}
	id, _ := info.ID()
	return id, nil
}

// openMaps opens all maps of a directory, or returns nil if one is missing or incompatible.
func openMaps(dir string, spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	found := map[string]*ebpf.Map{}
	for name, want := range lasting(spec) {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if err == nil {
			found[name] = m
			err = want.Compatible(m)
		}
		if err == nil {
			continue
		}
		closed := closeAll(found)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, ebpf.ErrMapIncompatible) {
			return nil, closed
		}
		return nil, errors.Join(fmt.Errorf("bpf: open map %s in %s: %w", name, dir, err), closed)
	}
	return found, nil
}

func closeAll(all map[string]*ebpf.Map) (err error) {
	for _, m := range all {
		err = errors.Join(err, m.Close())
	}
	return err
}

func (p *pinned) maps() map[string]*ebpf.Map {
	o := &p.objects
	return map[string]*ebpf.Map{
		steerMapFaredDark: o.FaredDark, steerMapFaredDests: o.FaredDests, steerMapFaredDevices: o.FaredDevices, steerMapFaredDrops: o.FaredDrops, steerMapFaredGroups: o.FaredGroups,
		steerMapFaredNames: o.FaredNames, steerMapFaredSources: o.FaredSources, steerMapFaredLive: o.FaredLive, steerMapFaredPins: o.FaredPins, steerMapFaredPlaces: o.FaredPlaces,
		steerMapFaredPlanes: o.FaredPlanes, steerMapFaredPorts: o.FaredPorts, steerMapFaredSent: o.FaredSent,
		steerMapFaredSettings: o.FaredSettings, steerMapFaredSlots: o.FaredSlots, steerMapFaredTables: o.FaredTables,
		steerMapFaredTurns: o.FaredTurns,
	}
}

// attach attaches the program to the anchor, in front of others. The caller is in its network namespace.
func (p *pinned) attach(dir string, anchor int) error {
	l, err := link.AttachTCX(link.TCXOptions{Interface: anchor, Program: p.objects.FaredSteer, Attach: ebpf.AttachTCXEgress, Anchor: link.Head()})
	if err != nil {
		return fmt.Errorf("bpf: attach the steering program: %w", err)
	}
	if err := errors.Join(p.hold(dir), l.Pin(filepath.Join(dir, linkPin))); err != nil {
		return errors.Join(fmt.Errorf("bpf: pin the link: %w", err), l.Close())
	}
	p.link, p.switched = l, true
	return p.sweep(dir)
}

// switchOver makes the attached link run the program and maps of this process, between two packets.
func (p *pinned) switchOver() error {
	if err := p.link.Update(p.objects.FaredSteer); err != nil {
		return fmt.Errorf("bpf: replace the steering program: %w", err)
	}
	p.switched = true
	return p.sweep(filepath.Dir(p.dir))
}

// sweep removes the directories of programs that are no longer attached.
func (p *pinned) sweep(dir string) error {
	for _, e := range p.elders {
		if err := e.close(); err != nil {
			return fmt.Errorf("bpf: %w", err)
		}
	}
	p.elders = nil
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

// close closes all descriptors; pinned state stays.
func (p *pinned) close() (err error) {
	if p.lock != nil {
		err = p.lock.Close()
	}
	if p.link != nil {
		err = errors.Join(err, p.link.Close())
	}
	for _, l := range p.hooks {
		err = errors.Join(err, l.Close())
	}
	if p.carriers != nil {
		err = errors.Join(err, p.carriers.Close()) // a second Close does nothing
	}
	if p.announced != nil {
		err = errors.Join(err, p.announced.Close())
	}
	if p.objects.FaredCarriers != nil {
		err = errors.Join(err, p.objects.FaredCarriers.Close())
	}
	for _, e := range p.elders {
		err = errors.Join(err, e.close())
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

// unpin detaches the program, removes the pins below dir, and removes dir if it is then empty.
func unpin(dir string) error {
	for _, name := range []string{linkPin, linkPin + nextPin} {
		path := filepath.Join(dir, name)
		l, err := link.LoadPinnedLink(path, nil)
		switch {
		case err == nil:
			detached := l.Detach()
			if errors.Is(detached, unix.ENOLINK) {
				detached = nil // its device was deleted
			}
			err = errors.Join(detached, l.Unpin(), l.Close())
		case errors.Is(err, fs.ErrNotExist):
			err = nil
		}
		if err != nil {
			return fmt.Errorf("bpf: remove the link %s: %w", path, err)
		}
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

// SweepPins removes the directories DIR-NUMBER, which agents of other network namespaces have by default, whose
// namespace or anchor is gone and which no agent uses: no agent can adopt their pins, which hold the memory of all
// maps. It returns the removed directories. A directory without a link may belong to an agent that is starting, and
// stays.
func SweepPins(dir string) (removed []string, err error) {
	found, _ := filepath.Glob(dir + "-*") // the pattern is valid
	for _, path := range found {
		if _, failed := strconv.ParseUint(strings.TrimPrefix(path, dir+"-"), 10, 64); failed != nil {
			continue
		}
		gone, failed := sweepPins(path)
		if err = errors.Join(err, failed); gone {
			removed = append(removed, path)
		}
	}
	return removed, err
}

// sweepPins removes the pins of a directory, unless it is used or may be.
func sweepPins(dir string) (removed bool, err error) {
	lock, err := os.Open(dir)
	if err != nil {
		return false, nil // another agent removed it
	}
	defer lock.Close()
	if flock(lock, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return false, nil // an agent uses it
	}
	l, err := link.LoadPinnedLink(filepath.Join(dir, linkPin), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("bpf: open the pinned link in %s: %w", dir, err)
	}
	info, failed := l.Info()
	err = l.Close()
	if failed != nil || info.TCX() == nil || info.TCX().Ifindex != 0 { // the kernel clears the index with the device
		return false, err
	}
	failed = unpin(dir)
	return failed == nil, errors.Join(err, failed)
}
