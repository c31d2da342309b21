package slots

import (
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/slotlayout"
)

// DefaultPath is the path of the table that fared publishes with the shipped unit.
const DefaultPath = "/run/fared/table/slots"

// Errors of the package. Open returns a *LayoutError for a table of another layout.
var (
	// ErrNoTable means that there is no file at the path: fared has not published a table yet.
	ErrNoTable = errors.New("no slot table")
	// ErrNotFound means that the table does not have the pair.
	ErrNotFound = errors.New("the slot table has no such pair")
	// ErrBusy means that the record changed during every attempt to read it, or that its writer stopped in the middle
	// of a change. Retry later, and use the last result meanwhile.
	ErrBusy = errors.New("the slot table's record is being changed")
	// ErrService means that the table has no source ports for the service of OpenFor: it is neither among
	// Table.Services nor in a range of Table.Steered.
	ErrService = errors.New("the slot table has no source ports for the service")
	// ErrStale means that nothing has updated the table for a minute: fared does not run, or cannot publish, or its
	// start takes longer.
	ErrStale = errors.New("nothing has updated the slot table for a minute: see 'fared health' on the host")
	// ErrDeleted means that the file or its directory was deleted while it is mounted here, as in a container: no later
	// table appears at the path.
	ErrDeleted = errors.New("the directory of the slot table was deleted after it was mounted here, so that no later table appears: restart the container, with the directory mounted and not the file")
	// ErrFormat means that the file is not a slot table.
	ErrFormat = slotlayout.ErrFormat
	// ErrTruncated means that the file is shorter than its header states.
	ErrTruncated = slotlayout.ErrTruncated
)

// LayoutError reports a table of another layout than this package reads.
type LayoutError = slotlayout.VersionError

// Placement is the method by which the source ports of a pair were chosen.
type Placement uint8

// The placements, as in fare.v1.PairSlots.port_placement.
const (
	Uniform = Placement(slotlayout.PlacementUniform) // evenly spread: the hash of the data plane is unknown
	Hash    = Placement(slotlayout.PlacementHash)    // each port lands on the slot's sub-port by a known hash
	None    = Placement(slotlayout.PlacementNone)    // the addressing needs no distinct ports
	Asked   = Placement(slotlayout.PlacementAsked)   // each port lands on the slot's sub-port by the data plane's answer
)

// String returns the word of the API: "uniform", "hash", "none" or "asked".
func (p Placement) String() string {
	if int(p) < len(slotlayout.Placements) {
		return slotlayout.Placements[p]
	}
	return fmt.Sprintf("placement %d", uint8(p))
}

// State is the state of a table's file.
type State uint32

// The states.
const (
	Live     = State(slotlayout.StateLive)     // the table has an owner while its heartbeat advances
	Ended    = State(slotlayout.StateEnded)    // the owner has ended; the table has its last state
	Replaced = State(slotlayout.StateReplaced) // another file at the path replaces this one
)

// String returns "live", "ended" or "replaced".
func (s State) String() string {
	switch s {
	case Live:
		return "live"
	case Ended:
		return "ended"
	case Replaced:
		return "replaced"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// Slot is a queue pair slot of a pair.
type Slot struct {
	// Plane is an index of Table.Planes.
	Plane int
	// SubPort is an index of Table.SubPorts, or -1 if packets are sprayed over the plane.
	SubPort int
	// Share is in parts per billion of the pair's traffic. The shares of a reachable pair sum to exactly 1,000,000,000.
	Share uint32
	// SourcePort is the UDP or TCP source port of the slot's packets, 49152 to 65535.
	SourcePort uint16
	// Parked slots send nothing; their share is 0.
	Parked bool
	// Drain means that the slot has lost addresses to other slots. Transactions of these addresses may start there only
	// when every transaction outstanding on this slot is complete (draft-xu-rtgwg-fare-in-sun-02, Section 4).
	Drain bool
	// InEffect means that the data plane forwards by the weight of the slot's plane.
	InEffect bool
	// Wrong means that probes by the slot's sub-port toward some destination are lost or go another way: see 'fared
	// health' on the host.
	Wrong bool
}

// Pair is the state of a pair at one moment.
type Pair struct {
	Source, Destination netip.Addr
	// Revision is the revision of fare.v1.WeightService at the last change of the pair or of its weights.
	Revision uint64
	// Vector is the number of the weight vector; 0: none.
	Vector uint32
	// Reachable means that a plane has capacity toward the destination.
	Reachable bool
	// InEffect means that the data plane forwards by the weights of every plane.
	InEffect bool
	// Owned means that a process maintained the table at its last heartbeat or change of state. Table.Status also
	// judges the age of the heartbeat.
	Owned     bool
	Placement Placement
	Slots     []Slot

	from *mapping
	// The records and their sequence numbers at the time of reading; vector is 0 without one.
	record, sequence, vector, vectorSequence uint32
}

// SubPort is a netdev of a plane.
type SubPort struct {
	Device string
	Plane  int
	// RDMADevice and RDMAPort are the RDMA device of the netdev and its port, from 1; empty and 0 if it has none.
	RDMADevice string
	RDMAPort   int
	// GIDs has, for each of Table.Sources, the index in the port's GID table of the RoCEv2 GID of the source, or -1.
	GIDs []int
}

// Status is the state of the table as a whole.
type Status struct {
	// Instance names the run of fared; it is the instance of fare.v1.WatchWeightsResponse.
	Instance string
	// Run is the number of the file: it increases when another file replaces it.
	Run uint64
	// Revision counts publications. StatusRevision is the revision of fare.v1.WeightService up to which the table is
	// current.
	Revision, StatusRevision uint64
	State                    State
	// HeartbeatAge is the time since the owner's last heartbeat. It is negative for a table of an earlier boot of the
	// machine.
	HeartbeatAge time.Duration
	// Live means that fared maintains the table: its state is live and its heartbeat is at most five seconds old.
	Live bool
	// Pairs is the number of pairs.
	Pairs int
}

// Service is a destination of flows: the number of an IP protocol, 17 (UDP) or 6 (TCP), and a port. The zero value
// stands for the first service of a table.
type Service struct {
	Protocol uint8
	Port     uint16
}

// String returns the service in the form "udp/4791", as the configuration has it, and "" for the zero value.
func (s Service) String() string {
	switch s.Protocol {
	case 0:
		return ""
	case unix.IPPROTO_UDP:
		return fmt.Sprintf("udp/%d", s.Port)
	case unix.IPPROTO_TCP:
		return fmt.Sprintf("tcp/%d", s.Port)
	}
	return fmt.Sprintf("%d/%d", s.Protocol, s.Port)
}

// ServiceRange is a range of services of one protocol.
type ServiceRange struct {
	Protocol    uint8
	First, Last uint16
}

// String returns the range in the form "udp/4791" or "tcp/4800-5055".
func (r ServiceRange) String() string {
	text := Service{r.Protocol, r.First}.String()
	if r.First != r.Last {
		text += fmt.Sprint("-", r.Last)
	}
	return text
}

func (r ServiceRange) contains(s Service) bool {
	return s.Protocol == r.Protocol && s.Port >= r.First && s.Port <= r.Last
}

// Table is an open slot table. Its methods may be called by several goroutines at once.
type Table struct {
	path    string
	service Service
	mem     atomic.Pointer[mapping]
	mu      sync.Mutex // one Refresh at a time
}

// mapping is a mapped file. The garbage collector unmaps it.
type mapping struct {
	mem slotlayout.Memory
	h   slotlayout.Header // the constant fields
	dev uint64
	ino uint64

	planes   []string
	sources  []netip.Addr
	services []Service
	steered  []ServiceRange
	service  uint32 // the index of the table's service in services
	// err is ErrTruncated for a file that was truncated: mem is then an empty header.
	err error
}

// listed lists the services of a table for an error, each once.
func (m *mapping) listed() string {
	var names []string
	for _, s := range m.services {
		if !slices.ContainsFunc(m.steered, func(r ServiceRange) bool { return r.contains(s) }) {
			names = append(names, s.String())
		}
	}
	for _, r := range m.steered {
		names = append(names, r.String())
	}
	return strings.Join(names, ", ")
}

// Open opens the table at a path; "" means the environment variable FARED_SLOTS, or else DefaultPath. Source ports are
// those for the table's first service.
func Open(path string) (*Table, error) { return OpenFor(path, Service{}) }

// OpenFor is Open with the source ports for a service: where the data plane places flows by a hash, those of another
// service lead to other sub-ports. The error is ErrService if the table has none for it: slots.services of the
// configuration lists those that have separate ports. Where the data plane steers by source port, whatever the service,
// every service that it steers has the same ports, and only another one is an error. A table of a fared that does not
// name services is used as it is.
func OpenFor(path string, service Service) (*Table, error) {
	if path == "" {
		path = os.Getenv("FARED_SLOTS")
	}
	if path == "" {
		path = DefaultPath
	}
	m, err := openMapping(path, service)
	if err != nil {
		return nil, fmt.Errorf("open the slot table %s: %w", path, err)
	}
	t := &Table{path: path, service: service}
	t.mem.Store(m)
	return t, nil
}

func openMapping(path string, service Service) (*mapping, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		if deleted(path) {
			return nil, fmt.Errorf("%w: %w", ErrNoTable, ErrDeleted)
		}
		return nil, fmt.Errorf("%w: fared does not publish one there", ErrNoTable)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	// The header decides about the rest, so it is read before the file is mapped whole.
	head := make(slotlayout.Memory, slotlayout.HeaderSize)
	if _, err := f.ReadAt(head, 0); err != nil {
		if st.Size < int64(slotlayout.HeaderSize) {
			return nil, ErrTruncated
		}
		return nil, err
	}
	m := &mapping{h: head.Header(), dev: st.Dev, ino: st.Ino}
	if err := m.h.Check(uint64(st.Size)); err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(m.h.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map: %w", err)
	}
	m.mem = mem
	runtime.AddCleanup(m, func(mem []byte) { unix.Munmap(mem) }, mem)
	for i := range m.h.Planes {
		m.planes = append(m.planes, text(mem[m.h.PlanesAt+uint64(i)*uint64(m.h.PlaneSize):][:slotlayout.PlaneSize]))
	}
	for i := range m.h.Sources {
		m.sources = append(m.sources, slotlayout.Addr(m.mem.Bytes16(m.h.SourcesAt+uint64(i)*uint64(m.h.SourceSize))))
	}
	for i := range m.h.Services {
		at := m.h.ServicesAt + uint64(i)*uint64(m.h.ServiceSize)
		m.services = append(m.services, Service{uint8(m.mem.Load32(at)), uint16(m.mem.Load32(at + 4))})
	}
	for i := range m.h.Steered {
		r := slotlayout.RangeOf(m.mem.Load64(m.h.SteeredAt + uint64(i)*uint64(m.h.SteeredSize)))
		m.steered = append(m.steered, ServiceRange{uint8(r.Protocol), r.First, r.Last})
	}
	switch i := slices.Index(m.services, service); {
	case i >= 0:
		m.service = uint32(i)
	case service == Service{} || len(m.services) == 0:
	case slices.ContainsFunc(m.steered, func(r ServiceRange) bool { return r.contains(service) }): // the ports of the first service
	default:
		return nil, fmt.Errorf("%w %s, only for %s", ErrService, service, m.listed())
	}
	return m, nil
}

// deleted reports whether the file at a path or its directory has been deleted: only a mount still leads there.
func deleted(path string) bool {
	return slices.ContainsFunc([]string{path, filepath.Dir(path)}, func(name string) bool {
		var st unix.Stat_t
		return unix.Stat(name, &st) == nil && st.Nlink == 0
	})
}

// text returns the bytes before the first zero.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// Path returns the path at which the table was opened.
func (t *Table) Path() string { return t.path }

// Close releases the table. Results of earlier calls stay valid.
func (t *Table) Close() error {
	t.mem.Store(nil)
	return nil
}

// Planes returns the names of the planes, in the configured order. Do not modify the result.
func (t *Table) Planes() []string {
	if m := t.mem.Load(); m != nil {
		return m.planes
	}
	return nil
}

// Sources returns the local loopbacks. Do not modify the result.
func (t *Table) Sources() []netip.Addr {
	if m := t.mem.Load(); m != nil {
		return m.sources
	}
	return nil
}

// Services returns the services for which the table has source ports, the first one being that of Open; none for a
// table that does not name them. Do not modify the result.
func (t *Table) Services() []Service {
	if m := t.mem.Load(); m != nil {
		return m.services
	}
	return nil
}

// Steered returns the services that have the source ports of the first one of Services, because the data plane steers
// by them, whatever the service; none where each service has separate ports. Do not modify the result.
func (t *Table) Steered() []ServiceRange {
	if m := t.mem.Load(); m != nil {
		return m.steered
	}
	return nil
}

// attempts bounds the readings of a record that changes meanwhile. A change takes less than a microsecond unless its
// writer is interrupted.
const attempts = 2000

// Offsets.
const (
	headerState     = uint64(unsafe.Offsetof(slotlayout.Header{}.State))
	headerWake      = uint64(unsafe.Offsetof(slotlayout.Header{}.Wake))
	headerRevision  = uint64(unsafe.Offsetof(slotlayout.Header{}.Revision))
	headerStatus    = uint64(unsafe.Offsetof(slotlayout.Header{}.StatusRevision))
	headerHeartbeat = uint64(unsafe.Offsetof(slotlayout.Header{}.Heartbeat))
	headerUsed      = uint64(unsafe.Offsetof(slotlayout.Header{}.UsedPairs))

	subPortPlane  = uint64(unsafe.Offsetof(slotlayout.SubPort{}.Plane))
	subPortDevice = uint64(unsafe.Offsetof(slotlayout.SubPort{}.Device))
	subPortRDMA   = uint64(unsafe.Offsetof(slotlayout.SubPort{}.RDMADevice))
	subPortPort   = uint64(unsafe.Offsetof(slotlayout.SubPort{}.RDMAPort))

	vectorSlots    = uint64(unsafe.Offsetof(slotlayout.Vector{}.Slots))
	vectorRevision = uint64(unsafe.Offsetof(slotlayout.Vector{}.Revision))
	vectorFlags    = uint64(unsafe.Offsetof(slotlayout.Vector{}.Flags))
	vectorID       = uint64(unsafe.Offsetof(slotlayout.Vector{}.ID))

	pairVector      = uint64(unsafe.Offsetof(slotlayout.Pair{}.Vector))
	pairRevision    = uint64(unsafe.Offsetof(slotlayout.Pair{}.Revision))
	pairSource      = uint64(unsafe.Offsetof(slotlayout.Pair{}.Source))
	pairDestination = uint64(unsafe.Offsetof(slotlayout.Pair{}.Destination))
	pairFlags       = uint64(unsafe.Offsetof(slotlayout.Pair{}.Flags))
	pairPlacements  = uint64(unsafe.Offsetof(slotlayout.Pair{}.Placements))
)

// current returns the mapping to read. If another file has replaced it, current continues with that file: one of the
// few cases in which a look-up makes system calls.
func (t *Table) current() *mapping {
	m := t.mem.Load()
	if m != nil && m.mem.Load32(headerState) == slotlayout.StateReplaced {
		t.Refresh() // a failure keeps the mapping
		m = t.mem.Load()
	}
	return m
}

// Lookup returns the state of a pair. The result's slots reuse the array of buf. The error is ErrNotFound or ErrBusy.
func (t *Table) Lookup(src, dst netip.Addr, buf []Slot) (Pair, error) {
	m := t.current()
	if m == nil {
		return Pair{}, fs.ErrClosed
	}
	if m.err != nil {
		return Pair{}, m.err
	}
	defer runtime.KeepAlive(m)
	a, b := src.As16(), dst.As16()
	mask := uint64(m.h.IndexEntries - 1)
	hash := slotlayout.Hash(m.h.Seed, &a, &b)
	at := hash & mask
	for range m.h.IndexEntries {
		entry := m.mem.Load32(m.h.IndexAt + 4*at)
		if entry == 0 {
			return Pair{}, ErrNotFound
		}
		if n := m.h.Record(hash, entry); n > m.h.Pairs {
			return Pair{}, ErrFormat
		} else if n != 0 {
			p, err := m.read(n-1, &a, &b, buf)
			if !errors.Is(err, ErrNotFound) {
				return p, err
			}
		}
		at = (at + 1) & mask
	}
	return Pair{}, ErrNotFound
}

// read reads the record of a pair. It returns ErrNotFound if the record is not that of src and dst, where these are not
// nil, or is not in use.
func (m *mapping) read(record uint32, src, dst *[16]byte, buf []Slot) (Pair, error) {
	at := m.h.PairsAt + uint64(record)*uint64(m.h.PairSize)
	for range attempts {
		sequence := m.mem.Load32(at)
		if sequence&1 != 0 {
			continue
		}
		a, b := m.mem.Bytes16(at+pairSource), m.mem.Bytes16(at+pairDestination)
		flags := m.mem.Load32(at + pairFlags)
		if flags&slotlayout.PairUsed == 0 || src != nil && (a != *src || b != *dst) {
			if m.mem.Load32(at) == sequence {
				return Pair{}, ErrNotFound
			}
			continue
		}
		p := Pair{
			Source: slotlayout.Addr(a), Destination: slotlayout.Addr(b), Placement: Placement(slotlayout.PlacementOf(flags, m.mem.Load32(at+pairPlacements), m.service)),
			Revision: m.mem.Load64(at + pairRevision), Owned: m.mem.Load32(headerState) == slotlayout.StateLive, Slots: buf[:0],
			from: m, record: record, sequence: sequence,
		}
		whole, err := m.readVector(&p, at, flags&slotlayout.PairInEffect != 0)
		if err != nil {
			return Pair{}, err
		}
		if whole && m.mem.Load32(at) == sequence {
			return p, nil
		}
	}
	return Pair{}, ErrBusy
}

// readVector reads the vector of a pair, with the pair's ports and drains. It returns false if the record changes
// meanwhile.
func (m *mapping) readVector(p *Pair, pair uint64, inEffect bool) (bool, error) {
	n := m.mem.Load32(pair + pairVector)
	if n == 0 {
		return true, nil
	}
	if n > m.h.Vectors {
		return false, ErrFormat
	}
	at := m.h.VectorsAt + uint64(n-1)*uint64(m.h.VectorSize)
	sequence := m.mem.Load32(at)
	if sequence&1 != 0 {
		return false, nil
	}
	slots, flags := m.mem.Load32(at+vectorSlots), m.mem.Load32(at+vectorFlags)
	if slots > m.h.MaxSlots {
		return false, m.format(at, sequence)
	}
	p.Vector, p.Revision = m.mem.Load32(at+vectorID), max(p.Revision, m.mem.Load64(at+vectorRevision))
	p.Reachable, p.InEffect = flags&slotlayout.VectorReachable != 0, inEffect && flags&slotlayout.VectorInEffect != 0
	ports := pair + slotlayout.PortsAt(m.h.MaxSlots, m.service)
	var drains, four uint64
	for i := range uint64(slots) {
		if i%64 == 0 {
			drains = m.mem.Load64(pair + slotlayout.PairSize + i/8)
		}
		if i%4 == 0 {
			four = m.mem.Load64(ports + 2*i)
		}
		s := slotlayout.SlotOf(m.mem.Load64(at + slotlayout.VectorSize + 8*i))
		out := Slot{
			Plane: int(s.Plane), SubPort: int(s.SubPort), Share: s.Share, SourcePort: port(four, i%4),
			Parked: s.Flags&slotlayout.SlotParked != 0, InEffect: inEffect && s.Flags&slotlayout.SlotInEffect != 0,
			Wrong: s.Flags&slotlayout.SlotWrong != 0,
			Drain: s.Flags&slotlayout.SlotDrain != 0 || drains>>(i%64)&1 != 0,
		}
		if s.SubPort == slotlayout.NoSubPort {
			out.SubPort = -1
		} else if uint32(s.SubPort) >= m.h.SubPorts || uint32(s.Plane) >= m.h.Planes {
			return false, m.format(at, sequence)
		}
		p.Slots = append(p.Slots, out)
	}
	p.vector, p.vectorSequence = n, sequence
	return m.mem.Load32(at) == sequence, nil
}

// format returns ErrFormat if a record with impossible content has not changed while it was read.
func (m *mapping) format(at uint64, sequence uint32) error {
	if m.mem.Load32(at) == sequence {
		return ErrFormat
	}
	return nil
}

// port returns one of the four ports of a word.
func port(word uint64, i uint64) uint16 {
	return (*[4]uint16)(unsafe.Pointer(&word))[i]
}

// Current reports whether a pair that Lookup or Pairs returned is still the state of the table. It reads three words.
func (t *Table) Current(p *Pair) bool {
	m := t.mem.Load()
	if m == nil || m != p.from {
		return false
	}
	defer runtime.KeepAlive(m)
	if m.mem.Load32(m.h.PairsAt+uint64(p.record)*uint64(m.h.PairSize)) != p.sequence {
		return false
	}
	if p.vector != 0 && m.mem.Load32(m.h.VectorsAt+uint64(p.vector-1)*uint64(m.h.VectorSize)) != p.vectorSequence {
		return false
	}
	return p.Owned == (m.mem.Load32(headerState) == slotlayout.StateLive)
}

// Pairs yields every pair, in no order. A pair that changes meanwhile is yielded in one of its states; a pair that is
// added or removed meanwhile may be missing. The error is ErrBusy or ErrFormat, for one pair.
func (t *Table) Pairs() iter.Seq2[Pair, error] {
	return func(yield func(Pair, error) bool) {
		m := t.current()
		if m == nil {
			yield(Pair{}, fs.ErrClosed)
			return
		}
		if m.err != nil {
			yield(Pair{}, m.err)
			return
		}
		defer runtime.KeepAlive(m)
		for n := range m.h.Pairs {
			p, err := m.read(n, nil, nil, nil)
			if !errors.Is(err, ErrNotFound) && !yield(p, err) {
				return
			}
		}
	}
}

// SubPorts returns the sub-ports, in the configured order. The error is ErrBusy.
func (t *Table) SubPorts() ([]SubPort, error) {
	m := t.mem.Load()
	if m == nil {
		return nil, fs.ErrClosed
	}
	defer runtime.KeepAlive(m)
	out := make([]SubPort, m.h.SubPorts)
	for i := range out {
		if !m.subPort(m.h.SubPortsAt+uint64(i)*uint64(m.h.SubPortSize), &out[i]) {
			return nil, ErrBusy
		}
	}
	return out, nil
}

func (m *mapping) subPort(at uint64, out *SubPort) bool {
	for range attempts {
		sequence := m.mem.Load32(at)
		if sequence&1 != 0 {
			continue
		}
		device, name := m.mem.Bytes16(at+subPortDevice), [64]byte{}
		for i := uint64(0); i < 64; i += 16 {
			*(*[16]byte)(name[i:]) = m.mem.Bytes16(at + subPortRDMA + i)
		}
		*out = SubPort{
			Device: text(device[:]), Plane: int(m.mem.Load32(at + subPortPlane)), RDMADevice: text(name[:]), RDMAPort: int(m.mem.Load32(at + subPortPort)),
			GIDs: make([]int, m.h.Sources),
		}
		for i := range out.GIDs {
			out.GIDs[i] = int(int32(m.mem.Load32(at + slotlayout.SubPortSize + 4*uint64(i))))
		}
		if m.mem.Load32(at) == sequence {
			return true
		}
	}
	return false
}

// Status returns the state of the table as a whole.
func (t *Table) Status() Status {
	m := t.mem.Load()
	if m == nil {
		return Status{}
	}
	defer runtime.KeepAlive(m)
	heartbeat := m.mem.Load64(headerHeartbeat) // before the clock, which is then later
	age, state := monotonic()-heartbeat, State(m.mem.Load32(headerState))
	return Status{
		Instance: text(m.h.Instance[:]), Run: m.h.Run, State: state, HeartbeatAge: time.Duration(age),
		Revision: m.mem.Load64(headerRevision), StatusRevision: m.mem.Load64(headerStatus), Pairs: int(m.mem.Load32(headerUsed)),
		Live: state == Live && age < slotlayout.HeartbeatLimit,
	}
}

// Check returns nil while a process maintains the table, and in the first minute without one; afterwards the error is
// ErrStale, or ErrDeleted where no other table can appear at the path. Programs log a change of the result: the last
// weights stay in use, however old they are. Check makes system calls only after that minute, and to continue with a
// file that has replaced the table, as Lookup does.
func (t *Table) Check() error {
	m := t.current()
	if m == nil {
		return fs.ErrClosed
	}
	defer runtime.KeepAlive(m)
	heartbeat := m.mem.Load64(headerHeartbeat) // before the clock, which is then later
	switch {
	case m.err != nil:
		return m.err
	case monotonic()-heartbeat < slotlayout.StaleLimit:
		return nil
	case deleted(t.path):
		return fmt.Errorf("%s: %w", t.path, ErrDeleted)
	}
	return fmt.Errorf("%s: %w", t.path, ErrStale)
}

// monotonic returns CLOCK_MONOTONIC in ns.
func monotonic() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // impossible: every Linux has this clock
	}
	return uint64(ts.Nano())
}

// Refresh continues with the file that is now at the path, and reports whether it is another one. Without a usable file
// the table keeps the last one, and returns the error of Open. If the file was truncated, look-ups fail with
// ErrTruncated until there is another one. Wait calls Refresh.
func (t *Table) Refresh() (replaced bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.mem.Load()
	if m == nil {
		return false, fs.ErrClosed
	}
	var st unix.Stat_t
	if err := unix.Stat(t.path, &st); err == nil && st.Dev == m.dev && st.Ino == m.ino {
		if uint64(st.Size) < m.h.Size { // an access to the missing part would end the process
			t.mem.Store(&mapping{mem: make(slotlayout.Memory, slotlayout.HeaderSize), err: ErrTruncated})
			return false, fmt.Errorf("open the slot table %s: %w", t.path, ErrTruncated)
		}
		return false, nil
	}
	next, err := openMapping(t.path, t.service)
	if err != nil {
		return false, fmt.Errorf("open the slot table %s: %w", t.path, err)
	}
	t.mem.Store(next)
	return true, nil
}
