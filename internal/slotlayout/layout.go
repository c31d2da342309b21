// Package slotlayout is the layout of the slot table, a file of shared memory: the records as Go types, from which the
// offsets of the C library and those of the Python module are generated.
//
// All numbers are in the byte order of the machine, at offsets that are multiples of their size. A field that changes
// after the file is published is read and written by one atomic access of the field's size.
package slotlayout

//go:generate go run ./gen -root ../..

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"
)

const (
	// Magic is the first eight bytes of a slot table.
	Magic = "FAREDSLT"
	// Order is the value of Header.Order in the byte order of the machine.
	Order = 0x01020304
	// Version is the value of Header.Layout. A reader of another version rejects the file. Fields that are added to the
	// end of a record keep the version, because readers take the size of every record from the header.
	Version = 2
)

// Values of Header.State.
const (
	// StateLive is a table with an owner, while Header.Heartbeat advances.
	StateLive = 1
	// StateEnded is a table without an owner: the last state of a process that has ended.
	StateEnded = 2
	// StateReplaced is a table that another file at the same path replaces.
	StateReplaced = 3
)

const (
	// HeartbeatPeriod is the period of Header.Heartbeat, ns.
	HeartbeatPeriod = 1_000_000_000
	// HeartbeatLimit is the age of Header.Heartbeat, ns, from which on readers treat a table as one without an owner.
	HeartbeatLimit = 5 * HeartbeatPeriod
	// StaleLimit is the age of Header.Heartbeat, ns, from which on readers report a table without an owner.
	StaleLimit = 60 * HeartbeatPeriod
)

// Header is the beginning of the file. The fields before State are constant while the file exists.
type Header struct {
	Magic  [8]byte `doc:"the text FAREDSLT"`
	Order  uint32  `doc:"0x01020304 in the byte order of the machine that wrote the file"`
	Layout uint32  `doc:"version of the layout: 2"`
	Size   uint64  `doc:"bytes of the file, all of them allocated"`
	Run    uint64  `doc:"number of this file: unique among the files that processes publish at the path, and increasing"`
	Seed   uint64  `doc:"seed of the hash of the index"`

	HeaderSize uint32 `doc:"bytes of the header"`
	MaxSlots   uint32 `doc:"greatest number of slots of a pair; it determines the size of vectors and pairs"`

	Planes       uint32 `doc:"number of planes"`
	PlaneSize    uint32 `doc:"bytes of a plane"`
	PlanesAt     uint64 `doc:"offset of the first plane"`
	SubPorts     uint32 `doc:"number of sub-ports"`
	SubPortSize  uint32 `doc:"bytes of a sub-port"`
	SubPortsAt   uint64 `doc:"offset of the first sub-port"`
	Sources      uint32 `doc:"number of local loopbacks"`
	SourceSize   uint32 `doc:"bytes of a source"`
	SourcesAt    uint64 `doc:"offset of the first source"`
	Vectors      uint32 `doc:"number of records for vectors"`
	VectorSize   uint32 `doc:"bytes of a vector"`
	VectorsAt    uint64 `doc:"offset of the first vector"`
	Pairs        uint32 `doc:"number of records for pairs; the writer prefers record (h >> 32) * Pairs >> 32 for a pair with hash h"`
	PairSize     uint32 `doc:"bytes of a pair"`
	PairsAt      uint64 `doc:"offset of the first pair"`
	IndexEntries uint32 `doc:"number of entries of the index, a power of two, greater than the number of pairs"`
	Reserved1    uint32 `doc:"0"`
	IndexAt      uint64 `doc:"offset of the index"`

	Instance [64]byte `doc:"name of the process's run as in WatchWeightsResponse.instance, ended by a zero byte"`

	Services    uint32   `doc:"number of services that pairs have source ports for; 0: one, which the table does not name"`
	ServiceSize uint32   `doc:"bytes of a service; 0 without services"`
	ServicesAt  uint64   `doc:"offset of the first service; 0 without services"`
	Steered     uint32   `doc:"number of ranges of services; all of them have the source ports of the first service, because the data plane steers by these, whatever the service; 0: only Services have source ports"`
	SteeredSize uint32   `doc:"bytes of a range; 0 without ranges"`
	SteeredAt   uint64   `doc:"offset of the first range; 0 without ranges"`
	Reserved    [16]byte `doc:"0"`

	State          uint32   `doc:"1: live; 2: the owner has ended, the table has its last state; 3: another file at the path replaces this one"`
	Wake           uint32   `doc:"futex word: changes with every publication and every change of State"`
	Revision       uint64   `doc:"number of publications at the path since the first process, increasing"`
	StatusRevision uint64   `doc:"revision of the weights (WatchWeightsResponse.revision) up to which the table is current"`
	Heartbeat      uint64   `doc:"CLOCK_MONOTONIC in ns, set by the owner every second; from an age of 5 s on the table counts as one without an owner"`
	UsedPairs      uint32   `doc:"number of pairs in use"`
	UsedVectors    uint32   `doc:"number of vectors in use"`
	Reserved2      [24]byte `doc:"0"`
}

// Plane is one of the independent networks. Constant.
type Plane struct {
	Name [64]byte `doc:"name, ended by a zero byte"`
}

// Source is a local loopback. Constant.
type Source struct {
	Address  [16]byte `doc:"the address; IPv4 as ::ffff:a.b.c.d"`
	Group    uint32   `doc:"source group, from 0"`
	Reserved uint32   `doc:"0"`
}

// Service is a destination of flows, for which pairs have source ports. Constant.
type Service struct {
	Protocol uint32 `doc:"number of the IP protocol: 17 (UDP) or 6 (TCP)"`
	Port     uint32 `doc:"destination port"`
}

// Range is a range of services of one protocol. Constant.
type Range struct {
	Protocol uint32 `doc:"number of the IP protocol: 17 (UDP) or 6 (TCP)"`
	First    uint16 `doc:"first destination port"`
	Last     uint16 `doc:"last destination port"`
}

// SubPort is a device of a plane, followed by a GID index for each source.
type SubPort struct {
	Sequence   uint32   `doc:"odd while the fields from RDMAPort on change"`
	Plane      uint32   `doc:"index of the plane; constant"`
	Device     [16]byte `doc:"name of the netdev, ended by a zero byte; constant"`
	RDMAPort   uint32   `doc:"port of the RDMA device, from 1; 0: the netdev has no RDMA device"`
	Reserved   uint32   `doc:"0"`
	RDMADevice [64]byte `doc:"name of the RDMA device, ended by a zero byte; empty if there is none"`
}

// Vector is the state that pairs share, followed by MaxSlots slots.
type Vector struct {
	Sequence uint32 `doc:"odd while the record changes"`
	Slots    uint32 `doc:"number of slots"`
	Revision uint64 `doc:"StatusRevision of the last change"`
	Flags    uint32 `doc:"VECTOR flags"`
	ID       uint32 `doc:"number of the vector (DestinationWeights.vector)"`
	Reserved uint64 `doc:"0"`
}

// Slot is a slot of a vector: eight bytes, read and written at once.
type Slot struct {
	Share   uint32 `doc:"parts per billion of the pair's traffic"`
	SubPort uint16 `doc:"index of the sub-port; 0xffff: the packets are sprayed over the plane"`
	Plane   uint8  `doc:"index of the plane"`
	Flags   uint8  `doc:"SLOT flags"`
}

// Pair is a pair of addresses, followed by a bitmap of the slots that drain for this pair alone (64 slots a word,
// MaxSlots bits) and, for each service, MaxSlots source ports of two bytes, rounded up to 8 bytes.
type Pair struct {
	Sequence    uint32   `doc:"odd while the record changes"`
	Vector      uint32   `doc:"record number of the vector plus 1; 0: no vector"`
	Revision    uint64   `doc:"StatusRevision of the last change of the pair itself"`
	Source      [16]byte `doc:"local loopback"`
	Destination [16]byte `doc:"remote loopback"`
	Flags       uint32   `doc:"PAIR flags; bits 8-15: placement of the first service's source ports"`
	Placements  uint32   `doc:"placements of the other services' source ports: four bits each, the second service's in the lowest"`
}

// Flags of vectors, slots and pairs.
const (
	VectorReachable = 1 << 0 // a plane has capacity toward the destination
	VectorInEffect  = 1 << 1 // the data plane forwards by the weights of every plane

	SlotParked   = 1 << 0 // send nothing; the share is 0
	SlotDrain    = 1 << 1 // the slot has lost addresses: Slot.drain_before_move
	SlotInEffect = 1 << 2 // the data plane forwards by the weight of the slot's plane
	SlotWrong    = 1 << 3 // probes by the slot's sub-port toward some destination are lost or go another way

	PairUsed     = 1 << 0 // the record is in use
	PairInEffect = 1 << 1 // the data plane forwards the destination by its vector
)

// Placements of source ports, bits 8-15 of Pair.Flags: the words of PairSlots.port_placement.
const (
	PlacementShift   = 8
	PlacementUniform = 0
	PlacementHash    = 1
	PlacementNone    = 2
	PlacementAsked   = 3
)

// Placements are the words of the placements, by number.
var Placements = [...]string{"uniform", "hash", "none", "asked"}

const (
	// NoSubPort is the value of Slot.SubPort for a slot that is sprayed over its plane.
	NoSubPort = 0xffff
	// NoGID is the GID index of a source whose address the RDMA device does not have.
	NoGID = -1
	// IndexDeleted is an index entry whose pair was removed, and no entry of a pair. Probing continues after it, and
	// ends at 0.
	IndexDeleted = 0xffff_ffff
	// MaxServices is the greatest Header.Services.
	MaxServices = 8
	// MaxSteered is the greatest Header.Steered.
	MaxSteered = 64
	// MaxSlots is the greatest Header.MaxSlots.
	MaxSlots = 4096
	// MaxRecords is the greatest number of vectors, and of pairs.
	MaxRecords = 1 << 26
)

// Sizes of the records without their arrays.
const (
	HeaderSize  = uint64(unsafe.Sizeof(Header{}))
	PlaneSize   = uint64(unsafe.Sizeof(Plane{}))
	SourceSize  = uint64(unsafe.Sizeof(Source{}))
	ServiceSize = uint64(unsafe.Sizeof(Service{}))
	RangeSize   = uint64(unsafe.Sizeof(Range{}))
	SubPortSize = uint64(unsafe.Sizeof(SubPort{}))
	VectorSize  = uint64(unsafe.Sizeof(Vector{}))
	PairSize    = uint64(unsafe.Sizeof(Pair{}))
	SlotSize    = uint64(unsafe.Sizeof(Slot{}))
)

// DrainWords returns the number of words of a pair's bitmap.
func DrainWords(maxSlots uint32) uint64 { return (uint64(maxSlots) + 63) / 64 }

// PortsAt returns the offset within the record of a pair's source ports for a service, from 0.
func PortsAt(maxSlots, service uint32) uint64 {
	return PairSize + 8*DrainWords(maxSlots) + uint64(service)*round(2*uint64(maxSlots), 8)
}

// PlacementOf returns the placement of the source ports for a service, from the fields of a pair.
func PlacementOf(flags, placements, service uint32) uint32 {
	if service == 0 {
		return flags >> PlacementShift & 0xff
	}
	return placements >> (4 * (service - 1)) & 0xf
}

// VectorBytes returns the size of a vector with its slots.
func VectorBytes(maxSlots uint32) uint64 { return VectorSize + SlotSize*uint64(maxSlots) }

// PairBytes returns the size of a pair with its bitmap, and with ports for at least one service.
func PairBytes(maxSlots, services uint32) uint64 { return PortsAt(maxSlots, max(services, 1)) }

// SubPortBytes returns the size of a sub-port with its GID indexes.
func SubPortBytes(sources uint32) uint64 { return round(SubPortSize+4*uint64(sources), 8) }

func round(n, to uint64) uint64 { return (n + to - 1) / to * to }

// Place lays out the sections of a file from the numbers of records, which are set in h: it sets sizes and offsets.
// Sections begin at multiples of 64.
func (h *Header) Place() {
	copy(h.Magic[:], Magic)
	h.Order, h.Layout, h.HeaderSize = Order, Version, uint32(HeaderSize)
	h.PlaneSize, h.SourceSize = uint32(PlaneSize), uint32(SourceSize)
	h.SubPortSize = uint32(SubPortBytes(h.Sources))
	h.VectorSize, h.PairSize = uint32(VectorBytes(h.MaxSlots)), uint32(PairBytes(h.MaxSlots, h.Services))
	at := HeaderSize
	section := func(n, size uint32) uint64 {
		start := round(at, 64)
		at = start + uint64(n)*uint64(size)
		return start
	}
	h.PlanesAt = section(h.Planes, h.PlaneSize)
	h.SourcesAt = section(h.Sources, h.SourceSize)
	h.SubPortsAt = section(h.SubPorts, h.SubPortSize)
	if h.Services > 0 {
		h.ServiceSize = uint32(ServiceSize)
		h.ServicesAt = section(h.Services, h.ServiceSize)
	}
	if h.Steered > 0 {
		h.SteeredSize = uint32(RangeSize)
		h.SteeredAt = section(h.Steered, h.SteeredSize)
	}
	h.IndexAt = section(h.IndexEntries, 4)
	h.VectorsAt = section(h.Vectors, h.VectorSize)
	h.PairsAt = section(h.Pairs, h.PairSize)
	h.Size = round(at, 4096)
}

// Errors of Check.
var (
	ErrFormat    = fmt.Errorf("the file is not a slot table")
	ErrTruncated = fmt.Errorf("the slot table is shorter than its header states")
)

// VersionError reports a table of another layout.
type VersionError struct {
	// Have is the version of the file.
	Have uint32
}

// Error names both versions.
func (e *VersionError) Error() string {
	return fmt.Sprintf("the slot table has layout %d, and this program reads layout %d: use programs of the version of fared that runs", e.Have, Version)
}

// Check returns an error if a reader cannot use a file of the given size with this header. A reader that accesses only
// records whose numbers are below those of the header stays inside the file.
func (h *Header) Check(size uint64) error {
	if string(h.Magic[:]) != Magic {
		return ErrFormat
	}
	if h.Order != Order {
		return fmt.Errorf("%w of this machine's byte order", ErrFormat)
	}
	if h.Layout != Version {
		return &VersionError{h.Layout}
	}
	if size < h.Size {
		return ErrTruncated
	}
	if h.MaxSlots > MaxSlots || h.Services > MaxServices || h.Steered > MaxSteered || h.IndexEntries == 0 || h.IndexEntries&(h.IndexEntries-1) != 0 || uint64(h.HeaderSize) < HeaderSize || h.HeaderSize%8 != 0 {
		return ErrFormat
	}
	type section struct {
		n, size   uint32
		at, least uint64
	}
	sections := []section{
		{h.Planes, h.PlaneSize, h.PlanesAt, PlaneSize}, {h.Sources, h.SourceSize, h.SourcesAt, SourceSize},
		{h.SubPorts, h.SubPortSize, h.SubPortsAt, SubPortBytes(h.Sources)}, {h.Vectors, h.VectorSize, h.VectorsAt, VectorBytes(h.MaxSlots)},
		{h.Pairs, h.PairSize, h.PairsAt, PairBytes(h.MaxSlots, h.Services)}, {h.IndexEntries, 4, h.IndexAt, 4},
	}
	if h.Services > 0 {
		sections = append(sections, section{h.Services, h.ServiceSize, h.ServicesAt, ServiceSize})
	}
	if h.Steered > 0 {
		sections = append(sections, section{h.Steered, h.SteeredSize, h.SteeredAt, RangeSize})
	}
	for _, s := range sections {
		if uint64(s.size) < s.least || s.size%4 != 0 || s.at%8 != 0 || s.at < uint64(h.HeaderSize) || s.n > 1<<31 {
			return ErrFormat
		}
		if s.size != 4 && s.size%8 != 0 {
			return ErrFormat
		}
		if bytes := uint64(s.n) * uint64(s.size); s.at > h.Size || bytes > h.Size-s.at {
			return ErrFormat
		}
	}
	return nil
}

// Hash returns the hash of a pair of addresses, as 16 bytes each, with a seed.
func Hash(seed uint64, src, dst *[16]byte) uint64 {
	h := seed
	for _, a := range []*[16]byte{src, dst} {
		h = mix(h ^ binary.NativeEndian.Uint64(a[:8]))
		h = mix(h ^ binary.NativeEndian.Uint64(a[8:]))
	}
	return h
}

// Entry returns the index entry of a record of a pair: the record number plus 1 in the bits below IndexEntries, and a
// tag in the others. The tag is that of the pair's hash, so that readers rarely read the record of another pair.
func (h *Header) Entry(hash uint64, record uint32) uint32 { return h.tag(hash) | (record + 1) }

// Record returns the record plus 1 of an index entry, or 0 if the entry is not that of a pair with the hash.
func (h *Header) Record(hash uint64, entry uint32) uint32 {
	if entry == IndexDeleted || (entry^h.tag(hash))&^(h.IndexEntries-1) != 0 {
		return 0
	}
	return entry & (h.IndexEntries - 1)
}

// Home returns the record that a writer prefers for a pair with a hash: a reader may load it together with the index.
func (h *Header) Home(hash uint64) uint32 { return uint32(hash >> 32 * uint64(h.Pairs) >> 32) }

// tag returns the bits of an entry that are not part of the record number.
func (h *Header) tag(hash uint64) uint32 { return uint32(hash>>32) &^ (h.IndexEntries - 1) }

// mix is the finalizer of MurmurHash3 with Stafford's constants (variant 13), a permutation of 64-bit integers.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Addr returns the address that 16 bytes stand for: ::ffff:a.b.c.d is IPv4.
func Addr(b [16]byte) netip.Addr { return netip.AddrFrom16(b).Unmap() }
