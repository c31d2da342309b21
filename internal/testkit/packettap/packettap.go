// Package packettap counts packets of one UDP or TCP destination port at a device of a test's network namespace, by
// source port. The kernel counts, so that no packet is missed at any rate.
package packettap

import (
	"encoding/binary"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Tap counts every packet to one UDP or TCP port that arrives at a device or leaves by it, over IPv4 without options or
// IPv6. All other packets pass uncounted.
type Tap struct {
	counts *ebpf.Map
	link   link.Link
}

// Verdict decides whether a counted packet continues.
type Verdict int32

// Verdicts, with the kernel's numbers (TCX_NEXT and TCX_DROP in linux/bpf.h).
const (
	// Pass lets the packet continue.
	Pass Verdict = -1
	// End drops the packet, for tests that do not depend on the node's next step.
	End Verdict = 2
)

// Filter selects packets of a protocol, 0 meaning UDP, and of these by a byte of the UDP payload: payload[Offset] &
// Mask == Value. The zero Filter selects UDP.
type Filter struct {
	Protocol    uint8
	Offset      uint8
	Mask, Value uint8
	// Leaving selects the packets that leave by the device, instead of those that arrive at it.
	Leaving bool
}

// ports is the number of counters of a tap: one for each UDP source port.
const ports = 1 << 16

// New counts at a device until the test ends.
func New(t testing.TB, n *netnstest.Namespace, device string, port uint16, verdict Verdict) *Tap {
	t.Helper()
	return NewFiltered(t, n, device, port, verdict, Filter{})
}

// NewFiltered is New for packets that a filter selects. Others pass uncounted.
func NewFiltered(t testing.TB, n *netnstest.Namespace, device string, port uint16, verdict Verdict, filter Filter) *Tap {
	t.Helper()
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Name: "arrivals", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: ports, Flags: mmapable})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { counts.Close() })
	attach := ebpf.AttachTCXIngress
	if filter.Leaving {
		attach = ebpf.AttachTCXEgress
	}
	return &Tap{counts, Attach(t, n, device, attach, "count", counting(counts, port, verdict, filter))}
}

// Attach runs a program for the packets of a device that arrive (ebpf.AttachTCXIngress) or leave
// (ebpf.AttachTCXEgress), until the end of the test or of the returned link.
func Attach(t testing.TB, n *netnstest.Namespace, device string, attach ebpf.AttachType, name string, instructions asm.Instructions) link.Link {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, License: "GPL", Instructions: instructions})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer program.Close() // the link holds a reference
	index := n.Device(device).Index
	l := netnstest.In(n, func() (link.Link, error) {
		return link.AttachTCX(link.TCXOptions{Interface: index, Program: program, Attach: attach})
	})
	t.Cleanup(func() { l.Close() })
	return l
}

// Remove ends the tap before the test's end. Packets pass from then on.
func (x *Tap) Remove() { x.link.Close() }

// mmapable allows one read of all counters.
const mmapable = 1 << 10

// counting is the tap's program: a packet to the port that the filter selects increments its source port's counter and
// gets the verdict.
func counting(counts *ebpf.Map, port uint16, verdict Verdict, filter Filter) asm.Instructions {
	// load copies bytes of the packet to RFP-8. Their offset is in R2.
	load := func(offset asm.Instruction, size int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6), offset, asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -8),
			asm.Mov.Imm(asm.R4, size), asm.FnSkbLoadBytes.Call(), asm.JNE.Imm(asm.R0, 0, "pass"),
		}
	}
	protocol := int32(filter.Protocol)
	if protocol == 0 {
		protocol = unix.IPPROTO_UDP
	}
	at := func(offset int32) asm.Instruction { return asm.Mov.Imm(asm.R2, offset) }
	family := func(next, transport int32, label string) (code asm.Instructions) {
		code = load(at(next), 1)
		code[0] = code[0].WithSymbol(label)
		code = append(code, asm.LoadMem(asm.R1, asm.RFP, -8, asm.Byte), asm.JNE.Imm(asm.R1, protocol, "pass"))
		code = append(code, load(at(transport), 4)...)
		return append(code, asm.Mov.Imm(asm.R7, transport), asm.Ja.Label("count"))
	}
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	code = append(code, load(at(12), 2)...)
	code = append(code,
		asm.LoadMem(asm.R1, asm.RFP, -8, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.JEq.Imm(asm.R1, 0x0800, "v4"), asm.JEq.Imm(asm.R1, 0x86dd, "v6"), asm.Ja.Label("pass"))
	code = append(code, family(14+9, 14+20, "v4")...)
	code = append(code, family(14+6, 14+40, "v6")...)
	code = append(code,
		asm.LoadMem(asm.R1, asm.RFP, -6, asm.Half).WithSymbol("count"), asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.JNE.Imm(asm.R1, int32(port), "pass"),
		asm.LoadMem(asm.R1, asm.RFP, -8, asm.Half), asm.HostTo(asm.BE, asm.R1, asm.Half),
		asm.StoreMem(asm.RFP, -12, asm.R1, asm.Word))
	if filter.Mask != 0 {
		const header = 8 // of UDP
		code = append(code, asm.Add.Imm(asm.R7, header+int32(filter.Offset)))
		code = append(code, load(asm.Mov.Reg(asm.R2, asm.R7), 1)...)
		code = append(code, asm.LoadMem(asm.R1, asm.RFP, -8, asm.Byte), asm.And.Imm(asm.R1, int32(filter.Mask)), asm.JNE.Imm(asm.R1, int32(filter.Value), "pass"))
	}
	return append(code,
		asm.LoadMapPtr(asm.R1, counts.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -12), asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R1, 1), asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, int32(verdict)), asm.Return(),
		asm.Mov.Imm(asm.R0, int32(Pass)).WithSymbol("pass"), asm.Return())
}

// Read returns all counters, by source port.
func (x *Tap) Read(t testing.TB) []uint64 {
	t.Helper()
	mapped, err := x.counts.Memory()
	if err != nil {
		t.Fatal(err)
	}
	raw := make([]byte, 8*ports)
	if _, err := mapped.ReadAt(raw, 0); err != nil {
		t.Fatal(err)
	}
	out := make([]uint64, ports)
	for port := range out {
		out[port] = binary.NativeEndian.Uint64(raw[8*port:])
	}
	return out
}
