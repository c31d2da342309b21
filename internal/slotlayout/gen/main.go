// Command gen writes lib/src/layout.h, which describes every field, from the types of internal/slotlayout, and
// lib/src/logtable.h.
package main

import (
	"flag"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/fared/fared/internal/slotlayout"
)

func main() {
	root := flag.String("root", ".", "root of the repository")
	flag.Parse()
	if err := run(*root); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(root string) error {
	for name, content := range generate() {
		if err := os.WriteFile(filepath.Join(root, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// record is a record of the layout.
type record struct {
	name string // in C: HEADER
	of   reflect.Type
	// more describes the arrays behind the record.
	more []field
}

// field is an array: an offset or a formula, a size, a name and a description.
type field struct{ at, size, name, doc string }

var records = []record{
	{"header", reflect.TypeFor[slotlayout.Header](), nil},
	{"plane", reflect.TypeFor[slotlayout.Plane](), nil},
	{"source", reflect.TypeFor[slotlayout.Source](), nil},
	{"sub-port", reflect.TypeFor[slotlayout.SubPort](), []field{{fmt.Sprint(slotlayout.SubPortSize), "4 × Sources", "GIDs", "for each source, the index of its RoCEv2 GID in the port's GID table, signed; -1: none"}}},
	{"service", reflect.TypeFor[slotlayout.Service](), nil},
	{"range", reflect.TypeFor[slotlayout.Range](), nil},
	{"vector", reflect.TypeFor[slotlayout.Vector](), []field{{fmt.Sprint(slotlayout.VectorSize), "8 × MaxSlots", "SlotRecords", "the slots"}}},
	{"slot", reflect.TypeFor[slotlayout.Slot](), nil},
	{"pair", reflect.TypeFor[slotlayout.Pair](), []field{
		{fmt.Sprint(slotlayout.PairSize), "8 × ceil(MaxSlots / 64)", "Drains", "bitmap: bit i % 64 of word i / 64 is set if slot i drains for this pair alone"},
		{fmt.Sprintf("%d + 8 × ceil(MaxSlots / 64)", slotlayout.PairSize), "2 × MaxSlots, rounded up to 8, for each service", "Ports", "source port of each slot for the first service, then for the second one, and so on, in the byte order of the machine"},
	}},
}

// constant is a constant of the layout.
type constant struct {
	name  string
	value uint64
	doc   string
}

var constants = []constant{
	{"ORDER", slotlayout.Order, "Order of a file of this machine's byte order"},
	{"LAYOUT", slotlayout.Version, "Layout"},
	{"STATE_LIVE", slotlayout.StateLive, "State: the table has an owner while Heartbeat advances"},
	{"STATE_ENDED", slotlayout.StateEnded, "State: the owner has ended"},
	{"STATE_REPLACED", slotlayout.StateReplaced, "State: another file at the path replaces this one"},
	{"HEARTBEAT_LIMIT", slotlayout.HeartbeatLimit, "age of Heartbeat, ns, from which on the table counts as one without an owner"},
	{"STALE_LIMIT", slotlayout.StaleLimit, "age of Heartbeat, ns, from which on readers report that"},
	{"VECTOR_REACHABLE", slotlayout.VectorReachable, "vector: a plane has capacity toward the destination"},
	{"VECTOR_IN_EFFECT", slotlayout.VectorInEffect, "vector: the data plane forwards by the weights of every plane"},
	{"SLOT_PARKED", slotlayout.SlotParked, "slot: send nothing; the share is 0"},
	{"SLOT_DRAIN", slotlayout.SlotDrain, "slot: it has lost addresses, which may start elsewhere only when everything outstanding on it is complete"},
	{"SLOT_IN_EFFECT", slotlayout.SlotInEffect, "slot: the data plane forwards by the weight of the slot's plane"},
	{"SLOT_WRONG", slotlayout.SlotWrong, "slot: probes by its sub-port toward some destination are lost or go another way"},
	{"PAIR_USED", slotlayout.PairUsed, "pair: the record is in use"},
	{"PAIR_IN_EFFECT", slotlayout.PairInEffect, "pair: the data plane forwards the destination by its vector"},
	{"PLACEMENT_SHIFT", slotlayout.PlacementShift, "pair: first bit of the placement of source ports"},
	{"PLACEMENT_UNIFORM", slotlayout.PlacementUniform, "placement: evenly spread, the hash is unknown"},
	{"PLACEMENT_HASH", slotlayout.PlacementHash, "placement: each port lands on its sub-port by a known hash"},
	{"PLACEMENT_NONE", slotlayout.PlacementNone, "placement: the addressing needs no distinct ports"},
	{"PLACEMENT_ASKED", slotlayout.PlacementAsked, "placement: each port lands on its sub-port by the data plane's answer"},
	{"NO_SUB_PORT", slotlayout.NoSubPort, "slot: its packets are sprayed over the plane"},
	{"INDEX_DELETED", slotlayout.IndexDeleted, "index: a pair was removed here; probing continues"},
	{"MAX_SERVICES", slotlayout.MaxServices, "greatest Services"},
	{"MAX_STEERED", slotlayout.MaxSteered, "greatest Steered"},
	{"MAX_SLOTS", slotlayout.MaxSlots, "greatest MaxSlots"},
}

// generate makes every generated file without writing it.
func generate() map[string][]byte {
	return map[string][]byte{"lib/src/layout.h": header(), "lib/src/logtable.h": logTable()}
}

// define calls fn with the name, the value, its suffix in C and the description of every offset, size and constant.
func define(fn func(name string, value uint64, suffix, doc string)) {
	for _, r := range records {
		name := cName(r.of.Name())
		for i := range r.of.NumField() {
			if f := r.of.Field(i); !strings.HasPrefix(f.Name, "Reserved") {
				fn("L_"+name+"_"+cName(f.Name), uint64(f.Offset), "", fmt.Sprintf("%d bytes: %s", f.Type.Size(), f.Tag.Get("doc")))
			}
		}
		fn("L_"+name+"_BYTES", uint64(r.of.Size()), "", "the size of a record, without the arrays behind it")
	}
	for _, c := range constants {
		suffix := "u"
		if c.value > 1<<32 {
			suffix = "ull"
		}
		fn("L_"+c.name, c.value, suffix, c.doc)
	}
}

// algorithm describes how to read a pair, for readers in other languages.
const algorithm = ` * How to read a pair, without a library. The byte order is that of the machine. Every access is atomic, of 4 bytes for
 * fields of 4 bytes and 8 for others, in acquire order.
 *   1. Map the file read-only. Check Magic, Order, Layout, and that Size is at most the file's size. Take the sizes of
 *      records from the header: later versions may add fields at their end under the same Layout.
 *   2. Hash the addresses of 16 bytes (IPv4 as ::ffff:a.b.c.d), source first, as four words w of 64 bits: h = Seed, then
 *      in order h = mix(h ^ w), where mix(x) is, modulo 2^64,
 *        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9; x = (x ^ x >> 27) * 0x94d049bb133111eb; x ^ x >> 31
 *   3. Read index entries of 32 bits from h % IndexEntries on, cyclically; at an entry 0 the pair is not in the table.
 *      Skip 0xffffffff, and those that differ from h >> 32 in a bit of value IndexEntries or greater. The lower bits of
 *      others are the number of a pair's record plus 1; skip 0. Most often it is record (h >> 32) * Pairs >> 32:
 *      prefetch it.
 *   4. Read the pair's Sequence; if odd, retry. Read the addresses; if they differ, or the flag PAIR_USED is missing,
 *      read Sequence again: if unchanged go on with the next entry, else retry.
 *   5. Read the pair's fields, then Sequence and fields of its vector, then both Sequences again. If one is odd or has
 *      changed, retry from 4; give up as "busy" after a bounded number of retries.
 * A slot's effect flag counts only together with PAIR_IN_EFFECT; a slot drains if its flag or its bit of the pair is
 * set. To wait, use the futex Wake.
`

// header writes the offsets and constants for C.
func header() []byte {
	var b strings.Builder
	b.WriteString("/* Generated by go generate ./internal/slotlayout; do not edit.\n *\n" + algorithm +
		" *\n * The layout of the slot table (docs/slots.md): offsets of the fields in their records, sizes, constants. Fields without a\n" +
		" * name are 0. Arrays behind the records:\n")
	for _, r := range records {
		for _, f := range r.more {
			fmt.Fprintf(&b, " *   %s of a %s, at %s, bytes: %s; %s\n", f.name, r.name, f.at, f.size, f.doc)
		}
	}
	b.WriteString(" */\n#ifndef FARED_LAYOUT_H\n#define FARED_LAYOUT_H\n\n")
	define(func(name string, value uint64, suffix, doc string) {
		fmt.Fprintf(&b, "#define %s %d%s /* %s */\n", name, value, suffix, doc)
	})
	b.WriteString("\n#endif\n")
	return []byte(b.String())
}

// logTable writes log2(1 + i/2^steps) with fraction bits after the point, digit by digit: squaring the mantissa doubles
// its logarithm. Package wecmp has the same table; lib/testdata/keys.txt compares the results.
func logTable() []byte {
	const steps, fraction = 10, 46
	var b strings.Builder
	fmt.Fprintf(&b, "/* Generated by go generate ./internal/slotlayout; do not edit. log2(1 + i/2^LOG_STEPS), LOG_FRACTION bits after the point. */\n")
	fmt.Fprintf(&b, "#define LOG_STEPS %d\n#define LOG_FRACTION %d\n\nstatic const uint64_t log_table[%d] = {", steps, fraction, 1<<steps+1)
	for i := range 1<<steps + 1 {
		var log uint64
		x := uint64(1)<<63 | uint64(i)<<(63-steps)
		if i == 1<<steps {
			log, x = 1<<fraction, 1<<63
		}
		for digit := fraction - 1; digit >= 0 && i < 1<<steps; digit-- {
			hi, _ := bits.Mul64(x, x)
			if x = hi << 1; hi>>63 != 0 {
				log, x = log|1<<digit, hi
			}
		}
		if i%6 == 0 {
			b.WriteString("\n\t")
		} else {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%#x,", log)
	}
	b.WriteString("\n};\n")
	return []byte(b.String())
}

// cName writes the name of a field in capitals: MaxSlots becomes MAX_SLOTS.
func cName(name string) string {
	var b strings.Builder
	for i, c := range name {
		upper := c >= 'A' && c <= 'Z'
		if before := i > 0 && (name[i-1] < 'A' || name[i-1] > 'Z'); upper && i > 0 && (before || i+1 < len(name) && name[i+1] >= 'a' && name[i+1] <= 'z') {
			b.WriteByte('_')
		}
		b.WriteRune(c)
	}
	return strings.ToUpper(b.String())
}
