package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
)

// elder is the part of an older program's maps that has the same meaning in all layouts: the live places, and the places.
// While such a program is attached, failed links are removed from its maps too.
type elder struct {
	live   cells[steerLive]
	places cells[steerPlace]
}

// findElders opens the maps in all directories except ours. Maps of another shape are ignored.
func findElders(dir, ours string) (found []elder, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("bpf: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if !strings.HasPrefix(e.Name(), mapsPrefix) || path == ours {
			continue
		}
		one, ok, err := openElder(path)
		if err != nil {
			for _, e := range found {
				err = errors.Join(err, e.close())
			}
			return nil, err
		}
		if ok {
			found = append(found, one)
		}
	}
	return found, nil
}

func openElder(dir string) (e elder, ok bool, err error) {
	if e.live.kernel, err = ebpf.LoadPinnedMap(filepath.Join(dir, steerMapFaredLive), nil); err == nil {
		e.places.kernel, err = ebpf.LoadPinnedMap(filepath.Join(dir, steerMapFaredPlaces), nil)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return elder{}, false, e.close()
	case err != nil:
		return elder{}, false, errors.Join(fmt.Errorf("bpf: open the maps in %s: %w", dir, err), e.close())
	case e.live.kernel.ValueSize() != 16 || e.places.kernel.ValueSize() != 64 || e.places.kernel.MaxEntries() != maxPlaces*e.live.kernel.MaxEntries():
		return elder{}, false, e.close()
	}
	if err := errors.Join(e.live.read(), e.places.read()); err != nil {
		return elder{}, false, errors.Join(err, e.close())
	}
	return e, true, nil
}

func (e elder) close() (err error) {
	for _, m := range []*ebpf.Map{e.live.kernel, e.places.kernel} {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	return err
}

// keepLive makes exactly those places live whose device is usable, based on the maps alone.
func keepLive(live *cells[steerLive], places []steerPlace, usable func(steerPlace) bool) (err error) {
	for block := range live.have {
		mask := live.have[block]
		for i, p := range places[block*maxPlaces : (block+1)*maxPlaces] {
			if text(p.Device[:]) == "" {
				continue
			}
			mask.set(i, 0)
			if usable(p) {
				mask.set(i, p.Flags)
			}
		}
		err = errors.Join(err, live.set(block, mask))
	}
	return err
}

// set makes a place live for the families of its next hops: an IPv6 next hop carries both. Without flags it is live for
// none.
func (l *steerLive) set(place int, flags uint32) {
	bit := uint64(1) << place
	l.V4, l.V6 = l.V4&^bit, l.V6&^bit
	if flags&(placeNextHop4|placeNextHop6) != 0 {
		l.V4 |= bit
	}
	if flags&placeNextHop6 != 0 {
		l.V6 |= bit
	}
}
