package status

import (
	"context"
	"errors"
	"net/netip"
	"testing"
)

// TestNext checks that a change of weights after Next has its view before the channel is closed, so that View needs no
// answer of the loop, and that later changes without a Next, and changes of other kinds, build none.
func TestNext(t *testing.T) {
	l := newFake(1, 4)
	key := Key{Prefix: netip.MustParsePrefix("10.9.9.9/32")}
	reader := l.builder.Reader(func(context.Context, func()) error { return errors.New("the loop is busy") })
	change := func() {
		l.builder.MarkDestination(key)
		l.builder.Commit()
	}
	next := reader.Next()
	l.builder.MarkFabric()
	l.builder.Commit()
	select {
	case <-next:
		t.Fatal("a change of the fabric is one of weights")
	default:
	}
	built := l.builder.builds
	change()
	select {
	case <-next:
	default:
		t.Fatal("the channel is open after a change")
	}
	if v, err := reader.View(t.Context()); err != nil || v.Revision() != l.builder.Revision() || l.builder.builds != built+1 {
		t.Errorf("view %v of revision %d, %v, after %d builds", v, l.builder.Revision(), err, l.builder.builds-built)
	}
	change()
	if l.builder.builds != built+1 {
		t.Errorf("%d builds without a Next", l.builder.builds-built-1)
	}
	if _, err := reader.View(t.Context()); err == nil {
		t.Error("a view without the loop")
	}
}
