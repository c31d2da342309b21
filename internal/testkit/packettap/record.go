package packettap

import (
	"encoding/binary"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Record notes when and where numbered packets arrive: UDP packets over IPv4 without options whose payload begins with
// a number of 32 bits in network byte order. The kernel writes, into memory that Arrival reads without a system call.
type Record struct {
	arrivals *ebpf.Map
	memory   *ebpf.Memory
	mask     uint32
}

// NewRecord makes a record that ends with the test. capacity is a power of two; a number overwrites the arrival of the
// number that is capacity smaller.
func NewRecord(t testing.TB, capacity uint32) *Record {
	t.Helper()
	arrivals, err := ebpf.NewMap(&ebpf.MapSpec{Name: "record", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: capacity, Flags: mmapable})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { arrivals.Close() })
	memory, err := arrivals.Memory()
	if err != nil {
		t.Fatal(err)
	}
	return &Record{arrivals, memory, capacity - 1}
}

// places is the number of bits of an entry that hold the place.
const placeBits = 3

// At notes the packets to a UDP port that arrive at a device, and drops them. place is 0 to 7.
func (r *Record) At(t testing.TB, n *netnstest.Namespace, device string, port uint16, place int) {
	t.Helper()
	Attach(t, n, device, ebpf.AttachTCXIngress, "note", r.noting(port, place))
}

// noting is the program of a device.
func (r *Record) noting(port uint16, place int) (code asm.Instructions) {
	load := func(offset, size int32) {
		code = append(code,
			asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, offset), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -8),
			asm.Mov.Imm(asm.R4, size), asm.FnSkbLoadBytes.Call(), asm.JNE.Imm(asm.R0, 0, "pass"))
	}
	const ip, udp, payload = 14, 14 + 20, 14 + 20 + 8
	code = append(code, asm.Mov.Reg(asm.R6, asm.R1))
	load(12, 2)
	code = append(code, asm.LoadMem(asm.R1, asm.RFP, -8, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half), asm.JNE.Imm(asm.R1, 0x0800, "pass"))
	load(ip+9, 1)
	code = append(code, asm.LoadMem(asm.R1, asm.RFP, -8, asm.Byte), asm.JNE.Imm(asm.R1, 17, "pass"))
	load(udp+2, 2)
	code = append(code, asm.LoadMem(asm.R1, asm.RFP, -8, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half), asm.JNE.Imm(asm.R1, int32(port), "pass"))
	load(payload, 4)
	return append(code,
		asm.LoadMem(asm.R1, asm.RFP, -8, asm.Word), asm.HostTo(asm.BE, asm.R1, asm.Word), asm.And.Imm(asm.R1, int32(r.mask)), asm.StoreMem(asm.RFP, -8, asm.R1, asm.Word),
		asm.LoadMapPtr(asm.R1, r.arrivals.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -8), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Reg(asm.R7, asm.R0), asm.FnKtimeGetNs.Call(),
		asm.LSh.Imm(asm.R0, placeBits), asm.Or.Imm(asm.R0, int32(place)), asm.StoreMem(asm.R7, 0, asm.R0, asm.DWord),
		asm.Mov.Imm(asm.R0, int32(End)), asm.Return(),
		asm.Mov.Imm(asm.R0, int32(Pass)).WithSymbol("pass"), asm.Return())
}

// Arrival returns the time (CLOCK_MONOTONIC, in nanoseconds) and the place at which the latest packet of a number
// arrived; 0 and no place before the first one. A caller that repeats numbers recognizes an earlier packet by its time.
func (r *Record) Arrival(number uint32) (at int64, place int) {
	var raw [8]byte
	if _, err := r.memory.ReadAt(raw[:], int64(number&r.mask)*8); err != nil {
		return 0, 0
	}
	v := binary.NativeEndian.Uint64(raw[:])
	return int64(v >> placeBits), int(v & (1<<placeBits - 1))
}
