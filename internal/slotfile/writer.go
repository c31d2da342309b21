package slotfile

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/plainfile"
	"github.com/fared/fared/internal/rdmadev"
	"github.com/fared/fared/internal/slotlayout"
)

// DefaultMode lets every user read the table.
const DefaultMode os.FileMode = 0o644

// ErrGone reports that the published file is no longer at its path.
var ErrGone = errors.New("the slot table was removed, or replaced by another program")

// InUseError reports that another process publishes at the path.
type InUseError struct{ Path string }

// Error names the path.
func (e *InUseError) Error() string {
	return e.Path + " is published by another fared: stop the other fared, or use another file"
}

// PairKey is a pair of addresses: a local and a remote loopback. IPv4 is written as ::ffff:a.b.c.d.
type PairKey struct{ Source, Destination [16]byte }

// Key returns the key of two addresses.
func Key(src, dst netip.Addr) PairKey { return PairKey{src.As16(), dst.As16()} }

// Pair is a pair's state. The vector is named by its number.
type Pair struct {
	PairKey
	Vector   uint32 // 0: none
	InEffect bool
	// Drain lists the slots that drain for this pair alone.
	Drain []uint16
}

// SubPort is a netdev of a plane.
type SubPort struct {
	Device string // at most 15 bytes
	Plane  int
}

// Source is a local loopback.
type Source struct {
	Address netip.Addr
	Group   int
}

// Service is a destination of flows: the number of an IP protocol, and a port.
type Service struct {
	Protocol uint8
	Port     uint16
}

// Range is a range of services of one protocol.
type Range struct {
	Protocol    uint8
	First, Last uint16
}

// Shape is the part of a table that is constant while a file exists.
type Shape struct {
	// Instance names the run of the process; at most 63 bytes are stored.
	Instance string
	Planes   []string // each at most 63 bytes
	SubPorts []SubPort
	Sources  []Source
	// Services have source ports in each pair; at most slotlayout.MaxServices. None means one service, which the table
	// does not name.
	Services []Service
	// Steered are ranges of services that have the source ports of the first service; at most slotlayout.MaxSteered.
	// None means that only Services have source ports.
	Steered []Range
	// MaxSlots is the greatest number of slots of a pair.
	MaxSlots int
	// Vectors and Pairs are the expected numbers of records. The file has room for more.
	Vectors, Pairs int
}

// Writer publishes a table at a path. Its methods are called by one goroutine.
type Writer struct {
	path string
	mode os.FileMode
	lock *os.File
	// shown is the file at the path, next the one that Publish will put there; both are nil before the first, and equal
	// between growths.
	shown, next *file
	// previous is the file of the process before, until the first Publish replaces it; nil without one.
	previous *file
	// numbers has the record of each vector.
	numbers map[uint32]uint32
	// users counts the pairs of each record of a vector.
	users []uint32
	// run and revision are the last used ones.
	run, revision uint64
	seed          func() uint64
	now           func() time.Time
	clock         func() uint64 // CLOCK_MONOTONIC, ns
}

// Open takes possession of a path. A table that a previous process has left there stays readable until the first
// Publish, and is marked as one without an owner. The directory is made (0755) if it is missing. A mode of 0 means
// DefaultMode.
func Open(path string, mode os.FileMode) (*Writer, error) {
	if mode == 0 {
		mode = DefaultMode
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of %s: %w", path, err)
	}
	lock, err := plainfile.Open(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := ignoringEINTR(func() error { return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) }); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &InUseError{path}
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	w := &Writer{path: path, mode: mode, lock: lock, seed: randomSeed, now: time.Now, clock: monotonic}
	if err := Guard(w.inherit); err != nil {
		lock.Close()
		return nil, err
	}
	return w, nil
}

// inherit continues the numbers of the table that is at the path, and marks the table as one without an owner.
func (w *Writer) inherit() error {
	old, err := mapped(w.path)
	if old == nil {
		return err
	}
	w.previous = old
	w.run, w.revision = old.h.Run, old.h.Revision
	old.mem.Store32(headerState, slotlayout.StateEnded)
	old.wake()
	return nil
}

// mapped maps the table at a path; nil means that there is none, or one that is truncated or of another version. A file
// that is not a table of this layout is an error otherwise: the path may be misspelled.
func mapped(path string) (*file, error) {
	fd, err := plainfile.Open(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("replace %s: %w", path, err)
	}
	defer fd.Close()
	info, err := fd.Stat()
	if err != nil {
		return nil, fmt.Errorf("inspect %s: %w", path, err)
	}
	size := info.Size()
	if !info.Mode().IsRegular() || size != 0 && size < int64(slotlayout.HeaderSize) {
		return nil, fmt.Errorf("%s exists and is not a slot table: move it away, or use another file", path)
	}
	if size == 0 {
		return nil, nil // truncated
	}
	mem, err := unix.Mmap(int(fd.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	old := &file{mem: mem, h: slotlayout.Memory(mem).Header()}
	var other *slotlayout.VersionError
	switch err := old.h.Check(uint64(size)); {
	case errors.As(err, &other), errors.Is(err, slotlayout.ErrTruncated):
		return nil, old.close()
	case err != nil:
		return nil, errors.Join(fmt.Errorf("%s exists: %w: move it away, or use another file", path, err), old.close())
	}
	return old, nil
}

// Supersede calls replace, which puts something else than a table of an ended process at a path, and marks the table
// that is there as replaced: its readers continue with the other one, those too that only look up. Whatever else is at
// the path has no readers to tell.
func Supersede(path string, replace func() error) error {
	var old *file
	Guard(func() (err error) { old, err = mapped(path); return err })
	err := replace()
	switch {
	case old == nil:
	case err != nil:
		old.close()
	default:
		Guard(func() error { return retire(old, slotlayout.StateReplaced) })
	}
	return err
}

// Guard runs fn, and returns an error if it accesses memory of a file that another program has truncated.
func Guard(fn func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = fmt.Errorf("the slot table was truncated: %w", r)
		default:
			panic(r)
		}
	}()
	return fn()
}

// Begin starts an empty file, which replaces the published one at the next Publish.
func (w *Writer) Begin(s Shape) error {
	h := slotlayout.Header{
		Seed: w.seed(), MaxSlots: uint32(s.MaxSlots), Services: uint32(len(s.Services)), Steered: uint32(len(s.Steered)), Planes: uint32(len(s.Planes)), SubPorts: uint32(len(s.SubPorts)), Sources: uint32(len(s.Sources)),
		Vectors: uint32(2*s.Vectors + 32), Pairs: uint32(s.Pairs + s.Pairs/4 + 64),
	}
	if len(s.Services) > slotlayout.MaxServices {
		return fmt.Errorf("%d services do not fit in a slot table: at most %d", len(s.Services), slotlayout.MaxServices)
	}
	if len(s.Steered) > slotlayout.MaxSteered {
		return fmt.Errorf("%d ranges of services do not fit in a slot table: at most %d", len(s.Steered), slotlayout.MaxSteered)
	}
	if s.MaxSlots > slotlayout.MaxSlots || len(s.SubPorts) >= slotlayout.NoSubPort || len(s.Planes) > 256 {
		return fmt.Errorf("%d slots, %d sub-ports and %d planes do not fit in a slot table", s.MaxSlots, len(s.SubPorts), len(s.Planes))
	}
	copy(h.Instance[:len(h.Instance)-1], s.Instance)
	f, err := w.create(h)
	if err != nil {
		return err
	}
	for i, name := range s.Planes {
		copy(f.mem[f.h.PlanesAt+uint64(i)*slotlayout.PlaneSize:][:slotlayout.PlaneSize-1], name)
	}
	for i, source := range s.Sources {
		at := f.h.SourcesAt + uint64(i)*slotlayout.SourceSize
		f.mem.SetBytes16(at, source.Address.As16())
		f.mem.Store32(at+16, uint32(source.Group))
	}
	for i, service := range s.Services {
		at := f.h.ServicesAt + uint64(i)*slotlayout.ServiceSize
		f.mem.Store32(at, uint32(service.Protocol))
		f.mem.Store32(at+4, uint32(service.Port))
	}
	for i, r := range s.Steered {
		at := f.h.SteeredAt + uint64(i)*slotlayout.RangeSize
		f.mem.Store64(at, slotlayout.Range{Protocol: uint32(r.Protocol), First: r.First, Last: r.Last}.Word())
	}
	for i, sp := range s.SubPorts {
		at := f.subPort(uint32(i))
		f.mem.Store32(at+4, uint32(sp.Plane))
		copy(f.mem[at+8:][:15], sp.Device)
		for source := range s.Sources {
			f.mem.Store32(at+slotlayout.SubPortSize+4*uint64(source), noGID)
		}
	}
	w.use(f)
	w.numbers, w.users = map[uint32]uint32{}, nil
	return nil
}

// noGID is slotlayout.NoGID as four bytes.
const noGID = 1<<32 + slotlayout.NoGID

// create makes a file next to the path.
func (w *Writer) create(h slotlayout.Header) (*file, error) {
	if h.Vectors > slotlayout.MaxRecords || h.Pairs > slotlayout.MaxRecords {
		return nil, fmt.Errorf("a slot table of %d vectors and %d pairs is too large: at most %d", h.Vectors, h.Pairs, slotlayout.MaxRecords)
	}
	h.IndexEntries = 4 // at least: no record has the number of IndexDeleted
	for h.IndexEntries < 2*h.Pairs {
		h.IndexEntries *= 2
	}
	h.Run = max(w.run+1, uint64(w.now().UnixNano()))
	w.run = h.Run
	if err := os.Remove(w.temporary()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove an incomplete slot table: %w", err)
	}
	return create(w.temporary(), w.mode, h)
}

// temporary returns the name of a file before its publication. The lock makes this process its only user.
func (w *Writer) temporary() string { return w.path + ".new" }

// use makes f the file to change.
func (w *Writer) use(f *file) {
	if w.next != nil && w.next != w.shown {
		w.next.close() // an error is impossible: the mapping is whole
	}
	w.next = f
}

// Change is a set of changes that readers may see in part, but each pair only in the state before or after.
type Change struct {
	// Revision is the StatusRevision of the state after the change.
	Revision uint64
	// Remove lists pairs to remove.
	Remove []PairKey
	// Vectors yields vectors to set; nil removes one, to which no pair points after the change. A vector that no pair
	// of the table uses is ignored.
	Vectors iter.Seq2[uint32, *Vector]
	// Pairs yields pairs to set; it is called twice. A pair whose ports change is among them, so those of a vector
	// whose places change.
	Pairs iter.Seq[*Pair]
	// Vector returns the state of the vector of one of Pairs, whose Vector is not 0.
	Vector func(p *Pair) *Vector
	// Ports returns the source ports of the slots of one of Pairs, whose Vector is not 0, for a service, an index of
	// Shape.Services, appended to buf; and their placement: an index of slotlayout.Placements.
	Ports func(p *Pair, service int, buf []uint16) ([]uint16, uint32)
	// KeepPorts means that a pair's ports have changed only if its places have: Ports is not called for a pair of the
	// table whose vector has the places of its present one.
	KeepPorts bool
}

// keepsPlaces reports whether a vector in a record has the places of v.
func (w *Writer) keepsPlaces(n uint32, v *Vector) bool {
	old, _ := w.next.vectorAt(n)
	return samePlaces(old.Slots, v.Slots)
}

// Apply changes the table. Readers see changes of a published file at once, and are notified by Publish. After an error
// the table is incomplete: call Abandon, or Begin.
func (w *Writer) Apply(c Change) error {
	for _, key := range c.Remove {
		if n, entry, ok := w.next.find(key); ok {
			w.leave(n)
			w.next.remove(n, entry, c.Revision)
		}
	}
	// A record of a vector changes in place only if none of its pairs changes too: a reader would see the one without
	// the other.
	touched := map[uint32]uint32{} // number of changed pairs by their present vector's record
	known := located{file: w.next}
	for p := range c.Pairs {
		n, _, ok := w.next.find(p.PairKey)
		if known.add(n, ok); ok {
			if v, ok := w.next.vectorOf(n); ok {
				touched[v]++
			}
		}
	}
	moved := map[uint32]uint32{} // records: from, to
	follow := false
	var deleted []uint32
	for id, v := range c.Vectors {
		n, ok := w.numbers[id]
		switch {
		case !ok:
		case v == nil:
			deleted = append(deleted, id)
		case touched[n] == 0 && w.keepsPlaces(n, v):
			w.next.setVector(n, id, v, c.Revision)
		default:
			to, err := w.newVector(id, v, c.Revision)
			if err != nil {
				return err
			}
			moved[n], follow = to, follow || w.users[n] > touched[n]
		}
	}
	if err := w.setPairs(c, &known); err != nil {
		return err
	}
	if follow {
		w.follow(moved, c.Revision)
	}
	for n := range moved {
		w.next.freeVector(n)
	}
	for _, id := range deleted {
		n := w.numbers[id]
		if w.users[n] != 0 {
			return fmt.Errorf("vector %d is removed, and %d pairs use it", id, w.users[n])
		}
		w.next.freeVector(n)
		delete(w.numbers, id)
	}
	w.next.mem.Store64(headerStatus, c.Revision)
	return nil
}

// leave counts a pair off the vector of its record.
func (w *Writer) leave(n uint32) {
	if v, ok := w.next.vectorOf(n); ok {
		w.users[v]--
	}
}

// newVector writes a vector to a free record.
func (w *Writer) newVector(id uint32, v *Vector, revision uint64) (uint32, error) {
	n, err := w.next.newVector()
	if errors.Is(err, errFull) {
		if err = w.grow(); err == nil {
			n, err = w.next.newVector()
		}
	}
	if err != nil {
		return 0, err
	}
	w.next.setVector(n, id, v, revision)
	w.numbers[id] = n
	for len(w.users) <= int(n) {
		w.users = append(w.users, 0)
	}
	return n, nil
}

// located has the records of a change's pairs in a file, in the order of Change.Pairs.
type located struct {
	file    *file
	records []uint32 // number plus 1; 0: none
}

func (l *located) add(n uint32, found bool) {
	if !found {
		l.records = append(l.records, 0)
		return
	}
	l.records = append(l.records, n+1)
}

// of returns the record of the i-th pair in a file, or false and the index entry to insert it at.
func (l *located) of(i int, f *file, key PairKey) (n uint32, entry uint64, ok bool) {
	if f != l.file || l.records[i] == 0 { // the file has grown; a pair may be named twice
		return f.find(key)
	}
	return l.records[i] - 1, 0, true
}

// setPairs sets the pairs of a change, whose records are known.
func (w *Writer) setPairs(c Change, known *located) error {
	state, old := w.next.newState(), w.next.newState()
	ports := portWriter{c: &c}
	i := 0
	for p := range c.Pairs {
		clear(state.drain)
		state.flags = slotlayout.PairUsed
		if err := w.setVectorOf(p, c, &state); err != nil {
			return err
		}
		n, entry, ok := known.of(i, w.next, p.PairKey)
		i++
		if ok {
			w.leave(n)
			w.next.state(n, &old)
		}
		ports.write(w.next, p, ok, &state, &old)
		if p.InEffect {
			state.flags |= slotlayout.PairInEffect
		}
		for _, slot := range p.Drain {
			if int(slot) < 64*len(state.drain) {
				state.drain[slot/64] |= 1 << (slot % 64)
			}
		}
		if !ok {
			if err := w.insert(p.PairKey, entry, &state, c.Revision); err != nil {
				return err
			}
		} else if !state.equal(&old) {
			w.next.setState(n, p.PairKey, &state, c.Revision)
		}
	}
	return nil
}

// setVectorOf sets the record of a pair's vector in a state, and counts its user.
func (w *Writer) setVectorOf(p *Pair, c Change, state *pairState) error {
	if state.vector = 0; p.Vector == 0 {
		return nil
	}
	n, ok := w.numbers[p.Vector]
	if !ok {
		var err error
		if n, err = w.newVector(p.Vector, c.Vector(p), c.Revision); err != nil {
			return err
		}
	}
	state.vector = n + 1
	w.users[n]++
	return nil
}

// insert adds a pair that the file does not have at an index entry.
func (w *Writer) insert(key PairKey, entry uint64, state *pairState, revision uint64) error {
	err := w.next.insert(key, entry, state, revision)
	if errors.Is(err, errFull) {
		if err = w.grow(); err == nil {
			_, entry, _ = w.next.find(key)
			err = w.next.insert(key, entry, state, revision)
		}
	}
	return err
}

// portWriter writes the ports of a change's pairs.
type portWriter struct {
	c   *Change
	buf []uint16
	// kept is whether the vectors of the records from and to, numbers plus 1, have the same places.
	from, to uint32
	kept     bool
}

// write sets the ports of a pair's state, whose vector is set; had means that old is the present state.
func (w *portWriter) write(f *file, p *Pair, had bool, state, old *pairState) {
	if had && w.keeps(f, old.vector, state.vector) {
		copy(state.ports, old.ports)
		state.placements = old.placements
		state.flags |= old.flags & (0xff << slotlayout.PlacementShift)
		return
	}
	clear(state.ports)
	if state.placements = 0; state.vector == 0 {
		return
	}
	for service := range max(f.h.Services, 1) {
		var placement uint32
		w.buf, placement = w.c.Ports(p, int(service), w.buf[:0])
		copy(state.ports[f.portsOf(service):][:f.h.MaxSlots], w.buf)
		if service == 0 {
			state.flags |= placement << slotlayout.PlacementShift
		} else {
			state.placements |= placement << (4 * (service - 1))
		}
	}
}

// keeps reports whether a pair keeps its ports when its vector's record changes, numbers plus 1.
func (w *portWriter) keeps(f *file, from, to uint32) bool {
	if !w.c.KeepPorts || from == 0 || to == 0 {
		return false
	}
	if from != w.from || to != w.to {
		w.from, w.to, w.kept = from, to, f.samePlaces(from-1, to-1)
	}
	return w.kept
}

// follow points the pairs of moved vectors to their records.
func (w *Writer) follow(moved map[uint32]uint32, revision uint64) {
	state := w.next.newState()
	for n := range w.next.h.Pairs {
		if !w.next.used(n) {
			continue
		}
		if v, ok := w.next.vectorOf(n); ok {
			if to, ok := moved[v]; ok {
				w.next.state(n, &state)
				state.vector = to + 1
				w.next.setState(n, w.next.keyOf(n), &state, revision)
				w.users[v]--
				w.users[to]++
			}
		}
	}
}

// grow copies the file to one with twice the records of the sections that are full. If only removed pairs fill the
// index, the sizes stay.
func (w *Writer) grow() error {
	h := w.next.h
	if w.next.vectors.full(h.Vectors) {
		h.Vectors *= 2
	}
	if w.next.h.UsedPairs == h.Pairs {
		h.Pairs *= 2
	}
	f, err := w.create(h)
	if err != nil {
		return err
	}
	f.h.UsedPairs, f.h.UsedVectors = 0, 0
	if err := f.copyFrom(w.next); err != nil {
		return errors.Join(err, f.close())
	}
	w.use(f)
	return nil
}

// RDMA is the RDMA device of a sub-port.
type RDMA struct {
	Device string // at most 63 bytes; empty: none
	Port   uint32
	// GIDs has the GID index of each source, slotlayout.NoGID if there is none.
	GIDs []int32
}

// RDMAOf returns the RDMA device of a sub-port whose netdev a port serves, with its GIDs of the sources; nil means
// none.
func RDMAOf(port *rdmadev.Port, netdev string, sources []netip.Addr) (r RDMA) {
	if port != nil {
		r.Device, r.Port = port.Device, uint32(port.Port)
	}
	for _, source := range sources {
		gid := int32(slotlayout.NoGID)
		if port != nil {
			if n, ok := port.GIDOf(source, netdev); ok {
				gid = int32(n)
			}
		}
		r.GIDs = append(r.GIDs, gid)
	}
	return r
}

// SetRDMA sets the RDMA device of a sub-port, and reports whether it has changed.
func (w *Writer) SetRDMA(subPort int, r RDMA) bool {
	f, at := w.next, w.next.subPort(uint32(subPort))
	words := slotlayout.SubPort{RDMAPort: r.Port}
	copy(words.RDMADevice[:len(words.RDMADevice)-1], r.Device)
	same := f.mem.Load32(at+subPortRDMAPort) == r.Port
	for i := 0; i < len(words.RDMADevice); i += 16 {
		same = same && f.mem.Bytes16(at+subPortRDMADevice+uint64(i)) == [16]byte(words.RDMADevice[i:])
	}
	gids := at + slotlayout.SubPortSize
	for i, gid := range r.GIDs {
		same = same && f.mem.Load32(gids+4*uint64(i)) == uint32(gid)
	}
	if same {
		return false
	}
	f.change(at, func() {
		f.mem.Store32(at+subPortRDMAPort, r.Port)
		for i := 0; i < len(words.RDMADevice); i += 16 {
			f.mem.SetBytes16(at+subPortRDMADevice+uint64(i), [16]byte(words.RDMADevice[i:]))
		}
		for i, gid := range r.GIDs {
			f.mem.Store32(gids+4*uint64(i), uint32(gid))
		}
	})
	return true
}

// Publish makes the changes known: it renames a file that is not at the path yet, counts a revision, and wakes the
// processes that wait.
func (w *Writer) Publish() error {
	f := w.next
	w.revision++
	f.mem.Store64(headerRevision, w.revision)
	if f == w.shown {
		f.wake()
		return nil
	}
	f.mem.Store64(headerHeartbeat, w.clock())
	f.mem.Store32(headerState, slotlayout.StateLive)
	if err := os.Rename(w.temporary(), w.path); err != nil {
		return fmt.Errorf("put the slot table at its path: %w", err)
	}
	old := cmp.Or(w.shown, w.previous)
	w.shown, w.previous = f, nil
	if old == nil {
		return nil
	}
	return retire(old, slotlayout.StateReplaced)
}

// retire releases a file after marking it.
func retire(f *file, state uint32) (err error) {
	defer func() { err = f.close() }() // also if the file was truncated
	f.mem.Store32(headerState, state)
	f.wake()
	return nil
}

// Beat advances the heartbeat of the published file. It returns ErrGone if the file is no longer at the path, or was
// truncated.
func (w *Writer) Beat() error {
	if w.shown == nil {
		return nil
	}
	w.shown.mem.Store64(headerHeartbeat, w.clock())
	var st unix.Stat_t
	if err := ignoringEINTR(func() error { return unix.Stat(w.path, &st) }); err != nil || idOf(&st) != w.shown.id || uint64(st.Size) < w.shown.h.Size {
		return ErrGone
	}
	return nil
}

// Abandon marks the published file as one without an owner, and drops the table; Begin starts another one.
func (w *Writer) Abandon() error {
	shown, next := w.shown, w.next
	w.shown, w.next, w.numbers = nil, nil, nil
	var errs []error
	if next != nil && next != shown {
		errs = append(errs, next.close(), os.Remove(w.temporary()))
	}
	if shown != nil {
		errs = append(errs, retire(shown, slotlayout.StateEnded))
	}
	return errors.Join(errs...)
}

// Close abandons the table, which stays at the path with its last state, and releases the path.
func (w *Writer) Close() error {
	err := errors.Join(Guard(w.Abandon), w.lock.Close())
	if w.previous != nil {
		err = errors.Join(err, w.previous.close())
		w.previous = nil
	}
	return err
}

// monotonic returns CLOCK_MONOTONIC in ns.
func monotonic() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // impossible: every Linux has this clock
	}
	return uint64(ts.Nano())
}
