package journal

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestImage compares the image with the last operation of each object, over destinations with and without source ports,
// slots to drain, source groups and unusual texts: the same operations, and the length of their records.
func TestImage(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		i, model := newImage(), map[string]*farev1.Operation{}
		for range 60 {
			name := []string{"10.0.0.1/32", "10.0.0.2/32", "fd00::1/128", "FD00::1/128", "10.0.0.1/24", "no prefix"}[rng.IntN(6)]
			source := []string{"", "10.255.0.1/32"}[rng.IntN(2)]
			id := source + " " + name
			operation := &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: name, Source: source}}}
			news := model[id] != nil
			if rng.IntN(4) > 0 {
				d := &farev1.Destination{Prefix: name, Source: source, Vector: uint32(rng.IntN(3))}
				switch rng.IntN(4) {
				case 0:
					d.Pairs = []*farev1.PairPorts{{Source: "10.255.0.1", SourcePorts: []uint32{50000}}}
				case 1:
					d.DrainBeforeMove = []uint32{1}
				}
				operation = &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: d}}
				news = !proto.Equal(model[id], operation)
				model[id] = operation
			} else {
				delete(model, id)
			}
			if i.news(operation) != news {
				t.Fatalf("seed %d: news is %v for %v", seed, !news, operation)
			}
			if news {
				b, err := appendRecord(nil, operationRecord, operation)
				if err != nil {
					t.Fatal(err)
				}
				i.apply(operation, int64(len(b)))
			}
		}
		size := int64(len(versionBytes))
		for _, operation := range model {
			b, err := appendRecord(nil, operationRecord, operation)
			if err != nil {
				t.Fatal(err)
			}
			size += int64(len(b))
		}
		items := i.items()
		if i.size() != size || len(items) != len(model) {
			t.Fatalf("seed %d: %d objects of %d bytes, want %d of %d", seed, len(items), i.size(), len(model), size)
		}
		for _, x := range items {
			got := x.set()
			id := fmt.Sprintf("%s %s", got.GetSetDestination().GetSource(), got.GetSetDestination().GetPrefix())
			if !proto.Equal(got, model[id]) {
				t.Fatalf("seed %d: %v, want %v", seed, got, model[id])
			}
		}
	}
}
