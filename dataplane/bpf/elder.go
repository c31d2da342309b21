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

// elder is the part of an older program's maps that has the same meaning in all layouts: the live places, and the
// places. While such a program is attached, failed links are removed from its maps too.
type elder struct {
	live   arrayMap[steerLive]
	places arrayMap[steerPlace]
	maps   [2]*ebpf.Map // of live and places
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
	if e.maps[0], err = ebpf.LoadPinnedMap(filepath.Join(dir, steerMapFaredLive), nil); err == nil {
		e.maps[1], err = ebpf.LoadPinnedMap(filepath.Join(dir, steerMapFaredPlaces), nil)
	}
	switch live, places := e.maps[0], e.maps[1]; {
	case errors.Is(err, fs.ErrNotExist):
		return elder{}, false, e.close()
	case err != nil:
		return elder{}, false, errors.Join(fmt.Errorf("bpf: open the maps in %s: %w", dir, err), e.close())
	case live.ValueSize() != 16 || places.ValueSize() != 64 || places.MaxEntries() != maxPlaces*live.MaxEntries():
		return elder{}, false, e.close()
	}
	e.live.kernel, e.places.kernel = e.maps[0], e.maps[1]
	if err := errors.Join(e.live.read(), e.places.read()); err != nil {
		return elder{}, false, errors.Join(err, e.close())
	}
	return e, true, nil
}

func (e elder) close() (err error) {
	for _, m := range e.maps {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
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
