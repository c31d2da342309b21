package dpclient

import (
	"math/rand/v2"
	"slices"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

const (
	accepted    = farev1.AckLevel_ACK_LEVEL_ACCEPTED
	inEffect    = farev1.AckLevel_ACK_LEVEL_IN_EFFECT
	approximate = farev1.AckLevel_ACK_LEVEL_APPROXIMATE
	refused     = farev1.AckLevel_ACK_LEVEL_REFUSED
)

// flightsTest compares flights with a model: a list of all operations since the start of the stream.
type flightsTest struct {
	*testing.T
	seed    uint64
	random  *rand.Rand
	f       flights
	model   []sentModel
	last    uint64 // the last one in effect
	objects []*object
	wires   []*wire // the first is nil
}

// sentModel is an operation with its last acknowledgement.
type sentModel struct {
	flight
	level farev1.AckLevel
}

func (x sentModel) answered() bool { return x.level > accepted }

// TestFlightsAgainstAModel sends random operations, and acknowledges them in random order at random levels, with IDs
// that were never sent and repeated answers among them.
func TestFlightsAgainstAModel(t *testing.T) {
	for seed := range uint64(100) {
		x := flightsTest{
			T: t, seed: seed, random: rand.New(rand.NewPCG(seed, 21)),
			objects: []*object{{few: &few{}, wantTo: 1}, {few: &few{}, wantTo: 2}}, wires: []*wire{nil, {id: 1}, {id: 2}},
		}
		x.f.reset()
		for range 100 {
			if x.random.IntN(2) == 0 {
				x.send()
			} else {
				x.acknowledge()
			}
			x.compare()
		}
	}
}

func (t *flightsTest) send() {
	x := flight{
		class: Class(t.random.IntN(int(classes))), object: t.objects[t.random.IntN(2)], value: value{to: t.random.Uint32N(3)},
	}
	switch x.class {
	case VectorSet:
		x.wire, x.content = t.wires[1+t.random.IntN(2)], vector(1, t.random.Uint32N(9))
	case VectorDelete:
		x.wire = t.wires[1+t.random.IntN(2)]
	default:
		x.from = t.wires[t.random.IntN(3)]
	}
	t.f.add(x)
	t.model = append(t.model, sentModel{flight: x})
}

// valid reports whether a data plane that keeps to the protocol may send an acknowledgement.
func (t *flightsTest) valid(ack *farev1.Ack) bool {
	if ack.Id == 0 || ack.Id > uint64(len(t.model)) || t.model[ack.Id-1].answered() {
		return false
	}
	switch ack.Level {
	case accepted, refused:
		return true
	case inEffect:
		return ack.Id > t.last
	case approximate:
		return ack.Id > t.last && t.model[ack.Id-1].class == VectorSet
	}
	return false
}

func (t *flightsTest) acknowledge() {
	ack := &farev1.Ack{Id: t.random.Uint64N(uint64(len(t.model)) + 2), Level: farev1.AckLevel(t.random.IntN(6))}
	valid := t.valid(ack)
	got, err := t.f.answer(ack)
	if (err == nil) != valid {
		t.Fatalf("seed %d: %v of %d operations, the last one in effect %d: %v", t.seed, ack, len(t.model), t.last, err)
	}
	if err != nil {
		return
	}
	x := &t.model[ack.Id-1]
	if x.level = ack.Level; ack.Level == inEffect || ack.Level == approximate {
		t.last = ack.Id
	}
	if got.object != x.object || got.done != x.answered() || (got.approximate != "") != (ack.Level == approximate) {
		t.Fatalf("seed %d: %v returned %+v", t.seed, ack, got)
	}
	if ack.Level == refused {
		t.f.inherit(got, ack.Id)
		rest := t.model[ack.Id:]
		if i := slices.IndexFunc(rest, func(y sentModel) bool { return y.object == x.object }); x.from != nil && i >= 0 {
			rest[i].from = x.from
		}
	}
	t.f.trim()
}

// compare compares the operations with those of the model.
func (t *flightsTest) compare() {
	t.Helper()
	first := slices.IndexFunc(t.model, func(x sentModel) bool { return !x.answered() })
	if first < 0 {
		first = len(t.model)
	}
	if t.f.base != uint64(first)+1 || t.f.next != uint64(len(t.model))+1 || t.f.len() != len(t.model)-first || t.f.effect != t.last {
		t.Fatalf("seed %d: base %d, next %d, %d operations, in effect %d; the model has %d, the first one open is %d, in effect %d",
			t.seed, t.f.base, t.f.next, t.f.len(), t.f.effect, len(t.model), first, t.last)
	}
	open := slices.DeleteFunc(slices.Clone(t.model), sentModel.answered)
	n := 0
	for x := range t.f.unanswered() {
		if n == len(open) || x.object != open[n].object || x.class != open[n].class || x.from != open[n].from {
			t.Fatalf("seed %d: operation %d without an answer is %+v", t.seed, n, x)
		}
		n++
	}
	if n != len(open) {
		t.Fatalf("seed %d: %d operations without an answer, want %d", t.seed, n, len(open))
	}
	t.compareFinal(open)
}

// compareFinal compares the states after all open operations with those of the model.
func (t *flightsTest) compareFinal(open []sentModel) {
	t.Helper()
	before := value{to: 99}
	for _, o := range t.objects {
		want := before
		for _, x := range open {
			if x.object == o {
				want = x.value
			}
		}
		if got := t.f.value(o, before); got != want || t.f.has(o) != (want != before) {
			t.Fatalf("seed %d: value %+v, has %v, want %+v", t.seed, got, t.f.has(o), want)
		}
	}
	for _, w := range t.wires[1:] {
		want, leaves := (*farev1.Vector)(nil), false
		for _, x := range open {
			if x.wire == w {
				want = x.content
			}
			leaves = leaves || x.from == w && x.object.wantTo != 1
		}
		if got := t.f.content(w, nil); got != want || t.f.leaves(w, 1) != leaves {
			t.Fatalf("seed %d: content %v, leaves %v, want %v, %v", t.seed, got, t.f.leaves(w, 1), want, leaves)
		}
	}
}
