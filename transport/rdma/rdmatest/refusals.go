package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Refusals runs operations that a peer refuses: wrong key, bounds, rights or alignment, or an unwanted message. The
// operation completes with the matching error, no part of it is executed, and all operations posted after it complete.
func Refusals(t *testing.T, construct Constructor) {
	for _, refusal := range refusals {
		for _, loss := range []float64{0, 0.2} {
			for _, ordered := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/loss=%v/ordered=%v", refusal.name, loss, ordered), func(t *testing.T) {
					for seed := range uint64(15) {
						o := Options{Seed: seed, Channels: 1, Ordered: ordered, Loss: loss, Ops: 1, MaxSize: 8 << 10}
						if err := refuse(Virtual(o.withDefaults().net(), construct), o, refusal); err != nil {
							t.Errorf("seed %d: %v", seed, err)
						}
					}
				})
			}
		}
	}
}

// refusal is an operation that the peer does not execute.
type refusal struct {
	name string
	op   rdma.Op
	want error
}

// Memory regions at these keys grant one right only; the area of the end has a gap before and behind.
const (
	writeOnlyKey = 0x11
	readOnlyKey  = 0x22
	otherBegin   = 0x5000
	otherSize    = 4096
)

var refusals = []refusal{
	{"unknown key", access(rdma.OpWrite, 0xbad, areaBegin, 100), rdma.ErrRemoteAccess},
	{"unknown key, READ", access(rdma.OpRead, 0xbad, areaBegin, 100), rdma.ErrRemoteAccess},
	{"unknown key, atomic", access(rdma.OpFetchAdd, 0xbad, areaBegin, 8), rdma.ErrRemoteAccess},
	{"before the region", access(rdma.OpWrite, writeOnlyKey, otherBegin-1, 2), rdma.ErrRemoteAccess},
	{"beyond the region", access(rdma.OpWrite, writeOnlyKey, otherBegin+otherSize-1, 2), rdma.ErrRemoteAccess},
	{"beyond the region, packets", access(rdma.OpWrite, writeOnlyKey, otherBegin, otherSize+1), rdma.ErrRemoteAccess},
	{"READ beyond the region", access(rdma.OpRead, readOnlyKey, otherBegin+1, otherSize), rdma.ErrRemoteAccess},
	{"address wraps", access(rdma.OpWrite, writeOnlyKey, 1<<64-50, 100), rdma.ErrRemoteAccess},
	{"no right to write", access(rdma.OpWrite, readOnlyKey, otherBegin, 3000), rdma.ErrRemoteAccess},
	{"no right to read", access(rdma.OpRead, writeOnlyKey, otherBegin, 3000), rdma.ErrRemoteAccess},
	{"no right to add", access(rdma.OpFetchAdd, writeOnlyKey, otherBegin, 8), rdma.ErrRemoteAccess},
	{"no right to compare", access(rdma.OpCompareSwap, readOnlyKey, otherBegin, 8), rdma.ErrRemoteAccess},
	{"refused message", unwanted(10), rdma.ErrRemoteInvalid},
	{"refused message of packets", unwanted(5000), rdma.ErrRemoteInvalid},
}

func access(kind rdma.OpKind, key uint32, address uint64, n int) rdma.Op {
	return rdma.Op{Kind: kind, Key: key, Remote: address, Local: bytes.Repeat([]byte{junkByte}, n), Swap: 1}
}

func unwanted(n int) rdma.Op {
	return rdma.Op{Kind: rdma.OpSend, Local: make([]byte, n), Head: bytes.Repeat([]byte{0xff}, 20)}
}

// good returns the payload of the WRITE posted as number i.
func good(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 2000) }

func refuse(bed Bed, o Options, refusal refusal) error {
	m, err := newModel(bed, o)
	if err != nil {
		return err
	}
	defer bed.Close()
	m.left = 0
	one, other := make([]byte, otherSize), make([]byte, otherSize)
	m.hosts[1].Register(writeOnlyKey, otherBegin, one, rdma.RemoteWrite)
	m.hosts[1].Register(readOnlyKey, otherBegin, other, rdma.RemoteRead)
	var failed []error
	m.hosts[0].Hooks.Failed = func(_ rdma.Channel, err error) { failed = append(failed, err) }
	m.hosts[1].Hooks.Failed = m.hosts[0].Hooks.Failed
	var completed []*rdma.Op
	var errs []error
	m.hosts[0].Hooks.Complete = func(op *rdma.Op, err error) { completed, errs = append(completed, op), append(errs, err) }
	m.hosts[1].Hooks.Admit = func(rdma.Channel, []byte, int) ([]byte, rdma.Verdict) { return nil, rdma.Refused }
	// Valid WRITEs precede and follow the refused operation.
	e := m.ends[0][0]
	var ops []*rdma.Op
	for i := range 5 {
		op := &rdma.Op{Kind: rdma.OpWrite, Key: areaKey, Remote: areaBegin + uint64(e.begin+i*2000), Local: good(i)}
		if i == 2 {
			bad := refusal.op
			bad.Local = append([]byte(nil), bad.Local...)
			op = &bad
		}
		ops = append(ops, op)
	}
	for i, op := range ops {
		if !m.hosts[0].Post(e.ch, op) {
			return fmt.Errorf("operation %d is not accepted", i)
		}
	}
	m.settle()
	if !bed.Run(func() bool { return len(completed) == len(ops) }, time.Minute) {
		return fmt.Errorf("%d of %d operations have completed", len(completed), len(ops))
	}
	bed.Run(func() bool { return false }, time.Second)
	for i, op := range ops {
		at := slices.Index(completed, op)
		got := errs[at]
		switch {
		case i == 2 && !errors.Is(got, refusal.want):
			return fmt.Errorf("the refused operation completes with %v", got)
		case i != 2 && got != nil && !errors.Is(got, rdma.ErrFlushed):
			return fmt.Errorf("WRITE %d completes with %v", i, got)
		case i < 2 && e.ordered && got != nil:
			return fmt.Errorf("WRITE %d was posted before, and completes with %v", i, got)
		case i != 2 && got == nil && !bytes.Equal(e.peer()[i*2000:][:2000], good(i)):
			return fmt.Errorf("WRITE %d completes and is not in memory", i)
		case i > 2 && got != nil && len(failed) == 0:
			return fmt.Errorf("WRITE %d completes with %v, and the channel has not failed", i, got)
		}
	}
	// The part of a WRITE that fits may be in memory; memory without the right stays unchanged.
	untouched := make([]byte, otherSize)
	if !bytes.Equal(other, untouched) || refusal.op.Kind != rdma.OpWrite && !bytes.Equal(one, untouched) {
		return errors.New("memory has changed")
	}
	for side, h := range m.hosts {
		h.Close(m.ends[side][0].ch)
	}
	return errors.Join(m.hosts[0].Err(), m.hosts[1].Err(), bed.Err())
}
